//! Tiles of `y = x W^T` in integers and in bfloat16: activations from [`super::activations`], weights as packed.
//!
//! An integer sum is exact, so its order does not matter; the blocks of a row are added in f32 in ascending order,
//! whatever the number of rows. That makes a row's bits independent of its neighbours, as in f32.

use std::marker::PhantomData;

use super::activations::Correction;
use super::lanes::{Bf16Lanes, IntegerLanes, LANES, Lanes};
use super::panel::{BLOCK, BlockFormat, LINE_BYTES, PANEL, PREFETCH_BYTES, QUADS, VECTOR};

/// Most rows of a tile, on any instruction set.
pub(super) const MAX_INTEGER_ROWS: usize = 10;

/// What a tile computes: row by row the columns of a panel.
pub(super) type TileValues = [[f32; PANEL]; MAX_INTEGER_ROWS];

/// The correction that activations for this format carry.
pub(super) fn correction<F: BlockFormat>() -> Correction {
    if F::MIN {
        Correction::Minimum
    } else {
        Correction::Centre {
            centre: F::CENTRE,
            groups: F::GROUPS,
        }
    }
}

/// The tiles of one arithmetic.
pub(super) trait TileKernel<L: Lanes> {
    /// One panel times `rows` rows at `x`. `first` says that the panel comes from memory, not from an earlier tile.
    ///
    /// # Safety
    /// The processor has the lanes' instruction set, `panel` is a panel of the kernel's format and of `depth` inputs, `x`
    /// a tile of activations for it.
    unsafe fn tile_rows(
        panel: *const u8,
        depth: usize,
        x: *const i32,
        rows: usize,
        first: bool,
        out: &mut TileValues,
    );
}

/// Blocks of whole numbers.
pub(super) struct BlockTiles<F>(PhantomData<F>);

impl<L: IntegerLanes, F: BlockFormat> TileKernel<L> for BlockTiles<F> {
    #[inline(always)]
    unsafe fn tile_rows(
        panel: *const u8,
        depth: usize,
        x: *const i32,
        rows: usize,
        first: bool,
        out: &mut TileValues,
    ) {
        macro_rules! with_rows {
            ($($n:literal)*) => {
                match rows {
                    // SAFETY: the trait's contract.
                    $($n => unsafe { tile::<L, F, $n>(panel, depth, x, first, out) },)*
                    _ => unreachable!("a tile has 1 to {} rows", L::INTEGER_ROWS),
                }
            };
        }
        // One form for every number of rows that fits: each costs time to compile.
        if L::INTEGER_ROWS > 4 {
            with_rows!(1 2 3 4 5 6 7 8 9 10)
        } else if L::INTEGER_ROWS > 2 {
            with_rows!(1 2 3 4)
        } else if L::INTEGER_ROWS > 1 {
            with_rows!(1 2)
        } else {
            with_rows!(1)
        }
    }
}

/// Pairs of bfloat16.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct Bf16Tiles;

impl<L: Bf16Lanes> TileKernel<L> for Bf16Tiles {
    #[inline(always)]
    unsafe fn tile_rows(
        panel: *const u8,
        depth: usize,
        x: *const i32,
        rows: usize,
        first: bool,
        out: &mut TileValues,
    ) {
        macro_rules! with_rows {
            ($($n:literal)*) => {
                match rows {
                    // SAFETY: the trait's contract.
                    $($n => unsafe { bf16_tile::<L, $n>(panel, depth, x, first, out) },)*
                    _ => unreachable!("a tile has 1 to {MAX_INTEGER_ROWS} rows"),
                }
            };
        }
        with_rows!(1 2 3 4 5 6 7 8 9 10)
    }
}

/// # Safety
/// As [`TileKernel::tile_rows`].
#[inline(always)]
unsafe fn tile<L: IntegerLanes, F: BlockFormat, const ROWS: usize>(
    panel: *const u8,
    depth: usize,
    x: *const i32,
    first: bool,
    out: &mut TileValues,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if L::TILE_VECTORS == 2 {
            halves::<L, F, ROWS, 2>(panel, depth, x, 0, first, out);
        } else {
            for half in 0..2 {
                halves::<L, F, ROWS, 1>(panel, depth, x, half, first && half == 0, out);
            }
        }
    }
}

