//! Tiles of `y = x W^T` in f32: an output is one chain of multiply-adds over ascending inputs, whatever the number of
//! rows. That makes a row's bits independent of its neighbours.

use super::even_tiles::EvenTiles;
use super::lanes::{LANES, Lanes};
use super::linear_output::{Output, PanelPlace, Rows};
use super::panel::{LINE_BYTES, PANEL, PREFETCH_BYTES, VECTOR};

/// Largest row tile of any instruction set.
const MAX_TILE_ROWS: usize = 12;

/// Reads the weights of one panel as f32.
///
/// # Safety
/// The processor has the lanes' instruction set; input `k` lies inside the panel.
pub(super) trait PanelReader<L: Lanes>: Copy {
    /// The weights of input `k` for the sixteen columns of `half`.
    unsafe fn weights(self, k: usize, half: usize) -> L;

    /// Where the weights of input `k` lie, and their bytes.
    fn place(self, k: usize) -> (*const u8, usize);
}

/// `[depth][32]` f32, as stored or widened.
#[derive(Clone, Copy)]
pub(super) struct F32Panel(pub(super) *const f32);

impl<L: Lanes> PanelReader<L> for F32Panel {
    #[inline(always)]
    unsafe fn weights(self, k: usize, half: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe { L::load(self.0.add(k * PANEL + half * LANES)) }
    }

    #[inline(always)]
    fn place(self, k: usize) -> (*const u8, usize) {
        (self.0.wrapping_add(k * PANEL).cast(), 4 * PANEL)
    }
}

/// `[depth / 2][32][2]` bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Bf16Panel(pub(super) *const u8);

impl<L: Lanes> PanelReader<L> for Bf16Panel {
    #[inline(always)]
    unsafe fn weights(self, k: usize, half: usize) -> L {
        // SAFETY: the trait's contract.
        unsafe {
            let pairs = L::load_bytes(self.0.add((k / 2 * 2 + half) * VECTOR));
            if k.is_multiple_of(2) {
                L::low_bf16(pairs)
            } else {
                L::high_bf16(pairs)
            }
        }
    }

    #[inline(always)]
    fn place(self, k: usize) -> (*const u8, usize) {
        (self.0.wrapping_add(k * VECTOR), VECTOR)
    }
}

/// All rows through one panel.
///
/// # Safety
/// The processor has the lanes' instruction set, `x` has rows of `depth` inputs, `reader` reads a panel of them, and nobody
/// else writes the panel's outputs.
#[inline(always)]
pub(super) unsafe fn panel_rows<L: Lanes, R: PanelReader<L>>(
    x: Rows<'_>,
    reader: R,
    depth: usize,
    panel: PanelPlace,
    out: &Output<'_>,
) {
    let mut values = [[0.0f32; PANEL]; MAX_TILE_ROWS];
    for rows in EvenTiles::new(x.count, L::TILE_ROWS).iter() {
        let inputs = x.inputs[rows.start * depth..].as_ptr();
        // SAFETY: the tile lies inside `x`; the caller's contract.
        unsafe {
            tile_rows::<L, R>(rows.len(), inputs, reader, depth, &mut values);
            for (row, values) in rows.zip(&values) {
                out.finish::<L>(values, row, panel);
            }
        }
    }
}

/// # Safety
/// `inputs` holds `rows` rows of `depth`, `reader` reads a panel of `depth`.
#[inline(always)]
unsafe fn tile_rows<L: Lanes, R: PanelReader<L>>(
    rows: usize,
    inputs: *const f32,
    reader: R,
    depth: usize,
    out: &mut [[f32; PANEL]; MAX_TILE_ROWS],
) {
    macro_rules! with_rows {
        ($tile:ident: $($n:literal)*) => {
            match rows {
                // SAFETY: the caller's contract.
                $($n => unsafe { $tile::<L, R, $n>(inputs, reader, depth, out) },)*
                _ => unreachable!("a tile has 1 to {MAX_TILE_ROWS} rows"),
            }
        };
    }
    if L::TILE_VECTORS == 2 {
        with_rows!(wide_tile: 1 2 3 4 5 6 7 8 9 10 11 12)
    } else {
        with_rows!(narrow_tile: 1 2 3 4 5 6)
    }
}

/// Both halves of the panel at once.
///
/// # Safety
/// As [`tile_rows`].
#[inline(always)]
unsafe fn wide_tile<L: Lanes, R: PanelReader<L>, const ROWS: usize>(
    inputs: *const f32,
    reader: R,
    depth: usize,
    out: &mut [[f32; PANEL]; MAX_TILE_ROWS],
) {
    // SAFETY: `k < depth` keeps every pointer inside the panel and the rows.
    unsafe {
        let mut acc = [[L::splat(0.0); 2]; ROWS];
        for k in 0..depth {
            let [w0, w1] = [reader.weights(k, 0), reader.weights(k, 1)];
            let (place, bytes) = reader.place(k);
            for line in (0..bytes).step_by(LINE_BYTES) {
                L::prefetch(place.wrapping_add(PREFETCH_BYTES + line));
            }
            for (t, acc) in acc.iter_mut().enumerate() {
                let x = L::splat(*inputs.add(t * depth + k));
                acc[0] = x.mul_add(w0, acc[0]);
                acc[1] = x.mul_add(w1, acc[1]);
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            acc[0].store(out.as_mut_ptr());
            acc[1].store(out.as_mut_ptr().add(LANES));
        }
    }
}

/// One half of the panel after the other, where registers are few.
///
/// # Safety
/// As [`tile_rows`].
#[inline(always)]
unsafe fn narrow_tile<L: Lanes, R: PanelReader<L>, const ROWS: usize>(
    inputs: *const f32,
    reader: R,
    depth: usize,
    out: &mut [[f32; PANEL]; MAX_TILE_ROWS],
) {
    // SAFETY: as in `wide_tile`.
    unsafe {
        narrow_half::<L, R, ROWS, 0>(inputs, reader, depth, out);
        narrow_half::<L, R, ROWS, 1>(inputs, reader, depth, out);
    }
}

/// # Safety
/// As [`tile_rows`].
#[inline(always)]
unsafe fn narrow_half<L: Lanes, R: PanelReader<L>, const ROWS: usize, const HALF: usize>(
    inputs: *const f32,
    reader: R,
    depth: usize,
    out: &mut [[f32; PANEL]; MAX_TILE_ROWS],
) {
    // SAFETY: as in `wide_tile`.
    unsafe {
        let mut acc = [L::splat(0.0); ROWS];
        for k in 0..depth {
            let w = reader.weights(k, HALF);
            for (t, acc) in acc.iter_mut().enumerate() {
                let x = L::splat(*inputs.add(t * depth + k));
                *acc = x.mul_add(w, *acc);
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            acc.store(out.as_mut_ptr().add(HALF * LANES));
        }
    }
}
