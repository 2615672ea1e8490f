//! Panels: 32 output columns of a weight matrix, in the order in which the kernels read them.
//!
//! Weights stay in the number format of their file. In the block formats four inputs of a column lie side by side, as the
//! integer dot products want them, and sixteen columns fill one vector of 64 bytes. A block of 32 inputs is what its
//! columns share, then its quants for columns 0..16, then those for 16..32.

use treespec_checkpoint::MatrixFormat;

use super::lanes::{LANES, Lanes};

/// Output columns of one panel.
pub(super) const PANEL: usize = 2 * LANES;
/// Inputs of one block.
pub(super) const BLOCK: usize = MatrixFormat::BLOCK;
/// Groups of four inputs in one block.
pub(super) const QUADS: usize = BLOCK / 4;
/// Bytes of one vector: four inputs of sixteen columns as bytes.
pub(super) const VECTOR: usize = 4 * LANES;
/// Bytes of a cache line.
pub(super) const LINE_BYTES: usize = 64;
/// How far ahead of those in use weights are requested: some two microseconds of one core's memory traffic. The
/// processor's own prefetchers stop at the end of a page and restart slowly.
pub(super) const PREFETCH_BYTES: usize = 4_096;
/// Bytes of one f16 for every column.
pub(super) const F16_ROW: usize = 2 * PANEL;
/// Bytes of the nibbles of one block for sixteen columns.
pub(super) const NIBBLES: usize = BLOCK * LANES / 2;

/// A block format: a weight is `scale * (quant - CENTRE)`, or `scale * quant + min`.
///
/// # Safety
/// Methods: the processor has the lanes' instruction set; `header` and `block` point into a panel of this format.
pub(super) trait BlockFormat: Copy {
    /// Blocks that share a header.
    const BLOCKS: usize = 1;
    /// Bytes before those blocks.
    const HEADER: usize = 0;
    /// Bytes of a block.
    const BLOCK_BYTES: usize;
    /// Scales per block and column.
    const GROUPS: usize = 1;
    /// Subtracted from the quants.
    const CENTRE: i32 = 0;
    /// Whether there is a minimum.
    const MIN: bool = false;
    /// Whether quants exceed 127.
    const FULL_BYTES: bool = false;

    /// Quants of inputs `8 * PAIR..8 * PAIR + 8` for the columns of `half`: two times four.
    unsafe fn quads<L: Lanes, const PAIR: usize>(block: *const u8, half: usize) -> [L::Bytes; 2];

    /// Scales of the columns of `half`.
    unsafe fn scale<L: Lanes>(header: *const u8, block: *const u8, half: usize, group: usize) -> L;

    /// Minima of the columns of `half`.
    unsafe fn min<L: Lanes>(_header: *const u8, _block: *const u8, _half: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe { L::splat(0.0) }
    }

    /// Bytes of a panel of `depth` inputs.
    fn panel_bytes(depth: usize) -> usize {
        depth / (Self::BLOCKS * BLOCK) * Self::super_bytes()
    }

    /// Bytes from one header to the next.
    fn super_bytes() -> usize {
        Self::HEADER + Self::BLOCKS * Self::BLOCK_BYTES
    }

    /// Offsets of header and block `block` in a panel.
    fn offsets(block: usize) -> (usize, usize) {
        let header = block / Self::BLOCKS * Self::super_bytes();
        let inside = Self::HEADER + block % Self::BLOCKS * Self::BLOCK_BYTES;
        (header, header + inside)
    }
}

/// Vectors of nibbles: quad `2 * PAIR` in the low, quad `2 * PAIR + 1` in the high halves.
///
/// # Safety
/// As [`BlockFormat`]; `nibbles` is followed by those of sixteen columns.
#[inline(always)]
unsafe fn nibble_quads<L: Lanes, const PAIR: usize>(nibbles: *const u8) -> [L::Bytes; 2] {
    // SAFETY: the caller's contract.
    unsafe {
        let both = L::load_bytes(nibbles.add(PAIR * VECTOR));
        [L::low_nibbles(both), L::high_nibbles(both)]
    }
}

