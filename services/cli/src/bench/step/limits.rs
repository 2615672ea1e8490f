//! What a step can reach at best on its device, and the share of it that it reaches.

use anyhow::Result;
use serde::Serialize;
use treespec_engine::{CpuLimits, CpuOptions, PackedWeights, TargetWeights};

use super::work::Work;
use crate::bench::{
    gpu::Gpu,
    statistics::{Spread, ratio},
};

/// Where the target runs, with the weights that a step of it takes.
#[derive(Clone)]
pub(super) enum Device {
    Gpu {
        gpu: Gpu,
        /// Bytes of the weights that a step reads.
        weight_bytes: u64,
    },
    Cpu {
        options: CpuOptions,
        weights: TargetWeights,
    },
}

impl Device {
    /// The GPU, if it is one.
    pub(super) fn gpu(&self) -> Option<&Gpu> {
        match self {
            Self::Gpu { gpu, .. } => Some(gpu),
            Self::Cpu { .. } => None,
        }
    }

    /// Runs `steps` between two measurements of the device, which other work may slow at any time.
    ///
    /// # Errors
    /// What `steps` returns, or a device that can't be measured.
    pub(super) fn around<T>(&self, steps: impl FnOnce() -> Result<T>) -> Result<(Limits, T)> {
        match self {
            Self::Gpu { gpu, weight_bytes } => {
                let before = gpu.copy_bandwidth()?;
                let measured = steps()?;
                let limits = Limits::Gpu {
                    weight_bytes: *weight_bytes,
                    copy_bytes_per_second: spread(before, gpu.copy_bandwidth()?),
                };
                Ok((limits, measured))
            }
            Self::Cpu { options, weights } => {
                let before = CpuLimits::measure(options)?;
                let measured = steps()?;
                let limits = CpuBounds::new(*weights, before, CpuLimits::measure(options)?);
                Ok((Limits::Cpu(limits), measured))
            }
        }
    }
}

fn spread(before: f64, after: f64) -> Spread {
    Spread::of([before, after]).expect("two measurements have a spread")
}

/// What a step on a device can reach at best.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(untagged)]
pub(super) enum Limits {
    Gpu {
        /// Bytes of the weights that a step reads.
        weight_bytes: u64,
        /// Bytes a second that a copy reads and writes, measured before and after the steps.
        copy_bytes_per_second: Spread,
    },
    Cpu(CpuBounds),
}

impl Limits {
    /// What a step of `milliseconds` reaches.
    pub(super) fn shares(&self, work: &Work, milliseconds: f64) -> Shares {
        let seconds = milliseconds / 1e3;
        match self {
            Self::Gpu {
                weight_bytes,
                copy_bytes_per_second,
            } => Shares::Gpu {
                share_of_copy: ratio(
                    ratio(*weight_bytes as f64, seconds),
                    copy_bytes_per_second.median,
                ),
            },
            Self::Cpu(bounds) => Shares::Cpu {
                share_of_read: ratio(bounds.read_seconds(), seconds),
                share_of_peak: ratio(bounds.peak_seconds(work), seconds),
            },
        }
    }
}

/// The limits of the processor, measured before and after the steps with the threads of a step. A product and its
/// addition are two operations.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct CpuBounds {
    #[serde(skip)]
    weights: TargetWeights,
    /// Bytes of the packed weights that a step reads.
    weight_bytes: u64,
    /// Bytes a second that are read from memory.
    read_bytes_per_second: Spread,
    /// Operations a second on 8-bit integers in registers.
    int8_ops_per_second: Spread,
    /// Operations a second on bfloat16 in registers, where there are such instructions.
    #[serde(skip_serializing_if = "Option::is_none")]
    bf16_ops_per_second: Option<Spread>,
    /// Operations a second on f32 in registers.
    f32_ops_per_second: Spread,
}

impl CpuBounds {
    fn new(weights: TargetWeights, before: CpuLimits, after: CpuLimits) -> Self {
        let of = |limit: fn(&CpuLimits) -> f64| spread(limit(&before), limit(&after));
        let bf16 = before.bf16_ops_per_second.zip(after.bf16_ops_per_second);
        Self {
            weights,
            weight_bytes: weights.layers.bytes + weights.head.bytes + weights.projection.bytes,
            read_bytes_per_second: of(|limits| limits.read_bytes_per_second),
            int8_ops_per_second: of(|limits| limits.int8_ops_per_second),
            bf16_ops_per_second: bf16.map(|(before, after)| spread(before, after)),
            f32_ops_per_second: of(|limits| limits.f32_ops_per_second),
        }
    }

    /// Seconds in which the machine reads the weights once.
    fn read_seconds(&self) -> f64 {
        ratio(self.weight_bytes as f64, self.read_bytes_per_second.median)
    }

