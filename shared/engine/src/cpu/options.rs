//! How a model runs on processors.

use treespec_checkpoint::TargetCheckpoint;

use super::{Isa, Precision};

/// Threads, instruction set and arithmetic of a model on the CPU; devices ignore it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads of a forward; 0 takes one per core.
    pub threads: usize,
    /// Instruction set of the kernels; `None` takes the best.
    pub isa: Option<Isa>,
    /// Arithmetic of the linear layers; `None` decides by the target's file, see [`Precision::of_checkpoint`].
    pub precision: Option<Precision>,
}

impl CpuOptions {
    /// Everything in f32 on `threads` threads: what references are compared with.
    pub fn f32(threads: usize) -> Self {
        Self {
            threads,
            isa: None,
            precision: Some(Precision::F32),
        }
    }

    /// The precision that was asked for, or the one for `target`.
    pub(super) fn precision(&self, target: &TargetCheckpoint) -> Precision {
        self.precision
            .unwrap_or_else(|| Precision::of_checkpoint(target))
    }
}