/// # Safety
/// As [`BlockFormat`]; `row` is followed by one f16 for every column.
#[inline(always)]
unsafe fn f16_half<L: Lanes>(row: *const u8, half: usize) -> L {
    // SAFETY: the caller's contract.
    unsafe { L::load_f16(row.add(half * F16_ROW / 2).cast()) }
}

/// `[scales][nibbles][nibbles]`
#[derive(Clone, Copy)]
pub(super) struct Q4_0;

impl BlockFormat for Q4_0 {
    const BLOCK_BYTES: usize = F16_ROW + 2 * NIBBLES;
    const CENTRE: i32 = 8;

    #[inline(always)]
    unsafe fn quads<L: Lanes, const PAIR: usize>(block: *const u8, half: usize) -> [L::Bytes; 2] {
        // SAFETY: the trait's contract.
        unsafe { nibble_quads::<L, PAIR>(block.add(F16_ROW + half * NIBBLES)) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(_: *const u8, block: *const u8, half: usize, _: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe { f16_half(block, half) }
    }
}

/// `[scales][minima][nibbles][nibbles]`
#[derive(Clone, Copy)]
pub(super) struct Q4_1;

impl BlockFormat for Q4_1 {
    const BLOCK_BYTES: usize = 2 * F16_ROW + 2 * NIBBLES;
    const MIN: bool = true;

    #[inline(always)]
    unsafe fn quads<L: Lanes, const PAIR: usize>(block: *const u8, half: usize) -> [L::Bytes; 2] {
        // SAFETY: the trait's contract.
        unsafe { nibble_quads::<L, PAIR>(block.add(2 * F16_ROW + half * NIBBLES)) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(_: *const u8, block: *const u8, half: usize, _: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe { f16_half(block, half) }
    }

    #[inline(always)]
    unsafe fn min<L: Lanes>(_: *const u8, block: *const u8, half: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe { f16_half(block.add(F16_ROW), half) }
    }
}

/// `[scales][quants + 128][quants + 128]`
#[derive(Clone, Copy)]
pub(super) struct Q8_0;

impl BlockFormat for Q8_0 {
    const BLOCK_BYTES: usize = F16_ROW + BLOCK * PANEL;
    const CENTRE: i32 = 128;
    const FULL_BYTES: bool = true;

    #[inline(always)]
    unsafe fn quads<L: Lanes, const PAIR: usize>(block: *const u8, half: usize) -> [L::Bytes; 2] {
        // SAFETY: the trait's contract.
        unsafe {
            let quants = block.add(F16_ROW + half * BLOCK * LANES + 2 * PAIR * VECTOR);
            [L::load_bytes(quants), L::load_bytes(quants.add(VECTOR))]
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(_: *const u8, block: *const u8, half: usize, _: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe { f16_half(block, half) }
    }
}

/// Header `[scales][minima]`, blocks `[u8 scales][u8 minima][nibbles][nibbles]`.
#[derive(Clone, Copy)]
pub(super) struct Q4K;

impl BlockFormat for Q4K {
    const BLOCKS: usize = MatrixFormat::SUPERBLOCK / BLOCK;
    const HEADER: usize = 2 * F16_ROW;
    const BLOCK_BYTES: usize = 2 * PANEL + 2 * NIBBLES;
    const MIN: bool = true;

    #[inline(always)]
    unsafe fn quads<L: Lanes, const PAIR: usize>(block: *const u8, half: usize) -> [L::Bytes; 2] {
        // SAFETY: the trait's contract.
        unsafe { nibble_quads::<L, PAIR>(block.add(2 * PANEL + half * NIBBLES)) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(header: *const u8, block: *const u8, half: usize, _: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe { f16_half::<L>(header, half).mul(L::load_u8(block.add(half * LANES))) }
    }

    #[inline(always)]
    unsafe fn min<L: Lanes>(header: *const u8, block: *const u8, half: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe {
            let least = f16_half::<L>(header.add(F16_ROW), half);
            let steps = L::load_u8(block.add(PANEL + half * LANES));
            least.mul(steps).mul(L::splat(-1.0))
        }
    }
}

/// Header `[scales]`, blocks `[i8 scales][i8 scales]` of two groups of sixteen inputs, then per sixteen columns nibbles and
/// the upper bit pairs of four quads a byte.
#[derive(Clone, Copy)]
pub(super) struct Q6K;

impl Q6K {
    /// Bytes of the quants of one block for sixteen columns.
    pub(super) const QUANTS: usize = NIBBLES + NIBBLES / 2;
}

impl BlockFormat for Q6K {
    const BLOCKS: usize = MatrixFormat::SUPERBLOCK / BLOCK;
    const HEADER: usize = F16_ROW;
    const BLOCK_BYTES: usize = 2 * PANEL + 2 * Self::QUANTS;
    const GROUPS: usize = 2;
    const CENTRE: i32 = 32;

    #[inline(always)]
    unsafe fn quads<L: Lanes, const PAIR: usize>(block: *const u8, half: usize) -> [L::Bytes; 2] {
        // SAFETY: the trait's contract.
        unsafe {
            let quants = block.add(2 * PANEL + half * Self::QUANTS);
            let [low, high] = nibble_quads::<L, PAIR>(quants);
            let upper = L::load_bytes(quants.add(NIBBLES + PAIR / 2 * VECTOR));
            if PAIR.is_multiple_of(2) {
                [
                    L::or(low, L::bit_pairs::<0>(upper)),
                    L::or(high, L::bit_pairs::<1>(upper)),
                ]
            } else {
                [
                    L::or(low, L::bit_pairs::<2>(upper)),
                    L::or(high, L::bit_pairs::<3>(upper)),
                ]
            }
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(header: *const u8, block: *const u8, half: usize, group: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe {
            let steps = L::load_i8(block.add(group * PANEL + half * LANES).cast());
            f16_half::<L>(header, half).mul(steps)
        }
    }
}

/// Widens a panel to `[depth][32]` f32, with the operations and roundings of converting the file to f32.
///
/// # Safety
/// The processor has the lanes' instruction set, `panel` points at a panel of `depth` inputs, `out` holds
/// `depth * 32` values.
#[inline(always)]
pub(super) unsafe fn widen<L: Lanes, F: BlockFormat>(
    panel: *const u8,
    depth: usize,
    out: *mut f32,
) {
    for index in 0..depth / BLOCK {
        let (header, block) = F::offsets(index);
        // SAFETY: the caller's contract.
        unsafe {
            let block = (panel.add(header), panel.add(block));
            for half in 0..2 {
                let out = out.add(index * BLOCK * PANEL + half * LANES);
                widen_block::<L, F>(block, half, (out, PANEL));
            }
        }
    }
}

/// Widens a half of the block with this header and start to 32 rows of sixteen f32, `stride` apart.
///
/// # Safety
/// As [`widen`].
#[inline(always)]
pub(super) unsafe fn widen_block<L: Lanes, F: BlockFormat>(
    block: (*const u8, *const u8),
    half: usize,
    out: (*mut f32, usize),
) {
    // SAFETY: the caller's contract.
    unsafe {
        widen_pair::<L, F, 0>(block, half, out);
        widen_pair::<L, F, 1>(block, half, out);
        widen_pair::<L, F, 2>(block, half, out);
        widen_pair::<L, F, 3>(block, half, out);
    }
}

/// # Safety
/// As [`widen_block`].
#[inline(always)]
unsafe fn widen_pair<L: Lanes, F: BlockFormat, const PAIR: usize>(
    (header, block): (*const u8, *const u8),
    half: usize,
    (out, stride): (*mut f32, usize),
) {
    // SAFETY: the caller's contract.
    unsafe {
        let scale = F::scale::<L>(header, block, half, PAIR * F::GROUPS / 4);
        let min = F::min::<L>(header, block, half);
        for (place, quad) in F::quads::<L, PAIR>(block, half).into_iter().enumerate() {
            let quants = [
                L::byte::<0>(quad),
                L::byte::<1>(quad),
                L::byte::<2>(quad),
                L::byte::<3>(quad),
            ];
            for (byte, quant) in quants.into_iter().enumerate() {
                let value = quant.add(L::splat(-F::CENTRE as f32)).mul(scale);
                // Two roundings: a fused operation would differ from the conversion of the file.
                let value = if F::MIN { value.add(min) } else { value };
                value.store(out.add((8 * PAIR + 4 * place + byte) * stride));
            }
        }
    }
}
