//! Targets and drafters on NVIDIA GPUs, the whole step on the device.
//!
//! The driver and the kernel compiler are loaded at run time: this crate builds and starts without CUDA. Kernels are
//! CUDA C++ in `src/kernels`, compiled for the device at hand by NVRTC at the first start and cached.

mod acceptance;
mod activations;
mod attention;
mod bandwidth;
mod batch_inputs;
mod buffer;
mod candidate_ranking;
mod compile;
mod decoder;
mod device;
mod draft_tree;
mod drafter;
mod error;
mod features;
mod graph;
mod graph_cache;
mod head_pass;
mod head_select;
mod kernel_variants;
mod kv_cache;
mod launch;
mod linear;
mod rotary;
mod row_metadata;
mod rows;
mod sampling;
mod speculator;
mod step_rows;
mod target;
mod vocabulary;

/// Says "none" in u32 arrays of tokens, nodes, slots, blocks and sequences, on the host and in kernels.
pub(crate) const NONE: u32 = u32::MAX;

pub use acceptance::{
    AcceptanceBuffers, AcceptanceKernels, MOST_PATH, Outcome, RootRows, TargetChoices,
    VerifiedRows, Walked,
};
pub use attention::{AttentionKernels, AttentionPlan, AttentionShape, Visibility};
pub use bandwidth::copy_bandwidth;
pub use buffer::{DeviceBuffer, DevicePtr, DeviceValue, PinnedBuffer};
pub use candidate_ranking::{CandidateRanking, SequenceRanking};
pub use compile::{Function, KernelSource, Module, compile_for};
pub use device::{Device, Stream};
pub use draft_tree::{
    BatchState, DraftCandidates, DraftRecords, DraftRows, DraftTreeKernels, MOST_DEPTHS,
};
pub use drafter::CudaDrafter;
pub use error::CudaError;
pub use graph::{Event, Graph};
pub use head_select::{HeadLogits, HeadSelectKernels, HeadTop, HeadTopBuffers, MOST_TOP};
pub use kernel_variants::{KernelVariant, kernel_variants};
pub use kv_cache::{AcceptedPaths, CompactionKernels, KvCache, KvLayer, KvShape, padded_dim};
pub use launch::{Argument, Launch, profile_kernels};
pub use linear::{
    Epilogue, Layout, LinearKernels, LinearShape, LinearTuning, PackedLinear, RowScale, Tap,
};
pub use rotary::{ContextRows, HeadNorms, RotaryKernels};
pub use row_metadata::{
    MAX_PATH, NewRow, RowArrays, RowBuffers, RowExtent, RowLimits, RowWriter, Sight,
};
pub use rows::{PackedRows, RowKernels, row_bucket};
pub use sampling::{SampledRows, Sampler, SamplerRoom};
pub use speculator::CudaSpeculator;
pub use target::CudaTarget;
