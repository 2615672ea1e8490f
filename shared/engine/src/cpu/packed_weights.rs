//! What linear layers take of a processor.

use std::iter::Sum;
use std::ops::Add;

/// Matrices as packed for the CPU: what one pass over them reads, and by which products it multiplies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PackedWeights {
    /// Bytes with scales and padding.
    pub bytes: u64,
    /// Weights that are multiplied as 8-bit integers.
    pub int8: u64,
    /// Weights that are multiplied as bfloat16.
    pub bf16: u64,
    /// Weights that are multiplied as f32, whatever they are stored as.
    pub f32: u64,
}

impl Add for PackedWeights {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            int8: self.int8 + other.int8,
            bf16: self.bf16 + other.bf16,
            f32: self.f32 + other.f32,
        }
    }
}

impl Sum for PackedWeights {
    fn sum<I: Iterator<Item = Self>>(weights: I) -> Self {
        weights.fold(Self::default(), Add::add)
    }
}
