//! `y = x W^T` with a fixed order of summation: output `(row, column)` is one chain of multiply-adds over
//! ascending k, whatever the number of rows. That makes a row's bits independent of its neighbours.

use std::cell::RefCell;

use super::lanes::{LANES, Lanes};
use super::packed::{F32Panel, PANEL, PackedLinear, Panel, PanelReader, block_end, blocks};
use super::pool::ThreadPool;
use super::{Isa, SharedMut, dispatch};

/// Largest row tile of any instruction set.
const MAX_TILE_ROWS: usize = 24;

/// What happens to an output before it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Epilogue {
    /// `out = y`
    Store,
    /// `out += y`: the residual connection.
    AddTo,
    /// `out[c] = silu(gate[c]) * up[c]` over weights from [`PackedLinear::pack_gate_up`].
    SwiGlu,
}

impl Epilogue {
    /// Output columns that one panel writes.
    fn columns_per_panel(self) -> usize {
        match self {
            Self::SwiGlu => LANES,
            Self::Store | Self::AddTo => PANEL,
        }
    }
}

/// Row-major inputs and outputs of a linear pass.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) inputs: &'a [f32],
    pub(super) count: usize,
}

/// `out = epilogue(x W^T)` for `rows` rows: `x` is `[rows, depth]`, `out` is `[rows, out.len() / rows]`.
///
/// # Panics
/// When the sizes do not match.
pub(crate) fn linear(
    pool: &mut ThreadPool,
    isa: Isa,
    x: &[f32],
    rows: usize,
    weights: &PackedLinear,
    out: &mut [f32],
    epilogue: Epilogue,
) {
    if rows == 0 {
        return;
    }
    assert_eq!(x.len(), rows * weights.depth(), "linear input");
    let out_columns = out.len() / rows;
    assert_eq!(out.len(), rows * out_columns, "linear output");
    assert!(
        out_columns <= weights.panels() * epilogue.columns_per_panel(),
        "linear output columns"
    );
    let grain = weights.panels().div_ceil(pool.threads() * 8).max(1);
    let inputs = Rows {
        inputs: x,
        count: rows,
    };
    let target = Output {
        values: SharedMut::new(out),
        columns: out_columns,
        first_column: 0,
        epilogue,
    };
    pool.for_ranges(weights.panels(), grain, &|panels| {
        linear_panels(isa, inputs, weights, panels.start, panels.end, &target);
    });
}

/// Where panels of a pass are written.
pub(super) struct Output<'a> {
    values: SharedMut<'a, f32>,
    /// Columns of a row; also the distance between rows.
    columns: usize,
    /// Output column of the matrix that column 0 of a row holds.
    first_column: usize,
    epilogue: Epilogue,
}

impl<'a> Output<'a> {
    /// Plain output of the columns from `first_column`, `[rows, columns]`.
    pub(super) fn store(values: &'a mut [f32], columns: usize, first_column: usize) -> Self {
        Self {
            values: SharedMut::new(values),
            columns,
            first_column,
            epilogue: Epilogue::Store,
        }
    }
}

/// Like [`linear`] on one thread and for the panels `from..to` only. Concurrent calls must have disjoint panels.
pub(super) fn linear_panels(
    isa: Isa,
    x: Rows<'_>,
    w: &PackedLinear,
    from: usize,
    to: usize,
    out: &Output<'_>,
) {
    assert!(to <= w.panels() && x.inputs.len() == x.count * w.depth());
    dispatch!(isa, panels(x: Rows<'_>, w: &PackedLinear, from: usize, to: usize, out: &Output<'_>));
}

/// # Safety
/// `x` and `w` match, and nobody else writes the outputs of these panels.
#[inline(always)]
unsafe fn panels<L: Lanes>(
    x: Rows<'_>,
    w: &PackedLinear,
    from: usize,
    to: usize,
    out: &Output<'_>,
) {
    let depth = w.depth();
    // Widening in registers serves one tile. For more, or where registers are few, the panel is widened once.
    let direct = L::TILE_VECTORS == 2 && x.count <= L::HALF_TILE_ROWS;
    // Taken out rather than borrowed in a closure: a closure would be compiled without the target features.
    let mut unpacked = UNPACKED.take();
    for panel in from..to {
        // SAFETY: the caller's contract, and `unpacked` is a whole panel.
        unsafe {
            match w.panel(panel) {
                Panel::F32(reader) => panel_rows::<L, _>(x, reader, depth, panel, out),
                Panel::Bf16(reader) if direct => panel_rows::<L, _>(x, reader, depth, panel, out),
                Panel::Q8_0(reader) if direct => panel_rows::<L, _>(x, reader, depth, panel, out),
                Panel::Q4_1(reader) if direct => panel_rows::<L, _>(x, reader, depth, panel, out),
                _ => {
                    unpacked.resize(depth * PANEL, 0.0);
                    w.unpack::<L>(panel, &mut unpacked);
                    let reader = F32Panel::unpacked(&unpacked);
                    panel_rows::<L, _>(x, reader, depth, panel, out);
                }
            }
        }
    }
    UNPACKED.set(unpacked);
}

