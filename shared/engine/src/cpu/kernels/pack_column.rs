//! One row of a stored matrix as a column of a panel, and back.

use treespec_checkpoint::{
    MatrixFormat, Q4_0Block, Q4_1Block, Q4KBlock, Q6KBlock, Q8_0Block, StoredMatrix,
};

use super::lanes::{LANES, Portable};
use super::panel::{
    BLOCK, BlockFormat, F16_ROW, NIBBLES, PANEL, Q4_0, Q4_1, Q4K, Q6K, Q8_0, VECTOR, widen_block,
};

/// Writes row `row` of `matrix` as column `lane` of `panel`.
pub(super) fn pack_column(panel: &mut [u8], lane: usize, matrix: &StoredMatrix, row: usize) {
    let stored = matrix.row(row);
    match matrix.format() {
        MatrixFormat::F32 => {
            for (k, value) in stored.as_chunks::<4>().0.iter().enumerate() {
                let place = (k * PANEL + lane) * size_of::<f32>();
                panel[place..place + 4].copy_from_slice(&f32::from_le_bytes(*value).to_ne_bytes());
            }
        }
        MatrixFormat::Bf16 => {
            for (k, value) in stored.as_chunks::<2>().0.iter().enumerate() {
                let place = bf16_place(k, lane);
                panel[place..place + 2].copy_from_slice(value);
            }
        }
        MatrixFormat::Q4_0 => {
            for (index, block) in Q4_0Block::of(stored).enumerate() {
                let target = &mut panel[Q4_0::offsets(index).1..];
                put_f16(target, lane, block.scale.to_bits());
                put_nibbles(&mut target[F16_ROW..], lane, &block.quants());
            }
        }
        MatrixFormat::Q4_1 => {
            for (index, block) in Q4_1Block::of(stored).enumerate() {
                let target = &mut panel[Q4_1::offsets(index).1..];
                put_f16(target, lane, block.scale.to_bits());
                put_f16(&mut target[F16_ROW..], lane, block.min.to_bits());
                put_nibbles(&mut target[2 * F16_ROW..], lane, &block.quants());
            }
        }
        MatrixFormat::Q8_0 => {
            for (index, block) in Q8_0Block::of(stored).enumerate() {
                let target = &mut panel[Q8_0::offsets(index).1..];
                put_f16(target, lane, block.scale.to_bits());
                for (k, quant) in block.quants.into_iter().enumerate() {
                    target[F16_ROW + byte_place(k, lane)] = quant.cast_unsigned() ^ 128;
                }
            }
        }
        MatrixFormat::Q4_K => {
            for (index, superblock) in Q4KBlock::of(stored).enumerate() {
                pack_q4k(panel, lane, index, &superblock);
            }
        }
        MatrixFormat::Q6_K => {
            for (index, superblock) in Q6KBlock::of(stored).enumerate() {
                pack_q6k(panel, lane, index, &superblock);
            }
        }
    }
}

fn pack_q4k(panel: &mut [u8], lane: usize, index: usize, superblock: &Q4KBlock) {
    let quants = superblock.quants();
    for part in 0..Q4K::BLOCKS {
        let (header, block) = Q4K::offsets(index * Q4K::BLOCKS + part);
        if part == 0 {
            put_f16(&mut panel[header..], lane, superblock.scale.to_bits());
            put_f16(
                &mut panel[header + F16_ROW..],
                lane,
                superblock.min.to_bits(),
            );
        }
        let target = &mut panel[block..];
        target[lane] = superblock.scales[part];
        target[PANEL + lane] = superblock.mins[part];
        put_nibbles(
            &mut target[2 * PANEL..],
            lane,
            &quants[part * BLOCK..][..BLOCK],
        );
    }
}

