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
mod tests {
    use super::*;
    use treespec_checkpoint::{MatrixFormat, StoredMatrix};

    fn ramp(n: usize, scale: f32) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 2_654_435_761) % 1_000) as f32 / 1_000.0 * scale - scale / 2.0)
            .collect()
    }

    fn packed(weights: &[f32], depth: usize) -> PackedLinear {
        PackedLinear::pack(&StoredMatrix::from_f32(weights, depth))
    }

    fn run(isa: Isa, threads: usize, x: &[f32], rows: usize, w: &PackedLinear) -> Vec<f32> {
        let mut out = vec![0.0; rows * w.columns()];
        let mut pool = ThreadPool::new(threads);
        linear(&mut pool, isa, x, rows, w, &mut out, Epilogue::Store);
        out
    }

    #[test]
    fn equals_the_definition_on_every_instruction_set() {
        let (columns, depth, rows) = (70, 45, 13);
        let (w, x) = (ramp(columns * depth, 2.0), ramp(rows * depth, 3.0));
        let packed = packed(&w, depth);
        for isa in available() {
            let out = run(isa, 2, &x, rows, &packed);
            for (i, y) in out.iter().enumerate() {
                let (r, c) = (i / columns, i % columns);
                let exact: f64 = (0..depth)
                    .map(|k| f64::from(x[r * depth + k]) * f64::from(w[c * depth + k]))
                    .sum();
                assert!((exact - f64::from(*y)).abs() < 1e-4, "{isa:?} {r} {c}");
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_any_batch() {
        let (columns, depth) = (96, 64);
        let packed = packed(&ramp(columns * depth, 2.0), depth);
        let x = ramp(300 * depth, 3.0);
        for isa in available() {
            let all = run(isa, 2, &x, 300, &packed);
            for rows in [1, 2, 5, 17, 65] {
                assert_eq!(
                    run(isa, 1, &x[..rows * depth], rows, &packed),
                    all[..rows * columns]
                );
            }
        }
    }

    #[test]
    fn fused_instruction_sets_give_the_same_bits() {
        let packed = packed(&ramp(64 * 100, 2.0), 100);
        let x = ramp(7 * 100, 3.0);
        let fused: Vec<_> = available()
            .into_iter()
            .filter(|isa| *isa != Isa::Portable)
            .map(|isa| run(isa, 1, &x, 7, &packed))
            .collect();
        assert!(fused.windows(2).all(|w| w[0] == w[1]));
    }

    #[test]
    fn swiglu_and_residual_epilogues() {
        let (half, depth, rows) = (21, 10, 3);
        let (gate, up, x) = (
            ramp(half * depth, 2.0),
            ramp(half * depth, 1.0),
            ramp(rows * depth, 2.0),
        );
        let gate_up = PackedLinear::pack_gate_up(
            &StoredMatrix::from_f32(&gate, depth),
            &StoredMatrix::from_f32(&up, depth),
        );
        let dot = |w: &[f32], r: usize, c: usize| -> f32 {
            (0..depth)
                .map(|k| x[r * depth + k] * w[c * depth + k])
                .sum()
        };
        for isa in available() {
            let mut out = vec![0.0; rows * half];
            let mut pool = ThreadPool::new(2);
            linear(
                &mut pool,
                isa,
                &x,
                rows,
                &gate_up,
                &mut out,
                Epilogue::SwiGlu,
            );
            for (i, y) in out.iter().enumerate() {
                let (g, u) = (dot(&gate, i / half, i % half), dot(&up, i / half, i % half));
                assert!((g / (1.0 + (-g).exp()) * u - y).abs() < 1e-5, "{isa:?}");
            }
            let plain = packed(&gate, depth);
            let mut out = vec![1.0; rows * half];
            linear(&mut pool, isa, &x, rows, &plain, &mut out, Epilogue::AddTo);
            assert!((out[half] - 1.0 - dot(&gate, 1, 0)).abs() < 1e-5);
        }
    }

    /// Random stored bytes with sane scales.
    fn stored(format: MatrixFormat, rows: usize, columns: usize) -> StoredMatrix {
        let width = format.row_bytes(columns).unwrap();
        let block = width / (columns / MatrixFormat::BLOCK);
        let bytes = (0..rows * width)
            .map(|i| match (format, i % block) {
                (MatrixFormat::Bf16, at) if at % 2 == 1 => 0x3d,
                // The upper byte of an f16 near 0.01.
                (MatrixFormat::Q8_0 | MatrixFormat::Q4_1, 1) => 0x21,
                (MatrixFormat::Q4_1, 3) => 0xa3,
                _ => (i * 2_654_435_761 >> 7) as u8,
            })
            .collect();
        StoredMatrix::new(format, [rows, columns], bytes).unwrap()
    }

    #[test]
    fn stored_formats_give_the_bits_of_their_f32_values() {
        let (columns, depth) = (70, 96);
        for format in [MatrixFormat::Bf16, MatrixFormat::Q8_0, MatrixFormat::Q4_1] {
            let matrix = stored(format, columns, depth);
            let values: Vec<f32> = (0..columns).flat_map(|row| matrix.row_f32(row)).collect();
            let (own, widened) = (PackedLinear::pack(&matrix), packed(&values, depth));
            for isa in available() {
                for rows in [1, 2, 5, 12, 13, 17] {
                    let x = ramp(rows * depth, 3.0);
                    let expected = run(isa, 1, &x, rows, &widened);
                    assert_eq!(
                        run(isa, 2, &x, rows, &own),
                        expected,
                        "{format:?} {isa:?} {rows}"
                    );
                }
            }
            let mut row = vec![0.0; depth];
            own.copy_row(69, &mut row);
            assert_eq!(row, matrix.row_f32(69), "{format:?}");
        }
    }

    #[test]
    fn copies_the_original_row() {
        let w = ramp(50 * 7, 2.0);
        let packed = packed(&w, 7);
        let mut row = [0.0; 7];
        packed.copy_row(41, &mut row);
        assert_eq!(row, w[41 * 7..42 * 7]);
    }

    fn available() -> Vec<Isa> {
        let mut all = vec![Isa::Portable];
        match Isa::detect() {
            Isa::Avx512 => all.extend([Isa::Avx2, Isa::Avx512]),
            Isa::Avx2 => all.push(Isa::Avx2),
            Isa::Portable => {}
        }
        all
    }
}
