//! Threads, instruction set and scratch of the forwards of one model.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::kernels::{
    Epilogue, HeadPass, HeadScratch, Heads, InputScratch, Isa, KvLayer, NormWeights, PackedLinear,
    RotaryRows, RowView, ThreadPool, attend, linear, linear_columns, rms_norm, rotate, select,
};
use super::{CpuOptions, Precision};
use crate::{EngineError, HeadRow};

/// Most threads of a forward.
const MAX_THREADS: usize = 256;

/// Raised when a change of the kernels changes the bits of a result.
const KERNEL_BUILD: u32 = 2;

/// What the forwards of one model run on.
pub(super) struct Executor {
    /// Shared by models that never run at the same time, so that idle threads of one do not take the cores of the other.
    pool: Arc<Mutex<ThreadPool>>,
    isa: Isa,
    input: InputScratch,
    head: HeadScratch,
}

impl Executor {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`EngineError::TooManyThreads`], [`EngineError::Thread`] or [`EngineError::UnavailableIsa`].
    pub(super) fn new(options: &CpuOptions) -> Result<Self, EngineError> {
        let threads = match options.threads {
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
        let isa = options.isa.unwrap_or_else(Isa::detect);
        if !isa.is_available() {
            return Err(EngineError::UnavailableIsa(isa));
        }
        let pool =
            ThreadPool::new(threads).map_err(|error| EngineError::Thread(error.to_string()))?;
        Ok(Self {
            pool: Arc::new(Mutex::new(pool)),
            isa,
            input: InputScratch::default(),
            head: HeadScratch::default(),
        })
    }

    /// An executor of another model on the same threads.
    pub(super) fn beside(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            isa: self.isa,
            input: InputScratch::default(),
            head: HeadScratch::default(),
        }
    }

    /// Instruction set of the kernels.
    pub(super) fn isa(&self) -> Isa {
        self.isa
    }

    /// Wakes the threads for one forward.
    pub(super) fn begin(&mut self) -> Pass<'_> {
        // A panic inside a section was passed on to its caller and leaves the pool as it was.
        let pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        pool.rouse();
        Pass {
            pool,
            isa: self.isa,
            input: &mut self.input,
            head: &mut self.head,
        }
    }

    pub(super) fn numerics_profile(&self, precision: Precision) -> String {
        format!(
            "{}/{}-{}/tp1/k{KERNEL_BUILD}",
            precision.name(),
            std::env::consts::ARCH,
            self.isa.name()
        )
    }
}

/// One forward: while it lives, the threads wait for work awake.
pub(super) struct Pass<'a> {
    pub(super) pool: MutexGuard<'a, ThreadPool>,
    pub(super) isa: Isa,
    input: &'a mut InputScratch,
    head: &'a mut HeadScratch,
}

impl Pass<'_> {
    /// `out = epilogue(x W^T)`, see [`linear`].
    pub(super) fn linear(
        &mut self,
        x: &[f32],
        rows: usize,
        weights: &PackedLinear,
        out: &mut [f32],
        epilogue: Epilogue,
    ) {
        let input = self
            .input
            .encode(&mut self.pool, self.isa, x, rows, weights);
        linear(&mut self.pool, self.isa, &input, weights, out, epilogue);
    }

    /// The output columns `range` of `weights`, see [`linear_columns`].
    pub(super) fn linear_columns(
        &mut self,
        x: &[f32],
        rows: usize,
        (weights, range): (&PackedLinear, Range<usize>),
        out: &mut [f32],
    ) {
        let input = self
            .input
            .encode(&mut self.pool, self.isa, x, rows, weights);
        linear_columns(&mut self.pool, self.isa, &input, weights, range, out);
    }

    /// Normalises, rotates and scales heads, see [`rotate`].
    pub(super) fn rotate(
        &mut self,
        heads: Heads<'_>,
        rotary: &RotaryRows,
        out: &mut [f32],
        out_width: usize,
    ) {
        rotate(&mut self.pool, self.isa, heads, rotary, out, out_width);
    }

    /// Attention of rows to what `views` show, see [`attend`].
    pub(super) fn attend(
        &mut self,
        queries: &[f32],
        kv: &KvLayer,
        views: &[RowView<'_>],
        out: &mut [f32],
    ) {
        attend(&mut self.pool, self.isa, queries, kv, views, out);
    }

    /// Runs a head, see [`select`].
    pub(super) fn select(&mut self, pass: HeadPass<'_>) -> Vec<HeadRow> {
        select(&mut self.pool, self.isa, self.input, self.head, pass)
    }

    /// `out = rms_norm(x)`, see [`rms_norm`].
    pub(super) fn rms_norm(&mut self, norm: &NormWeights, x: &[f32], out: &mut [f32]) {
        rms_norm(&mut self.pool, self.isa, norm, x, out);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.pool.rest();
    }
}
