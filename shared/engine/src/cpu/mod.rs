//! The CPU backend: everything in f32, weights packed once at load, kernels chosen at run time.

mod decoder;
mod drafter;
mod embedding;
mod kernels;
mod target;

pub use drafter::{CpuDrafter, DrafterOptions};
pub use kernels::Isa;
pub use target::{CpuTarget, TargetOptions};

use crate::EngineError;

/// Most threads of a forward.
const MAX_THREADS: usize = 256;

/// Raised when a change of the kernels changes the bits of a result.
const KERNEL_BUILD: u32 = 1;

/// Threads and instruction set of a forward.
struct Executor {
    pool: kernels::ThreadPool,
    isa: Isa,
}

impl Executor {
    /// `threads` = 0 takes one per core that the process may use.
    fn new(threads: usize, isa: Option<Isa>) -> Result<Self, EngineError> {
        let threads = match threads {
            0 => std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(MAX_THREADS),
            threads if threads > MAX_THREADS => {
                return Err(EngineError::TooManyThreads {
                    threads,
                    limit: MAX_THREADS,
                });
            }
            threads => threads,
        };
        Ok(Self {
            pool: kernels::ThreadPool::new(threads)
                .map_err(|error| EngineError::Thread(error.to_string()))?,
            isa: isa.unwrap_or_else(Isa::detect),
        })
    }

    fn linear(
        &mut self,
        x: &[f32],
        rows: usize,
        weights: &kernels::PackedLinear,
        out: &mut [f32],
        epilogue: kernels::Epilogue,
    ) {
        kernels::linear(&mut self.pool, self.isa, x, rows, weights, out, epilogue);
    }

    fn numerics_profile(&self) -> String {
        format!(
            "f32/{}-{}/tp1/k{KERNEL_BUILD}",
            std::env::consts::ARCH,
            self.isa.name()
        )
    }
}