thread_local! {
    /// One widened panel, kept because clearing it anew for every call would cost as much as filling it.
    static UNPACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// All rows through one panel.
///
/// # Safety
/// As [`panels`]; `reader` reads a panel of `depth` inputs.
#[inline(always)]
unsafe fn panel_rows<L: Lanes, R: PanelReader<L>>(
    x: Rows<'_>,
    reader: R,
    depth: usize,
    panel: usize,
    out: &Output<'_>,
) {
    // One tall tile reads the panel twice but widens each weight once; more rows go through wide tiles.
    let tiles = if x.count <= L::HALF_TILE_ROWS {
        1
    } else {
        x.count.div_ceil(L::TILE_ROWS)
    };
    let mut values = [[0.0f32; PANEL]; MAX_TILE_ROWS];
    let mut row = 0;
    for tile in 0..tiles {
        // Even tiles: 26 rows are 8 + 9 + 9, not 12 + 12 + 2.
        let end = x.count * (tile + 1) / tiles;
        let inputs = x.inputs[row * depth..].as_ptr();
        // SAFETY: the tile lies inside `x`; the caller's contract.
        unsafe { tile_rows::<L, R>(end - row, inputs, reader, depth, &mut values) };
        for (t, values) in values[..end - row].iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { finish::<L>(values, row + t, panel, out) };
        }
        row = end;
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
    if L::TILE_VECTORS == 2 && rows <= L::TILE_ROWS {
        with_rows!(wide_tile: 1 2 3 4 5 6 7 8 9 10 11 12)
    } else if L::TILE_VECTORS == 2 {
        with_rows!(tall_tile: 13 14 15 16 17 18 19 20 21 22 23 24)
    } else {
        with_rows!(tall_tile: 1 2 3 4 5 6)
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
        for (block, start) in blocks(depth) {
            let scale = reader.scale(block);
            for k in start..block_end(start, depth) {
                let [w0, w1] = reader.weights(k, scale);
                for (t, acc) in acc.iter_mut().enumerate() {
                    let x = L::splat(*inputs.add(t * depth + k));
                    acc[0] = x.mul_add(w0, acc[0]);
                    acc[1] = x.mul_add(w1, acc[1]);
                }
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            acc[0].store(out.as_mut_ptr());
            acc[1].store(out.as_mut_ptr().add(LANES));
        }
    }
}

/// One half of the panel after the other, for twice the rows in the same registers.
///
/// # Safety
/// As [`tile_rows`].
#[inline(always)]
unsafe fn tall_tile<L: Lanes, R: PanelReader<L>, const ROWS: usize>(
    inputs: *const f32,
    reader: R,
    depth: usize,
    out: &mut [[f32; PANEL]; MAX_TILE_ROWS],
) {
    // SAFETY: as in `wide_tile`.
    unsafe {
        tall_half::<L, R, ROWS, 0>(inputs, reader, depth, out);
        tall_half::<L, R, ROWS, 1>(inputs, reader, depth, out);
    }
}

/// # Safety
/// As [`tile_rows`].
#[inline(always)]
unsafe fn tall_half<L: Lanes, R: PanelReader<L>, const ROWS: usize, const HALF: usize>(
    inputs: *const f32,
    reader: R,
    depth: usize,
    out: &mut [[f32; PANEL]; MAX_TILE_ROWS],
) {
    // SAFETY: as in `wide_tile`.
    unsafe {
        let mut acc = [L::splat(0.0); ROWS];
        for (block, start) in blocks(depth) {
            let scale = reader.scale(block);
            for k in start..block_end(start, depth) {
                let w = reader.weights(k, scale)[HALF];
                for (t, acc) in acc.iter_mut().enumerate() {
                    let x = L::splat(*inputs.add(t * depth + k));
                    *acc = x.mul_add(w, *acc);
                }
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            acc.store(out.as_mut_ptr().add(HALF * LANES));
        }
    }
}

/// Writes one row of one panel.
///
/// # Safety
/// Nobody else writes these outputs.
#[inline(always)]
unsafe fn finish<L: Lanes>(values: &[f32; PANEL], row: usize, panel: usize, out: &Output<'_>) {
    let width = out.epilogue.columns_per_panel();
    let start = panel * width - out.first_column;
    let count = width.min(out.columns.saturating_sub(start));
    // SAFETY: the caller's contract.
    let target = unsafe { out.values.part(row * out.columns + start, count) };
    match out.epilogue {
        Epilogue::Store => target.copy_from_slice(&values[..count]),
        Epilogue::AddTo => target.iter_mut().zip(values).for_each(|(o, y)| *o += y),
        Epilogue::SwiGlu => {
            // SAFETY: `values` holds two vectors.
            let product = unsafe {
                let gate = L::load(values.as_ptr());
                let up = L::load(values.as_ptr().add(LANES));
                let one = L::splat(1.0);
                let negated = gate.mul(L::splat(-1.0));
                gate.div(one.add(negated.exp())).mul(up).to_array()
            };
            target.copy_from_slice(&product[..count]);
        }
    }
}

#[cfg(test)]
mod tests;
