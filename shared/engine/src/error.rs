use treespec_checkpoint::CheckpointError;

use crate::{DeviceChoice, Isa};

/// What can go wrong in a model. Messages are one line and name the value at fault.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The weights could not be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A token id outside the vocabulary.
    #[error("token id {token} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Number of rows of the embedding.
        vocab_size: usize,
    },
    /// A row beyond the positions that the model was trained for.
    #[error("position {position} is beyond the context length {context_length}")]
    ContextOverflow {
        /// Absolute position, counted from 0.
        position: usize,
        /// Positions that the model has.
        context_length: usize,
    },
    /// The caller's batch contradicts itself.
    #[error("invalid batch: {0}")]
    InvalidBatch(String),
    /// More threads than any machine has cores for.
    #[error("--threads {threads} is above the limit of {limit}")]
    TooManyThreads {
        /// Threads asked for.
        threads: usize,
        /// The most that are taken.
        limit: usize,
    },
    /// The operating system refuses a thread.
    #[error("cannot start a thread of the forward: {0}")]
    Thread(String),
    /// An instruction set was asked for that this processor lacks.
    #[error(
        "this processor has no {0} instructions: leave the choice to the program, or name one that it has"
    )]
    UnavailableIsa(Isa),
    /// The operating system refuses memory for the weights.
    #[error("no memory for the packed weights: {0}")]
    WeightMemory(std::io::Error),
    /// No free KV blocks.
    #[error("the KV cache has {free} free blocks of {wanted} wanted")]
    OutOfBlocks {
        /// Blocks asked for.
        wanted: usize,
        /// Blocks left.
        free: usize,
    },
    /// A drafter context that was never opened, or was closed.
    #[error("drafter context {0} is not open")]
    UnknownContext(u64),
    /// All contexts are taken.
    #[error("all {0} drafter contexts are in use")]
    OutOfContexts(usize),
    /// Context rows that do not continue the context.
    #[error("context rows start at {start} but the drafter's context ends at {expected}")]
    ContextGap {
        /// First position of the rows.
        start: u32,
        /// First position that the drafter lacks.
        expected: u32,
    },
    /// A top-k pass was asked of a drafter that was loaded without a head.
    #[error("this drafter was loaded without a head; run the top-k pass on verify")]
    NoHead,
    /// Weights or activations that are not numbers.
    #[error("the model produced no finite logit for row {row}")]
    NonFiniteLogits {
        /// Index among the head rows of the call.
        row: usize,
    },
    /// A device that this program was built without.
    #[error("{0} needs a build with CUDA: rebuild with `--features cuda`")]
    DeviceNotBuilt(DeviceChoice),
    /// The device cannot be opened, or its kernels cannot be compiled. An error of the start.
    #[error("{0}")]
    Device(String),
    /// The device failed in a way that it does not recover from. Every later call fails too.
    #[error("the device is lost: {0}")]
    DeviceLost(String),
    /// The device has no memory left for a call.
    #[error("{what} needs {wanted_bytes} bytes of device memory, {free_bytes} are free")]
    OutOfDeviceMemory {
        /// Bytes asked for.
        wanted_bytes: u64,
        /// Bytes left.
        free_bytes: u64,
        /// What they were for.
        what: String,
    },
}

impl EngineError {
    /// True when the model cannot be used any more.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::DeviceLost(_))
    }
}
