//! Rows of activations as the integer and bfloat16 kernels read them.
//!
//! Rows are grouped in tiles, and inside a tile what a kernel reads at one place lies together: four inputs of every
//! row as the bytes of one i32, so that a load broadcasts them. A value depends on its own row only, so neither the
//! tile nor the batch changes a bit.

use super::even_tiles::EvenTiles;
use super::lanes::{IntegerLanes, LANES, Lanes};
use super::panel::{BLOCK, QUADS};
use super::pool::ThreadPool;
use super::{Isa, SharedMut, dispatch_integer};

/// What a weight format needs besides the quantised values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    /// i8 with a scale per block of 32. Per block: a word for every four inputs, the scale, then one of the below.
    Integer(Correction),
    /// bfloat16, two inputs a word.
    Bf16,
}

/// What the weights of a block add to a sum of products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Correction {
    /// Weights with a minimum: scale times the sum of the block's values, f32.
    Minimum,
    /// Quants above their value by `centre`: minus `centre` times the sum of every group's values, i32.
    Centre { centre: i32, groups: usize },
}

impl Correction {
    fn words(self) -> usize {
        match self {
            Self::Minimum => 1,
            Self::Centre { groups, .. } => groups,
        }
    }
}

impl Encoding {
    /// Words of one row of `depth` inputs.
    pub(super) fn words(self, depth: usize) -> usize {
        match self {
            Self::Integer(correction) => depth / BLOCK * (QUADS + 1 + correction.words()),
            Self::Bf16 => depth.div_ceil(2),
        }
    }
}

/// Values below which rows are encoded by the calling thread alone.
const PARALLEL_VALUES: usize = 4 * 1024;

/// Encodes `rows` rows of `depth` inputs into `words`.
pub(super) fn encode(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &[f32],
    rows: usize,
    encoding: Encoding,
    words: &mut Vec<i32>,
) {
    let depth = x.len() / rows;
    let row_words = encoding.words(depth);
    // Every word is written below; old ones need no clearing.
    words.resize(rows * row_words, 0);
    let tiles = EvenTiles::new(rows, isa.integer_rows());
    let out = SharedMut::new(words);
    let grain = if x.len() < PARALLEL_VALUES {
        tiles.count()
    } else {
        tiles.count().div_ceil(pool.threads())
    };
    pool.for_ranges(tiles.count(), grain, &|range| {
        for tile in range {
            let rows = tiles.tile(tile);
            // SAFETY: every tile is one part, handled by one thread.
            let words = unsafe { out.part(rows.start * row_words, rows.len() * row_words) };
            let x = &x[rows.start * depth..rows.end * depth];
            match encoding {
                Encoding::Integer(correction) => encode_tile(isa, x, depth, correction, words),
                Encoding::Bf16 => encode_bf16(x, depth, words),
            }
        }
    });
}

fn encode_tile(isa: Isa, x: &[f32], depth: usize, correction: Correction, words: &mut [i32]) {
    dispatch_integer!(isa, integer_tile(x: &[f32], depth: usize, correction: Correction, words: &mut [i32]));
}

/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn integer_tile<L: IntegerLanes>(
    x: &[f32],
    depth: usize,
    correction: Correction,
    words: &mut [i32],
) {
    let rows = x.len() / depth;
    let block_words = rows * (QUADS + 1 + correction.words());
    for (row, x) in x.chunks_exact(depth).enumerate() {
        let blocks = x.as_chunks::<BLOCK>().0;
        // SAFETY: the caller's contract.
        let spoiler = unsafe { spoiler::<L>(blocks) };
        for (x, words) in blocks.iter().zip(words.chunks_exact_mut(block_words)) {
            // SAFETY: the caller's contract; a block's words are `rows` columns of `QUADS + 1 + correction.words()`.
            unsafe {
                let block = QuantisedBlock::<L>::of(x);
                let column = words.as_mut_ptr().add(row);
                for (quad, bytes) in block.quants.as_chunks::<4>().0.iter().enumerate() {
                    *column.add(quad * rows) = i32::from_ne_bytes(*bytes);
                }
                let scale = block.scale + spoiler;
                *column.add(QUADS * rows) = scale.to_bits().cast_signed();
                let corrections = column.add((QUADS + 1) * rows);
                match correction {
                    Correction::Minimum => {
                        let sum = scale * block.sum() as f32;
                        *corrections = sum.to_bits().cast_signed();
                    }
                    Correction::Centre { centre: 128, .. } => {
                        *corrections = L::uncentred(block.sum().wrapping_mul(-128));
                    }
                    Correction::Centre { centre, groups: 1 } => {
                        *corrections = block.sum().wrapping_mul(-centre);
                    }
                    Correction::Centre { centre, .. } => {
                        let [low, high] = block.half_sums();
                        *corrections = low.wrapping_mul(-centre);
                        *corrections.add(rows) = high.wrapping_mul(-centre);
                    }
                }
            }
        }
    }
}

