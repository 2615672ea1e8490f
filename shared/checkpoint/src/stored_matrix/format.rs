use half::bf16;

use super::blocks::{Q4_0Block, Q4_1Block, Q8_0Block};
use super::superblocks::{Q4KBlock, Q6KBlock};

/// Number formats that keep their values when an engine widens them to f32 itself.
///
/// Blocks are those of ggml-quants. Products and sums are f32, rounded after each operation; no product of finite scales
/// needs rounding, so fused operations give the same values.
#[allow(non_camel_case_types, reason = "ggml's names")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFormat {
    /// IEEE single precision. Formats that are not listed here come as this.
    F32,
    /// bfloat16.
    Bf16,
    /// 32 values in 34 bytes, [`Q8_0Block`]: `d * q`.
    Q8_0,
    /// 32 values in 18 bytes, [`Q4_0Block`]: `d * (q - 8)`.
    Q4_0,
    /// 32 values in 20 bytes, [`Q4_1Block`]: `d * q + m`.
    Q4_1,
    /// 256 values in 144 bytes, [`Q4KBlock`]: `(d * sc) * q - (dmin * m)`.
    Q4_K,
    /// 256 values in 210 bytes, [`Q6KBlock`]: `(d * sc) * (q - 32)`.
    Q6_K,
}

impl MatrixFormat {
    /// Values per block of Q8_0, Q4_0 and Q4_1; their rows are whole blocks.
    pub const BLOCK: usize = 32;
    /// Values per block of Q4_K and Q6_K (ggml's `QK_K`); their rows are whole superblocks.
    pub const SUPERBLOCK: usize = 256;

    /// Bytes of a row of `columns` values, `None` when they are not whole blocks or the size overflows.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let (values, bytes) = self.block();
        columns
            .is_multiple_of(values)
            .then_some(columns / values)?
            .checked_mul(bytes)
    }

    /// Values and bytes of what a row is a whole number of.
    fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, size_of::<f32>()),
            Self::Bf16 => (1, size_of::<bf16>()),
            Self::Q8_0 => (Self::BLOCK, Q8_0Block::BYTES),
            Self::Q4_0 => (Self::BLOCK, Q4_0Block::BYTES),
            Self::Q4_1 => (Self::BLOCK, Q4_1Block::BYTES),
            Self::Q4_K => (Self::SUPERBLOCK, Q4KBlock::BYTES),
            Self::Q6_K => (Self::SUPERBLOCK, Q6KBlock::BYTES),
        }
    }
}
