//! The limits of a processor, to judge a forward by.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::kernels::{Isa, Products, ReadProbe, ThreadPool};
use super::{CpuOptions, Executor};
use crate::EngineError;

/// Measurements of each limit, of which the median counts: other processes disturb some of them.
const PASSES: usize = 7;
/// How long one measurement of products takes: long against a burst and against the start of a section.
const PRODUCTS_TIME: Duration = Duration::from_millis(30);

/// What all threads of a forward reach together at best. A product and its addition are two operations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CpuLimits {
    /// Bytes a second that are read from memory.
    pub read_bytes_per_second: f64,
    /// Operations a second on 8-bit integers.
    pub int8_ops_per_second: f64,
    /// Operations a second on bfloat16; `None` where the instruction set has none.
    pub bf16_ops_per_second: Option<f64>,
    /// Operations a second on f32.
    pub f32_ops_per_second: f64,
}

impl CpuLimits {
    /// Measures for about a second, with as many threads and the instruction set that a model with `options` would
    /// have. Takes some 600 MB while it lasts.
    ///
    /// # Errors
    /// Threads or an instruction set that the machine does not have, or no memory.
    pub fn measure(options: &CpuOptions) -> Result<Self, EngineError> {
        let mut executor = Executor::new(options)?;
        let probe = ReadProbe::new().map_err(EngineError::WeightMemory)?;
        let mut pass = executor.begin();
        let isa = pass.isa;
        let pool = &mut *pass.pool;
        Ok(Self {
            read_bytes_per_second: read_rate(pool, isa, &probe),
            int8_ops_per_second: product_rate(pool, isa, Products::Int8),
            bf16_ops_per_second: Products::Bf16
                .available(isa)
                .then(|| product_rate(pool, isa, Products::Bf16)),
            f32_ops_per_second: product_rate(pool, isa, Products::F32),
        })
    }
}

/// Bytes a second.
fn read_rate(pool: &mut ThreadPool, isa: Isa, probe: &ReadProbe) -> f64 {
    median(array::from_fn(|_| {
        let start = Instant::now();
        let bytes = probe.read(pool, isa);
        bytes as f64 / start.elapsed().as_secs_f64()
    }))
}

/// Operations a second.
fn product_rate(pool: &mut ThreadPool, isa: Isa, products: Products) -> f64 {
    median(array::from_fn(|_| {
        let operations = AtomicU64::new(0);
        let start = Instant::now();
        // By time, not by count: instruction sets are a hundred times apart.
        pool.run(&|_| {
            while start.elapsed() < PRODUCTS_TIME {
                operations.fetch_add(products.burst(isa), Ordering::Relaxed);
            }
        });
        operations.into_inner() as f64 / start.elapsed().as_secs_f64()
    }))
}

fn median(mut values: [f64; PASSES]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[PASSES / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_is_a_rate() {
        let options = CpuOptions {
            threads: 2,
            ..CpuOptions::default()
        };
        let limits = CpuLimits::measure(&options).unwrap();
        let rates = [
            limits.read_bytes_per_second,
            limits.int8_ops_per_second,
            limits.f32_ops_per_second,
            limits.bf16_ops_per_second.unwrap_or(1.0),
        ];
        assert!(
            rates.iter().all(|rate| rate.is_finite() && *rate > 0.0),
            "{limits:?}"
        );
    }
}