/// 0, or NaN where a value of the row is not finite: added to its scales it makes the row's outputs tell.
///
/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn spoiler<L: Lanes>(blocks: &[[f32; BLOCK]]) -> f32 {
    // SAFETY: the caller's contract; a block holds two vectors.
    unsafe {
        let mut trace = L::splat(0.0);
        for x in blocks.iter().flat_map(|block| block.as_chunks::<LANES>().0) {
            trace = L::load(x.as_ptr()).mul_add(L::splat(0.0), trace);
        }
        trace.sum_of_whole_numbers()
    }
}

/// 32 activations as integers -127..=127.
struct QuantisedBlock<L> {
    quants: [u8; BLOCK],
    scale: f32,
    whole: [L; 2],
}

impl<L: Lanes> QuantisedBlock<L> {
    /// # Safety
    /// The processor has the lanes' instruction set, here and below.
    #[inline(always)]
    unsafe fn of(x: &[f32; BLOCK]) -> Self {
        /// Adding and taking away 1.5 * 2^23 rounds to a whole number, whose low byte is then the lowest of the bits.
        const ROUND: f32 = 12_582_912.0;
        // SAFETY: the caller's contract; `x` and `quants` hold two vectors.
        unsafe {
            let halves = [L::load(x.as_ptr()), L::load(x.as_ptr().add(LANES))];
            let magnitudes = halves.map(|half| half.max(half.mul(L::splat(-1.0))));
            let largest = magnitudes[0].max(magnitudes[1]).largest();
            let inverse = 127.0 / largest;
            // Too small to have an inverse: all zero.
            let inverse = if inverse.is_finite() { inverse } else { 0.0 };
            let rounded = halves.map(|half| half.mul_add(L::splat(inverse), L::splat(ROUND)));
            let mut quants = [0; BLOCK];
            rounded[0].store_low_bytes(quants.as_mut_ptr());
            rounded[1].store_low_bytes(quants.as_mut_ptr().add(LANES));
            Self {
                quants,
                scale: largest / 127.0,
                whole: rounded.map(|half| half.add(L::splat(-ROUND))),
            }
        }
    }

    /// Sum of all quants.
    #[inline(always)]
    unsafe fn sum(&self) -> i32 {
        // SAFETY: the caller's contract.
        unsafe { self.whole[0].add(self.whole[1]).sum_of_whole_numbers() as i32 }
    }

    /// Sums of the first and the last sixteen.
    #[inline(always)]
    unsafe fn half_sums(&self) -> [i32; 2] {
        // SAFETY: the caller's contract.
        self.whole
            .map(|half| unsafe { half.sum_of_whole_numbers() as i32 })
    }
}

/// Rounded to bfloat16, ties to even.
fn encode_bf16(x: &[f32], depth: usize, words: &mut [i32]) {
    let rows = x.len() / depth;
    for (row, x) in x.chunks_exact(depth).enumerate() {
        for (pair, values) in x.chunks(2).enumerate() {
            let low = half::bf16::from_f32(values[0]).to_bits();
            let high = half::bf16::from_f32(values.get(1).copied().unwrap_or(0.0)).to_bits();
            words[pair * rows + row] = (u32::from(low) | u32::from(high) << 16).cast_signed();
        }
    }
}
