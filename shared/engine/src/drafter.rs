//! The seam between the draft service and a drafter on some device.

use std::ops::Range;
use std::time::{Duration, Instant};

use treespec_checkpoint::CouplingProfile;
use treespec_sampling::Coupling;
use treespec_tree::TokenTree;

use crate::{CoupledRanking, DraftShape, EngineError, HeadRow, build_draft};

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

impl DrafterSpec {
    /// Rows in arriving `features` (`[rows, hidden_size]`, row-major).
    ///
    /// # Errors
    ///
    /// [`EngineError::InvalidBatch`] for a part of a row.
    pub fn context_rows(&self, features: &[f32]) -> Result<usize, EngineError> {
        let (values, width) = (features.len(), self.hidden_size);
        if !values.is_multiple_of(width) {
            return Err(EngineError::InvalidBatch(format!(
                "{values} feature values are not a whole number of rows of {width}"
            )));
        }
        Ok(values / width)
    }
}

/// One block to draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRequest {
    /// The sequence; the block starts where its context ends.
    pub context: ContextId,
    /// The decided token at that position.
    pub root_token: u32,
}

/// One draft to make.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftRequest {
    /// The block that the draft is built from.
    pub block: BlockRequest,
    /// Shape of the draft.
    pub shape: DraftShape,
    /// Nodes deeper than this are cut from the finished tree, so that a draft near the context length is a part of the
    /// one that would be made without it.
    pub max_depth: usize,
    /// How the candidates take part in the draw of the target's tokens; `None` ranks them by their probability.
    pub coupling: Option<Coupling>,
}

impl DraftRequest {
    /// Candidates per depth that the top-k pass must find.
    pub fn candidates_per_depth(&self, vocab_size: usize) -> usize {
        match self.coupling {
            None => self.shape.candidates_per_depth(vocab_size),
            Some(_) => self.shape.coupled_candidates_per_depth(vocab_size),
        }
    }
}

/// A draft and what it cost. The passes are shared by a batch, and each draft reports the whole pass: that is how long
/// it waited for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Drafted {
    /// The draft below the request's root.
    pub tree: TokenTree,
    /// The drafter's forward.
    pub forward: Duration,
    /// The top-k pass over the vocabulary.
    pub head: Duration,
    /// Tree construction.
    pub build: Duration,
}

/// A block-diffusion drafter (DFlash): context features in, final hidden rows of a block out.
pub trait Drafter: Send {
    /// Sizes, constant for the life of the drafter.
    fn spec(&self) -> &DrafterSpec;

    /// What was fitted to this drafter for sampled answers.
    fn coupling_profile(&self) -> Option<&CouplingProfile> {
        None
    }

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

    /// Likewise for slots `1..=slots[i]` of block `i` only, `[sum(slots), hidden_size]`. A drafter can save the work of
    /// the others in its last layer.
    ///
    /// # Errors
    /// As [`Self::block_hidden`].
    fn first_slots(
        &mut self,
        blocks: &[BlockRequest],
        slots: &[usize],
    ) -> Result<Vec<f32>, EngineError> {
        let width = self.spec().hidden_size;
        let block_values = self.spec().block_size.saturating_sub(1) * width;
        let hidden = self.block_hidden(blocks)?;
        if block_values == 0 || hidden.len() != blocks.len() * block_values {
            return Err(EngineError::InvalidBatch(format!(
                "the drafter returned {} values for {} blocks of {block_values}",
                hidden.len(),
                blocks.len()
            )));
        }
        let mut first = Vec::with_capacity(slots.iter().sum::<usize>() * width);
        for (block, &slots) in hidden.chunks_exact(block_values).zip(slots) {
            first.extend_from_slice(&block[..(slots * width).min(block_values)]);
        }
        Ok(first)
    }

    /// The k best tokens and the log-normaliser of each row of `hidden`, `[n, hidden_size]`, by the target's head.
    ///
    /// # Errors
    /// [`EngineError::NoHead`] when it was loaded without one.
    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError>;

    /// Drafts for all requests with one forward and one top-k pass. One result per request, in order.
    ///
    /// # Errors
    /// As [`Drafter::block_hidden`] and [`Drafter::head_topk`]. A failure is one of the whole batch.
    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Drafted>, EngineError> {
        draft_by_block(self, requests)
    }
}

/// [`Drafter::draft`] by [`Drafter::block_hidden`], [`Drafter::head_topk`] and [`build_draft`].
fn draft_by_block<D: Drafter + ?Sized>(
    drafter: &mut D,
    requests: &[DraftRequest],
) -> Result<Vec<Drafted>, EngineError> {
    let started = Instant::now();
    let blocks: Vec<BlockRequest> = requests.iter().map(|request| request.block).collect();
    let spec = drafter.spec();
    let (block_size, vocab_size) = (spec.block_size, spec.vocab_size);
    let slots: Vec<usize> = requests
        .iter()
        .map(|request| request.shape.depths(block_size))
        .collect();
    let hidden = drafter.first_slots(&blocks, &slots)?;
    let forward = started.elapsed();

    let started = Instant::now();
    // A builder reads no further than its budget, so the widest request serves all.
    let candidates = requests
        .iter()
        .map(|request| request.candidates_per_depth(vocab_size))
        .max()
        .unwrap_or(0);
    let mut rows = drafter.head_topk(&hidden, candidates)?.into_iter();
    let head = started.elapsed();

    let drafts = requests.iter().map(|request| {
        let started = Instant::now();
        let depths = request.shape.depths(block_size);
        let mut rows: Vec<HeadRow> = rows.by_ref().take(depths).collect();
        // Noise reaches as far as a request's own candidates: its company must not change a draft.
        let own = request.candidates_per_depth(vocab_size);
        rows.iter_mut().for_each(|row| row.top.truncate(own));
        let root_position = drafter.context(request.block.context)?.end;
        let profile = drafter.coupling_profile();
        let ranking = request
            .coupling
            .and_then(|coupling| CoupledRanking::new(coupling, profile, root_position));
        let root = request.block.root_token;
        let mut tree = build_draft(root, &rows, request.shape, ranking.as_ref());
        tree.truncate_depth(u32::try_from(request.max_depth).unwrap_or(u32::MAX));
        Ok(Drafted {
            tree,
            forward,
            head,
            build: started.elapsed(),
        })
    });
    drafts.collect()
}

impl<D: Drafter + ?Sized> Drafter for Box<D> {
    fn spec(&self) -> &DrafterSpec {
        (**self).spec()
    }

    fn coupling_profile(&self) -> Option<&CouplingProfile> {
        (**self).coupling_profile()
    }

    fn open(&mut self) -> Result<ContextId, EngineError> {
        (**self).open()
    }

    fn close(&mut self, context: ContextId) {
        (**self).close(context);
    }

    fn context(&self, context: ContextId) -> Result<Range<u32>, EngineError> {
        (**self).context(context)
    }

    fn append_context(
        &mut self,
        context: ContextId,
        start: u32,
        rows: &[f32],
    ) -> Result<(), EngineError> {
        (**self).append_context(context, start, rows)
    }

    fn block_hidden(&mut self, blocks: &[BlockRequest]) -> Result<Vec<f32>, EngineError> {
        (**self).block_hidden(blocks)
    }

    fn first_slots(
        &mut self,
        blocks: &[BlockRequest],
        slots: &[usize],
    ) -> Result<Vec<f32>, EngineError> {
        (**self).first_slots(blocks, slots)
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        (**self).head_topk(hidden, k)
    }

    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Drafted>, EngineError> {
        (**self).draft(requests)
    }
}