    /// Seconds in which the machine does the multiply-adds of all linear layers, each at the peak of its own numbers.
    fn peak_seconds(&self, work: &Work) -> f64 {
        let TargetWeights {
            layers,
            head,
            projection,
        } = &self.weights;
        self.products_seconds(layers, work.rows())
            + self.products_seconds(head, work.head_rows())
            + self.products_seconds(projection, work.rows())
    }

    fn products_seconds(&self, weights: &PackedWeights, rows: usize) -> f64 {
        let seconds = |weights: u64, peak: Option<Spread>| {
            let operations = 2.0 * weights as f64 * rows as f64;
            ratio(operations, peak.map_or(0.0, |peak| peak.median))
        };
        seconds(weights.int8, Some(self.int8_ops_per_second))
            + seconds(weights.bf16, self.bf16_ops_per_second)
            + seconds(weights.f32, Some(self.f32_ops_per_second))
    }
}

/// The shares of a device's limits that a step reaches.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub(super) enum Shares {
    Gpu {
        /// Share of the copy's rate at which the weights are read.
        share_of_copy: f64,
    },
    Cpu {
        /// Share of the memory's rate at which the weights are read.
        share_of_read: f64,
        /// Share of the processor's rate at which the linear layers multiply and add.
        share_of_peak: f64,
    },
}

impl Shares {
    /// Title and value of its columns in a table.
    pub(super) fn columns(&self) -> Vec<(&'static str, f64)> {
        match *self {
            Self::Gpu { share_of_copy } => vec![("of copy", share_of_copy)],
            Self::Cpu {
                share_of_read,
                share_of_peak,
            } => vec![("of read", share_of_read), ("of peak", share_of_peak)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 3 MB of layers in integers, 1 MB of a head in f32, and a projection in bfloat16.
    const WEIGHTS: TargetWeights = TargetWeights {
        layers: PackedWeights {
            bytes: 3_000_000,
            int8: 4_000_000,
            bf16: 0,
            f32: 0,
        },
        head: PackedWeights {
            bytes: 1_000_000,
            int8: 0,
            bf16: 0,
            f32: 250_000,
        },
        projection: PackedWeights {
            bytes: 1_000_000,
            int8: 0,
            bf16: 500_000,
            f32: 0,
        },
    };

    fn limits(factor: f64) -> CpuLimits {
        CpuLimits {
            read_bytes_per_second: 10e9 * factor,
            int8_ops_per_second: 80e9 * factor,
            bf16_ops_per_second: Some(20e9 * factor),
            f32_ops_per_second: 10e9 * factor,
        }
    }

    fn shares(work: &Work, milliseconds: f64) -> [f64; 2] {
        // The machine is faster after the steps: what counts is the middle, the rates of `limits(1.0)`.
        let bounds = CpuBounds::new(WEIGHTS, limits(0.75), limits(1.25));
        let shares = Limits::Cpu(bounds).shares(work, milliseconds);
        let columns = shares.columns();
        assert_eq!(columns[0].0, "of read");
        assert_eq!(columns[1].0, "of peak");
        [columns[0].1, columns[1].1]
    }

    fn assert_close(shares: [f64; 2], expected: [f64; 2]) {
        let near = shares
            .iter()
            .zip(expected)
            .all(|(share, expected)| (share - expected).abs() < 1e-12);
        assert!(near, "{shares:?}, not {expected:?}");
    }

    #[test]
    fn a_step_reads_all_weights_once_and_multiplies_them_for_every_row() {
        // 5 MB take 0.5 ms. A row takes 8 Mop of integers (0.1 ms), 1 Mop of bfloat16 (0.05 ms) and 0.5 Mop of f32 (0.05 ms).
        let one = Work::new(1, 560).unwrap();
        assert_close(shares(&one, 1.0), [0.5, 0.2]);
        let four = Work::new(4, 560).unwrap();
        assert_close(shares(&four, 1.0), [0.5, 0.8]);
        assert_close(shares(&four, 2.0), [0.25, 0.4]);
    }

    #[test]
    fn the_head_runs_for_one_row_of_a_prompt() {
        let prompt = Work::new(400, 560).unwrap();
        assert_close(
            shares(&prompt, 100.0),
            [0.005, (400.0 * 0.15 + 0.05) / 100.0],
        );
    }

    #[test]
    fn limits_are_fields_of_their_device() {
        let bounds = CpuBounds::new(WEIGHTS, limits(1.0), limits(1.0));
        let cpu = serde_json::to_value(Limits::Cpu(bounds)).unwrap();
        assert_eq!(cpu["weight_bytes"], 5_000_000);
        assert_eq!(cpu["read_bytes_per_second"]["median"], 10e9);
        assert_eq!(cpu["int8_ops_per_second"]["min"], 80e9);
        assert!(cpu.get("copy_bytes_per_second").is_none());
        let shares = Shares::Gpu { share_of_copy: 0.5 };
        let gpu = serde_json::to_value(shares).unwrap();
        assert_eq!(gpu, serde_json::json!({ "share_of_copy": 0.5 }));
    }
}
