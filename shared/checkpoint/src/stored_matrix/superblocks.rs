//! Superblocks of 256 values with integer scales per group: the K-quants of ggml-quants (`block_q4_K`,
//! `dequantize_row_q4_K` and so on).

use std::array;

use half::f16;

use super::MatrixFormat;
use super::blocks::{array_at, f16_at, unpack_nibbles};

const SUPERBLOCK: usize = MatrixFormat::SUPERBLOCK;

/// One superblock of a Q4_K row: 8 groups of 32 values, each with a scale and a minimum of 6 bits.
///
/// Stored are f16 `d`, f16 `dmin`, 12 bytes with the scales and minima, then 128 bytes with four runs of 32: in run `r`,
/// value `64 * r + j` is in the low and value `64 * r + 32 + j` in the high half of byte `32 * r + j`.
///
/// Value `i` is `(d * scales[i / 32]) * q - dmin * mins[i / 32]`; f32 holds the products exactly, so only the difference
/// rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Q4KBlock {
    /// `d`, as stored.
    pub scale: f16,
    /// `dmin`, as stored. Minima are subtracted.
    pub min: f16,
    /// Scale of each group in units of `d`, 0..=63.
    pub scales: [u8; Self::GROUPS],
    /// Minimum of each group in units of `dmin`, 0..=63.
    pub mins: [u8; Self::GROUPS],
    /// Two stored integers per byte.
    pub nibbles: [u8; SUPERBLOCK / 2],
}

impl Q4KBlock {
    /// Bytes of a stored superblock.
    pub const BYTES: usize = 4 + Self::PACKED_SCALES + SUPERBLOCK / 2;
    /// Values per group.
    pub const GROUP: usize = 32;
    /// Groups per superblock.
    pub const GROUPS: usize = SUPERBLOCK / Self::GROUP;
    /// Bytes of 6-bit scales and minima (ggml's `K_SCALE_SIZE`).
    const PACKED_SCALES: usize = 12;

    /// The superblocks of a stored row; a trailing part of one is ignored.
    pub fn of(row: &[u8]) -> impl Iterator<Item = Self> + '_ {
        let (blocks, _) = row.as_chunks::<{ Self::BYTES }>();
        blocks.iter().map(|block| {
            let (scales, mins) = Self::unpack_scales(array_at(block, 4));
            Self {
                scale: f16_at(block, 0),
                min: f16_at(block, 2),
                scales,
                mins,
                nibbles: array_at(block, 4 + Self::PACKED_SCALES),
            }
        })
    }

    /// Stored integers 0..=15 in the order of the values.
    pub fn quants(&self) -> [u8; SUPERBLOCK] {
        unpack_nibbles(&self.nibbles, Self::GROUP)
    }

    /// The values.
    pub fn values(&self) -> [f32; SUPERBLOCK] {
        let (scale, min) = (self.scale.to_f32(), self.min.to_f32());
        let scales = self.scales.map(|group| scale * f32::from(group));
        let mins = self.mins.map(|group| min * f32::from(group));
        let quants = self.quants();
        array::from_fn(|i| {
            let group = i / Self::GROUP;
            scales[group] * f32::from(quants[i]) - mins[group]
        })
    }

    /// Scales and minima of all groups (ggml's `get_scale_min_k4`). Those of the first four groups are the low 6 bits of
    /// bytes 0..4 and 4..8. The other four have their low 4 bits in bytes 8..12, scales in the low and minima in the high
    /// half, and their upper 2 bits above the 6 of the first four.
    fn unpack_scales(
        packed: [u8; Self::PACKED_SCALES],
    ) -> ([u8; Self::GROUPS], [u8; Self::GROUPS]) {
        let upper_bits = |byte: u8| byte >> 6 << 4;
        let scales = array::from_fn(|group| match group {
            0..4 => packed[group] & 63,
            _ => packed[group + 4] & 15 | upper_bits(packed[group - 4]),
        });
        let mins = array::from_fn(|group| match group {
            0..4 => packed[group + 4] & 63,
            _ => packed[group + 4] >> 4 | upper_bits(packed[group]),
        });
        (scales, mins)
    }
}

/// One superblock of a Q6_K row: 16 groups of 16 values, each with a signed scale of 8 bits.
///
/// Stored are 128 bytes with the low 4 bits of the integers, 64 bytes with their upper 2 bits, 16 scales and f16 `d`.
/// Either half of the superblock has 64 and 32 bytes of the bits. In a half, the low bits of value `32 * r + j` are in
/// byte `32 * (r % 2) + j`, in its low half for `r` = 0 and 1 and in its high half for 2 and 3; its upper bits are bits
/// `2 * r` and `2 * r + 1` of byte `j`.
///
/// Value `i` is `(d * scales[i / 16]) * (q - 32)`, which f32 holds exactly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Q6KBlock {
    /// `d`, as stored.
    pub scale: f16,
    /// Scale of each group in units of `d`, of either sign.
    pub scales: [i8; Self::GROUPS],
    /// Low 4 bits of two stored integers per byte.
    pub low_bits: [u8; SUPERBLOCK / 2],
    /// Upper 2 bits of four stored integers per byte.
    pub high_bits: [u8; SUPERBLOCK / 4],
}

