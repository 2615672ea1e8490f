//! Blocks of 32 values. Layouts and arithmetic are those of ggml-quants (`block_q8_0`, `dequantize_row_q8_0` and so on).

use std::array;

use half::f16;

use super::MatrixFormat;

const BLOCK: usize = MatrixFormat::BLOCK;

/// One block of a Q8_0 row: f16 `d`, then 32 signed bytes `q`. A value is `d * q`, which f32 holds exactly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Q8_0Block {
    /// `d`, as stored.
    pub scale: f16,
    /// Stored integers in the order of the values.
    pub quants: [i8; BLOCK],
}

impl Q8_0Block {
    /// Bytes of a stored block.
    pub const BYTES: usize = 2 + BLOCK;

    /// The blocks of a stored row; a trailing part of one is ignored.
    pub fn of(row: &[u8]) -> impl Iterator<Item = Self> + '_ {
        let (blocks, _) = row.as_chunks::<{ Self::BYTES }>();
        blocks.iter().map(|block| Self {
            scale: f16_at(block, 0),
            quants: array_at(block, 2).map(|byte| byte as i8),
        })
    }

    /// Stored integers in the order of the values.
    pub fn quants(&self) -> [i8; BLOCK] {
        self.quants
    }

    /// The values.
    pub fn values(&self) -> [f32; BLOCK] {
        let scale = self.scale.to_f32();
        self.quants.map(|q| scale * f32::from(q))
    }
}

/// One block of a Q4_0 row: f16 `d`, then 16 bytes with value `j` in the low and value `j + 16` in the high half of byte
/// `j`. A value is `d * (q - 8)`, which f32 holds exactly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Q4_0Block {
    /// `d`, as stored.
    pub scale: f16,
    /// Two stored integers per byte.
    pub nibbles: [u8; BLOCK / 2],
}

impl Q4_0Block {
    /// Bytes of a stored block.
    pub const BYTES: usize = 2 + BLOCK / 2;

    /// The blocks of a stored row; a trailing part of one is ignored.
    pub fn of(row: &[u8]) -> impl Iterator<Item = Self> + '_ {
        let (blocks, _) = row.as_chunks::<{ Self::BYTES }>();
        blocks.iter().map(|block| Self {
            scale: f16_at(block, 0),
            nibbles: array_at(block, 2),
        })
    }

    /// Stored integers 0..=15 in the order of the values.
    pub fn quants(&self) -> [u8; BLOCK] {
        unpack_nibbles(&self.nibbles, BLOCK / 2)
    }

    /// The values.
    pub fn values(&self) -> [f32; BLOCK] {
        let scale = self.scale.to_f32();
        self.quants().map(|q| scale * (f32::from(q) - 8.0))
    }
}

/// One block of a Q4_1 row: f16 `d`, f16 `m`, then 16 bytes with value `j` in the low and value `j + 16` in the high half
/// of byte `j`. A value is `d * q + m`; f32 holds the product exactly, so only the sum rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Q4_1Block {
    /// `d`, as stored.
    pub scale: f16,
    /// `m`, as stored.
    pub min: f16,
    /// Two stored integers per byte.
    pub nibbles: [u8; BLOCK / 2],
}

impl Q4_1Block {
    /// Bytes of a stored block.
    pub const BYTES: usize = 4 + BLOCK / 2;

    /// The blocks of a stored row; a trailing part of one is ignored.
    pub fn of(row: &[u8]) -> impl Iterator<Item = Self> + '_ {
        let (blocks, _) = row.as_chunks::<{ Self::BYTES }>();
        blocks.iter().map(|block| Self {
            scale: f16_at(block, 0),
            min: f16_at(block, 2),
            nibbles: array_at(block, 4),
        })
    }

    /// Stored integers 0..=15 in the order of the values.
    pub fn quants(&self) -> [u8; BLOCK] {
        unpack_nibbles(&self.nibbles, BLOCK / 2)
    }

    /// The values.
    pub fn values(&self) -> [f32; BLOCK] {
        let (scale, min) = (self.scale.to_f32(), self.min.to_f32());
        self.quants().map(|q| scale * f32::from(q) + min)
    }
}

/// The little-endian f16 at byte `start` of a block.
pub(super) fn f16_at(block: &[u8], start: usize) -> f16 {
    f16::from_le_bytes(array_at(block, start))
}

/// `LEN` bytes of a block from byte `start`.
pub(super) fn array_at<const LEN: usize>(block: &[u8], start: usize) -> [u8; LEN] {
    array::from_fn(|i| block[start + i])
}

/// Integers 0..=15 of every `half` bytes: first those in the low halves of the bytes, then those in the high halves.
pub(super) fn unpack_nibbles<const VALUES: usize>(bytes: &[u8], half: usize) -> [u8; VALUES] {
    array::from_fn(|i| {
        let byte = bytes[i / (2 * half) * half + i % half];
        if (i / half).is_multiple_of(2) {
            byte & 15
        } else {
            byte >> 4
        }
    })
}
