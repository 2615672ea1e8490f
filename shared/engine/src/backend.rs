//! The seam between the verify service and a target on some device.

use crate::verification::{self, StepBatch, StepOutput};
use crate::{BlockTable, EngineError, HeadRow, PrefillMode, RowBatch};

/// Sizes and identity of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetSpec {
    /// For example `llama`.
    pub architecture: &'static str,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Positions that the model was trained for.
    pub context_length: usize,
    /// KV blocks of [`crate::BLOCK_TOKENS`] rows.
    pub num_blocks: usize,
    /// Width of a feature row, `None` when no projection was loaded.
    pub feature_size: Option<usize>,
    /// `{dtype}/{device architecture}/tp{N}/{kernel build}`: equal profiles give equal bits.
    pub numerics_profile: String,
}

/// What a forward returns for one sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ForwardOutput {
    /// One entry per row that asked for the head, in row order.
    pub head: Vec<HeadRow>,
    /// `[rows, feature_size]`: `hidden_norm(fc(concat taps))` of every row, when asked for.
    pub features: Vec<f32>,
}

/// Progress of loading weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of the checkpoint read so far.
    pub done_bytes: u64,
    /// Bytes of the checkpoint.
    pub total_bytes: u64,
}

/// A target on some device. Results are row-invariant by bits, see the crate documentation.
pub trait Backend: Send {
    /// Sizes and identity, constant for the life of the backend.
    fn spec(&self) -> &TargetSpec;

    /// Runs all rows in one forward and writes their keys and values to the cache. One output per sequence.
    ///
    /// # Errors
    /// What [`crate::SequenceRows::validate`] finds, [`EngineError::NonFiniteLogits`], or a fault of the device.
    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<Vec<ForwardOutput>, EngineError>;

    /// Keeps the rows `path` (ascending, relative to `committed`) of the last forward: moves the keys and values of
    /// row `path[i]` to slot `committed + i`. The caller counts `committed + path.len()` rows from then on.
    ///
    /// # Errors
    /// [`EngineError::InvalidBatch`] when the path does not ascend or leaves the table.
    fn compact(
        &mut self,
        table: &BlockTable,
        committed: usize,
        path: &[usize],
    ) -> Result<(), EngineError>;

    /// The k best tokens and the log-normaliser of each row of `hidden`, `[n, hidden_size]`: the drafter's block
    /// through the target's head.
    ///
    /// # Errors
    /// [`EngineError::InvalidBatch`] when `hidden` is not a whole number of rows.
    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError>;

    /// One step: all rows and trees in one forward; then every tree's choices, its acceptance walk and the compaction of
    /// the accepted path.
    ///
    /// A failure commits nothing: the caller may run the same positions again.
    ///
    /// # Errors
    /// As [`Backend::forward`] and [`Backend::compact`].
    fn step(&mut self, batch: &StepBatch<'_>) -> Result<StepOutput, EngineError> {
        verification::step_by_forward(self, batch)
    }

    /// How the prompts of later forwards are computed; [`PrefillMode::Exact`] until told otherwise.
    ///
    /// # Errors
    /// [`EngineError::Device`] when this device has no such mode or cannot prepare it.
    fn set_prefill(&mut self, mode: PrefillMode) -> Result<(), EngineError> {
        match mode {
            PrefillMode::Exact => Ok(()),
            PrefillMode::Fast => Err(EngineError::Device(
                "--prefill fast needs a GPU: leave it out, or give --device cuda:N".into(),
            )),
        }
    }
}

impl<B: Backend + ?Sized> Backend for Box<B> {
    fn spec(&self) -> &TargetSpec {
        (**self).spec()
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<Vec<ForwardOutput>, EngineError> {
        (**self).forward(batch)
    }

    fn compact(
        &mut self,
        table: &BlockTable,
        committed: usize,
        path: &[usize],
    ) -> Result<(), EngineError> {
        (**self).compact(table, committed, path)
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        (**self).head_topk(hidden, k)
    }

    fn step(&mut self, batch: &StepBatch<'_>) -> Result<StepOutput, EngineError> {
        (**self).step(batch)
    }

    fn set_prefill(&mut self, mode: PrefillMode) -> Result<(), EngineError> {
        (**self).set_prefill(mode)
    }
}