impl Q6KBlock {
    /// Bytes of a stored superblock.
    pub const BYTES: usize = SUPERBLOCK / 2 + SUPERBLOCK / 4 + Self::GROUPS + 2;
    /// Values per group.
    pub const GROUP: usize = 16;
    /// Groups per superblock.
    pub const GROUPS: usize = SUPERBLOCK / Self::GROUP;

    /// The superblocks of a stored row; a trailing part of one is ignored.
    pub fn of(row: &[u8]) -> impl Iterator<Item = Self> + '_ {
        const HIGH_BITS: usize = SUPERBLOCK / 2;
        const SCALES: usize = HIGH_BITS + SUPERBLOCK / 4;
        const SCALE: usize = SCALES + Q6KBlock::GROUPS;
        let (blocks, _) = row.as_chunks::<{ Self::BYTES }>();
        blocks.iter().map(|block| Self {
            scale: f16_at(block, SCALE),
            scales: array_at(block, SCALES).map(|byte| byte as i8),
            low_bits: array_at(block, 0),
            high_bits: array_at(block, HIGH_BITS),
        })
    }

    /// Stored integers 0..=63 in the order of the values.
    pub fn quants(&self) -> [u8; SUPERBLOCK] {
        let low: [u8; SUPERBLOCK] = unpack_nibbles(&self.low_bits, SUPERBLOCK / 4);
        array::from_fn(|i| {
            let (half, lane) = (i / 128, i % 128);
            let high = self.high_bits[32 * half + lane % 32] >> (lane / 32 * 2) & 3;
            low[i] | high << 4
        })
    }

    /// The values.
    pub fn values(&self) -> [f32; SUPERBLOCK] {
        let scale = self.scale.to_f32();
        let scales = self.scales.map(|group| scale * f32::from(group));
        let quants = self.quants();
        array::from_fn(|i| scales[i / Self::GROUP] * (f32::from(quants[i]) - 32.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of one superblock whose byte `i` is `i`.
    fn counting<const BYTES: usize>() -> [u8; BYTES] {
        array::from_fn(|i| i as u8)
    }

    #[test]
    fn the_six_bits_of_scales_and_minima_are_joined() {
        let mut packed = [0; 12];
        packed[1] = 0b10_000011; // scale 1, upper bits of scale 5
        packed[5] = 0b01_100000; // minimum 1, upper bits of minimum 5
        packed[9] = 0b1100_0101; // low bits of minimum 5 and scale 5
        let (scales, mins) = Q4KBlock::unpack_scales(packed);
        assert_eq!(scales, [0, 3, 0, 0, 0, 0b10_0101, 0, 0]);
        assert_eq!(mins, [0, 32, 0, 0, 0, 0b01_1100, 0, 0]);
    }

    #[test]
    fn q4_k_integers_come_in_runs_of_32() {
        let row = counting::<{ Q4KBlock::BYTES }>();
        let block = Q4KBlock::of(&row).next().unwrap();
        let quants = block.quants();
        assert_eq!(block.nibbles[37], 16 + 37);
        assert_eq!((quants[64 + 5], quants[96 + 5]), (53 & 15, 53 >> 4));
    }

    #[test]
    fn q6_k_integers_join_low_and_upper_bits() {
        let row = counting::<{ Q6KBlock::BYTES }>();
        let block = Q6KBlock::of(&row).next().unwrap();
        // Second half, third quarter, lane 7: the high half of byte 64 + 7, and bits 4 and 5 of byte 32 + 7 of the
        // upper bits, which start at byte 128.
        let upper = (128 + 32 + 7) >> 4 & 3;
        assert_eq!(block.quants()[128 + 64 + 7], (64 + 7) >> 4 | upper << 4);
        assert_eq!(block.scales[3], (192 + 3) as u8 as i8);
        assert_eq!(block.scale, f16::from_le_bytes([208, 209]));
    }

    #[test]
    fn a_trailing_part_of_a_superblock_is_ignored() {
        let row = counting::<{ 2 * Q4KBlock::BYTES - 1 }>();
        assert_eq!(Q4KBlock::of(&row).count(), 1);
        let row = counting::<{ 2 * Q6KBlock::BYTES - 1 }>();
        assert_eq!(Q6KBlock::of(&row).count(), 1);
    }
}