fn pack_q6k(panel: &mut [u8], lane: usize, index: usize, superblock: &Q6KBlock) {
    let quants = superblock.quants();
    for part in 0..Q6K::BLOCKS {
        let (header, block) = Q6K::offsets(index * Q6K::BLOCKS + part);
        if part == 0 {
            put_f16(&mut panel[header..], lane, superblock.scale.to_bits());
        }
        let target = &mut panel[block..];
        for group in 0..Q6K::GROUPS {
            let scale = superblock.scales[part * Q6K::GROUPS + group];
            target[group * PANEL + lane] = scale.cast_unsigned();
        }
        let half = &mut target[2 * PANEL + lane / LANES * Q6K::QUANTS..];
        for (k, &quant) in quants[part * BLOCK..][..BLOCK].iter().enumerate() {
            let (place, shift) = nibble_place(k, lane % LANES);
            half[place] |= (quant & 15) << shift;
            let (quad, byte) = (k / 4, k % 4);
            let upper = NIBBLES + quad / 4 * VECTOR + lane % LANES * 4 + byte;
            half[upper] |= (quant >> 4) << (2 * (quad % 4));
        }
    }
}

/// Reads column `lane` of `panel` as f32.
pub(super) fn read_column(format: MatrixFormat, panel: &[u8], lane: usize, out: &mut [f32]) {
    match format {
        MatrixFormat::F32 => {
            for (k, out) in out.iter_mut().enumerate() {
                let place = (k * PANEL + lane) * size_of::<f32>();
                *out = f32::from_ne_bytes(std::array::from_fn(|i| panel[place + i]));
            }
        }
        MatrixFormat::Bf16 => {
            for (k, out) in out.iter_mut().enumerate() {
                let place = bf16_place(k, lane);
                *out = f32::from_le_bytes([0, 0, panel[place], panel[place + 1]]);
            }
        }
        MatrixFormat::Q4_0 => read_blocks::<Q4_0>(panel, lane, out),
        MatrixFormat::Q4_1 => read_blocks::<Q4_1>(panel, lane, out),
        MatrixFormat::Q8_0 => read_blocks::<Q8_0>(panel, lane, out),
        MatrixFormat::Q4_K => read_blocks::<Q4K>(panel, lane, out),
        MatrixFormat::Q6_K => read_blocks::<Q6K>(panel, lane, out),
    }
}

/// Widens the half of the panel that holds the column a block at a time, through the portable lanes.
fn read_blocks<F: BlockFormat>(panel: &[u8], lane: usize, out: &mut [f32]) {
    let mut values = [0.0; BLOCK * LANES];
    for (index, out) in out.chunks_exact_mut(BLOCK).enumerate() {
        let (header, block) = F::offsets(index);
        let (header, block) = (&panel[header..], &panel[block..][..F::BLOCK_BYTES]);
        // SAFETY: the portable lanes run everywhere; header and block are those of a panel of the format, and `values`
        // holds the block's half.
        unsafe {
            let half = lane / LANES;
            widen_block::<Portable, F>(
                (header.as_ptr(), block.as_ptr()),
                half,
                (values.as_mut_ptr(), LANES),
            );
        }
        for (out, row) in out.iter_mut().zip(values.as_chunks::<LANES>().0) {
            *out = row[lane % LANES];
        }
    }
}

fn put_f16(row: &mut [u8], lane: usize, bits: u16) {
    row[2 * lane..2 * lane + 2].copy_from_slice(&bits.to_ne_bytes());
}

/// Nibbles of both halves of the panel.
fn put_nibbles(target: &mut [u8], lane: usize, quants: &[u8]) {
    let half = &mut target[lane / LANES * NIBBLES..];
    for (k, &quant) in quants.iter().enumerate() {
        let (place, shift) = nibble_place(k, lane % LANES);
        half[place] |= quant << shift;
    }
}

/// Byte and shift of the nibble of input `k` of a block in column `lane` of a half.
fn nibble_place(k: usize, lane: usize) -> (usize, usize) {
    let (quad, byte) = (k / 4, k % 4);
    (quad / 2 * VECTOR + lane * 4 + byte, quad % 2 * 4)
}

/// Place of the byte of input `k` of a block.
fn byte_place(k: usize, lane: usize) -> usize {
    let (quad, byte) = (k / 4, k % 4);
    lane / LANES * BLOCK * LANES + quad * VECTOR + lane % LANES * 4 + byte
}

/// Place of the bfloat16 of input `k`: two inputs of a column lie side by side.
fn bf16_place(k: usize, lane: usize) -> usize {
    2 * (k / 2 * 2 * PANEL + 2 * lane + k % 2)
}