/// `HALVES` halves of the panel, from half `from` on.
///
/// # Safety
/// As [`TileKernel::tile_rows`].
#[inline(always)]
unsafe fn halves<L: IntegerLanes, F: BlockFormat, const ROWS: usize, const HALVES: usize>(
    panel: *const u8,
    depth: usize,
    x: *const i32,
    from: usize,
    first: bool,
    out: &mut TileValues,
) {
    let block_words = ROWS * (QUADS + 1 + F::GROUPS);
    // SAFETY: blocks and words inside the panel and the tile.
    unsafe {
        let mut acc = [[L::splat(0.0); HALVES]; ROWS];
        for index in 0..depth / BLOCK {
            let (header, block) = F::offsets(index);
            let (header, block) = (panel.add(header), panel.add(block));
            if first {
                prefetch::<L, F>(block);
            }
            let x = x.add(index * block_words);
            if F::GROUPS == 1 {
                let mut sums = start::<L, F, ROWS, HALVES>(x, 0);
                add_pair::<L, F, ROWS, HALVES, 0>(block, x, from, &mut sums);
                add_pair::<L, F, ROWS, HALVES, 1>(block, x, from, &mut sums);
                add_pair::<L, F, ROWS, HALVES, 2>(block, x, from, &mut sums);
                add_pair::<L, F, ROWS, HALVES, 3>(block, x, from, &mut sums);
                scale::<L, F, ROWS, HALVES>(header, block, x, (from, 0), sums, &mut acc);
            } else {
                let mut sums = start::<L, F, ROWS, HALVES>(x, 0);
                add_pair::<L, F, ROWS, HALVES, 0>(block, x, from, &mut sums);
                add_pair::<L, F, ROWS, HALVES, 1>(block, x, from, &mut sums);
                scale::<L, F, ROWS, HALVES>(header, block, x, (from, 0), sums, &mut acc);
                let mut sums = start::<L, F, ROWS, HALVES>(x, 1);
                add_pair::<L, F, ROWS, HALVES, 2>(block, x, from, &mut sums);
                add_pair::<L, F, ROWS, HALVES, 3>(block, x, from, &mut sums);
                scale::<L, F, ROWS, HALVES>(header, block, x, (from, 1), sums, &mut acc);
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            for (half, acc) in acc.into_iter().enumerate() {
                acc.store(out.as_mut_ptr().add((from + half) * LANES));
            }
        }
    }
}

/// Requests the block that lies [`PREFETCH_BYTES`] ahead; past the end of the weights the request does nothing.
///
/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn prefetch<L: IntegerLanes, F: BlockFormat>(block: *const u8) {
    for line in 0..F::BLOCK_BYTES.div_ceil(LINE_BYTES) {
        // SAFETY: the caller's contract.
        unsafe { L::prefetch(block.wrapping_add(PREFETCH_BYTES + LINE_BYTES * line)) };
    }
}

/// What the sums of group `group` start with.
///
/// # Safety
/// `x` is a block of the tile.
#[inline(always)]
unsafe fn start<L: IntegerLanes, F: BlockFormat, const ROWS: usize, const HALVES: usize>(
    x: *const i32,
    group: usize,
) -> [[L::Ints; HALVES]; ROWS] {
    // SAFETY: the caller's contract.
    unsafe {
        let mut sums = [[L::splat_int(0); HALVES]; ROWS];
        if !F::MIN {
            for (row, sums) in sums.iter_mut().enumerate() {
                *sums = [L::splat_int(*x.add((QUADS + 1 + group) * ROWS + row)); HALVES];
            }
        }
        sums
    }
}

/// Eight inputs.
///
/// # Safety
/// As [`TileKernel::tile_rows`]; `x` is a block of the tile.
#[inline(always)]
unsafe fn add_pair<
    L: IntegerLanes,
    F: BlockFormat,
    const ROWS: usize,
    const HALVES: usize,
    const PAIR: usize,
>(
    block: *const u8,
    x: *const i32,
    from: usize,
    sums: &mut [[L::Ints; HALVES]; ROWS],
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut weights = [F::quads::<L, PAIR>(block, from); HALVES];
        if HALVES == 2 {
            weights[HALVES - 1] = F::quads::<L, PAIR>(block, from + 1);
        }
        for quad in 0..2 {
            let x = x.add((2 * PAIR + quad) * ROWS);
            for (row, sums) in sums.iter_mut().enumerate() {
                for (sum, weights) in sums.iter_mut().zip(&weights) {
                    *sum = if F::FULL_BYTES {
                        L::dot_full(*sum, weights[quad], x.add(row))
                    } else {
                        L::dot_small(*sum, weights[quad], x.add(row))
                    };
                }
            }
        }
    }
}

/// Adds the scaled sums of a group of a block, and with the last group the block's minima.
///
/// # Safety
/// As [`TileKernel::tile_rows`]; `x` is a block of the tile.
#[inline(always)]
unsafe fn scale<L: IntegerLanes, F: BlockFormat, const ROWS: usize, const HALVES: usize>(
    header: *const u8,
    block: *const u8,
    x: *const i32,
    (from, group): (usize, usize),
    sums: [[L::Ints; HALVES]; ROWS],
    acc: &mut [[L; HALVES]; ROWS],
) {
    // SAFETY: the caller's contract.
    unsafe {
        let scales = x.add(QUADS * ROWS).cast::<f32>();
        for half in 0..HALVES {
            let scale = F::scale::<L>(header, block, from + half, group);
            let min = F::min::<L>(header, block, from + half);
            for (row, (acc, sums)) in acc.iter_mut().zip(&sums).enumerate() {
                let acc = &mut acc[half];
                let product = L::ints_to_f32(sums[half]).mul(scale);
                *acc = product.mul_add(L::splat(*scales.add(row)), *acc);
                if F::MIN {
                    *acc = min.mul_add(L::splat(*scales.add(ROWS + row)), *acc);
                }
            }
        }
    }
}

/// # Safety
/// As [`TileKernel::tile_rows`].
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
#[inline(always)]
unsafe fn bf16_tile<L: Bf16Lanes, const ROWS: usize>(
    panel: *const u8,
    depth: usize,
    x: *const i32,
    first: bool,
    out: &mut TileValues,
) {
    // SAFETY: pairs inside the panel and the tile.
    unsafe {
        let mut acc = [[L::splat(0.0); 2]; ROWS];
        for pair in 0..depth.div_ceil(2) {
            let weights = panel.add(pair * 2 * VECTOR);
            if first {
                L::prefetch(weights.wrapping_add(PREFETCH_BYTES));
                L::prefetch(weights.wrapping_add(PREFETCH_BYTES + VECTOR));
            }
            let weights = [L::load_bytes(weights), L::load_bytes(weights.add(VECTOR))];
            for (row, acc) in acc.iter_mut().enumerate() {
                let x = x.add(pair * ROWS + row);
                acc[0] = acc[0].dot_bf16(weights[0], x);
                acc[1] = acc[1].dot_bf16(weights[1], x);
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            acc[0].store(out.as_mut_ptr());
            acc[1].store(out.as_mut_ptr().add(LANES));
        }
    }
}
