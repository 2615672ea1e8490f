//! The seam between the draft service and a drafter on some device.

use std::ops::Range;

use crate::{EngineError, HeadRow};

/// Handle of one sequence's context inside a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContextId(pub(crate) u64);

impl ContextId {
    /// A handle with a chosen number, for scripted drafters in tests.
    pub fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The number.
    pub fn raw(self) -> u64 {
        self.0
    }
}

/// Sizes of a drafter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrafterSpec {
    /// Slots of a block: the root's and `block_size - 1` masks, so a block drafts `block_size - 1` tokens.
    pub block_size: usize,
    /// Width of features and hidden rows.
    pub hidden_size: usize,
    /// Vocabulary of the target's embedding and head.
    pub vocab_size: usize,
    /// Context rows kept per sequence; older ones are dropped, which costs acceptance, never correctness.
    pub context_window: usize,
    /// Decoder layers.
    pub num_layers: usize,
}

/// One block to draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRequest {
    /// The sequence; the block starts where its context ends.
    pub context: ContextId,
    /// The decided token at that position.
    pub root_token: u32,
}

/// A block-diffusion drafter (DFlash): context features in, final hidden rows of a block out.
pub trait Drafter: Send {
    /// Sizes, constant for the life of the drafter.
    fn spec(&self) -> &DrafterSpec;

    /// Opens an empty context.
    ///
    /// # Errors
    /// [`EngineError::OutOfContexts`].
    fn open(&mut self) -> Result<ContextId, EngineError>;

    /// Frees a context. An unknown one is ignored.
    fn close(&mut self, context: ContextId);

    /// Absolute positions that the context holds.
    ///
    /// # Errors
    /// [`EngineError::UnknownContext`].
    fn context(&self, context: ContextId) -> Result<Range<u32>, EngineError>;

    /// Appends feature rows `hidden_norm(fc(concat taps))`, `rows` is `[n, hidden_size]`, for the positions from
    /// `start`. `start` must be the end of the context; an empty context may begin anywhere.
    ///
    /// # Errors
    /// [`EngineError::ContextGap`], [`EngineError::UnknownContext`], [`EngineError::ContextOverflow`] or
    /// [`EngineError::InvalidBatch`] when `rows` is not a whole number of rows.
    fn append_context(
        &mut self,
        context: ContextId,
        start: u32,
        rows: &[f32],
    ) -> Result<(), EngineError>;

    /// One forward over all blocks. Returns the final hidden rows of slots `1..block_size` of every request,
    /// `[blocks * (block_size - 1), hidden_size]`; slot `j` predicts the token at position `context end + j`.
    ///
    /// # Errors
    /// [`EngineError::UnknownContext`], [`EngineError::UnknownToken`] or [`EngineError::ContextOverflow`].
    fn block_hidden(&mut self, blocks: &[BlockRequest]) -> Result<Vec<f32>, EngineError>;

    /// The k best tokens and the log-normaliser of each row of `hidden`, `[n, hidden_size]`, by the target's head.
    ///
    /// # Errors
    /// [`EngineError::NoHead`] when it was loaded without one.
    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError>;
}
