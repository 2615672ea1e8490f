//! Limits of a target on the device, and whether it fits.

use std::sync::Arc;

use treespec_checkpoint::TargetConfig;

use crate::head_pass::HeadPass;
use crate::{CudaError, Device};

/// Rows of one forward; longer prompts take several.
pub(crate) const MOST_FORWARD_ROWS: usize = 512;

/// Sequences of one forward; what tells the device where they are is copied for all of them.
pub(crate) const MOST_FORWARD_SEQUENCES: usize = 64;

/// Rows of one step over all its trees.
pub(crate) const MOST_STEP_ROWS: usize = 256;

/// Sequences of one step.
pub(crate) const MOST_SEQUENCES: usize = 32;

/// Raised when a change of the kernels changes the bits of a result.
pub(crate) const KERNEL_BUILD: u32 = 1;

/// Device memory that is left to the driver, the kernels and the graphs.
const RESERVE: u64 = 512 << 20;

/// Refuses a target that will not fit before its weights are read.
pub(super) fn preflight(
    device: &Arc<Device>,
    config: &TargetConfig,
    kv_tokens: usize,
) -> Result<(), CudaError> {
    let weights = weight_bytes(config);
    let cache = cache_bytes(config, kv_tokens);
    let work = HeadPass::bytes(config.vocab_size, MOST_STEP_ROWS)
        + (MOST_FORWARD_ROWS * (config.hidden_size * 8 + config.intermediate_size * 4)) as u64;
    let what = format!(
        "the target ({} MiB of weights, {} MiB of KV cache for {kv_tokens} rows, {} MiB to work in)",
        weights >> 20,
        cache >> 20,
        (work + RESERVE) >> 20
    );
    device.preflight(&what, weights + cache + work + RESERVE)
}

fn weight_bytes(config: &TargetConfig) -> u64 {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    );
    let layer = hidden * (2 * q + 2 * kv) + 3 * hidden * inner;
    // The embedding, and the head packed for its kernel.
    (2 * (config.num_layers * layer + 2 * config.vocab_size * hidden)) as u64
}

fn cache_bytes(config: &TargetConfig, kv_tokens: usize) -> u64 {
    let width = crate::padded_dim(config.head_dim) * config.num_kv_heads;
    (config.num_layers * 2 * 2 * width) as u64 * kv_tokens.next_multiple_of(16) as u64
}
