//! `y = x W^T` with a fixed order of summation: output `(row, column)` is one chain of multiply-adds over
//! ascending k, whatever the number of rows. That makes a row's bits independent of its neighbours.

use super::lanes::{LANES, Lanes};
use super::pool::ThreadPool;
use super::{Isa, SharedMut, dispatch};

/// Output columns of one panel.
const PANEL: usize = 2 * LANES;
/// Largest row tile of any instruction set.
const MAX_TILE_ROWS: usize = 12;

/// A weight matrix `[columns, depth]` rearranged into panels of 32 output columns, `[panel][depth][32]`, so that
/// one vector load serves sixteen outputs. Columns are padded with zeros to whole panels.
pub(crate) struct PackedLinear {
    data: Vec<f32>,
    columns: usize,
    depth: usize,
}

impl PackedLinear {
    /// Packs a row-major `[columns, depth]` matrix.
    ///
    /// # Panics
    /// When the sizes do not match, which the checkpoint's shape check rules out.
    pub(crate) fn pack(weights: &[f32], columns: usize, depth: usize) -> Self {
        assert_eq!(weights.len(), columns * depth, "weights of a linear layer");
        Self::pack_rows(columns, depth, |column| {
            Some(&weights[column * depth..(column + 1) * depth])
        })
    }

    /// Packs several matrices of equal depth below each other, for one pass over their common input.
    pub(crate) fn pack_stacked(parts: &[&[f32]], depth: usize) -> Self {
        let stacked = parts.concat();
        Self::pack(&stacked, stacked.len() / depth, depth)
    }

    /// Packs gate and up projections for [`Epilogue::SwiGlu`]: sixteen gate columns, then the sixteen up columns
    /// that they multiply, in every panel.
    pub(crate) fn pack_gate_up(gate: &[f32], up: &[f32], depth: usize) -> Self {
        assert_eq!(gate.len(), up.len(), "gate and up projections");
        let half = gate.len() / depth;
        let columns = half.div_ceil(LANES) * PANEL;
        Self::pack_rows(columns, depth, |column| {
            let (panel, lane) = (column / PANEL, column % PANEL);
            let source = if lane < LANES { gate } else { up };
            let column = panel * LANES + lane % LANES;
            (column < half).then(|| &source[column * depth..(column + 1) * depth])
        })
    }

    fn pack_rows<'w>(
        columns: usize,
        depth: usize,
        row: impl Fn(usize) -> Option<&'w [f32]>,
    ) -> Self {
        let mut data = vec![0.0; columns.div_ceil(PANEL) * PANEL * depth];
        for column in 0..columns {
            let Some(source) = row(column) else { continue };
            let panel = &mut data[(column / PANEL) * PANEL * depth..][..PANEL * depth];
            for (k, &w) in source.iter().enumerate() {
                panel[k * PANEL + column % PANEL] = w;
            }
        }
        Self {
            data,
            columns,
            depth,
        }
    }

    /// Outputs per row.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Inputs per row.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Panels of the matrix.
    pub(super) fn panels(&self) -> usize {
        self.columns.div_ceil(PANEL)
    }

    /// Columns per panel.
    pub(super) const fn panel_columns() -> usize {
        PANEL
    }

    /// Copies row `column` of the original matrix: the embedding of a token when head and embedding are tied.
    pub(crate) fn copy_row(&self, column: usize, out: &mut [f32]) {
        let panel = &self.data[(column / PANEL) * PANEL * self.depth..][..PANEL * self.depth];
        for (o, k) in out.iter_mut().zip(panel.chunks_exact(PANEL)) {
            *o = k[column % PANEL];
        }
    }
}

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
    assert_eq!(x.len(), rows * weights.depth, "linear input");
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
    assert!(to <= w.panels() && x.inputs.len() == x.count * w.depth);
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
    let depth = w.depth;
    let tiles = x.count.div_ceil(L::TILE_ROWS);
    let mut values = [[0.0f32; PANEL]; MAX_TILE_ROWS];
    for panel in from..to {
        let weights = w.data[panel * PANEL * depth..].as_ptr();
        let mut row = 0;
        for tile in 0..tiles {
            // Even tiles: 17 rows are 9 + 8, not 12 + 5.
            let end = x.count * (tile + 1) / tiles;
            let inputs = x.inputs[row * depth..].as_ptr();
            // SAFETY: the tile lies inside `x`, the panel inside `w`.
            unsafe { tile_rows::<L>(end - row, inputs, weights, depth, &mut values) };
            for (t, values) in values[..end - row].iter().enumerate() {
                // SAFETY: the caller's contract.
                unsafe { finish::<L>(values, row + t, panel, out) };
            }
            row = end;
        }
    }
}

/// # Safety
/// `inputs` holds `rows` rows of `depth`, `weights` one panel.
#[inline(always)]
unsafe fn tile_rows<L: Lanes>(
    rows: usize,
    inputs: *const f32,
    weights: *const f32,
    depth: usize,
    out: &mut [[f32; PANEL]; MAX_TILE_ROWS],
) {
    macro_rules! with_rows {
        ($($n:literal)*) => {
            match rows {
                // SAFETY: the caller's contract.
                $($n => unsafe { tile::<L, $n>(inputs, weights, depth, out) },)*
                _ => unreachable!("a tile has 1 to {MAX_TILE_ROWS} rows"),
            }
        };
    }
    with_rows!(1 2 3 4 5 6 7 8 9 10 11 12)
}

/// # Safety
/// As [`tile_rows`].
#[inline(always)]
unsafe fn tile<L: Lanes, const ROWS: usize>(
    inputs: *const f32,
    weights: *const f32,
    depth: usize,
    out: &mut [[f32; PANEL]; MAX_TILE_ROWS],
) {
    // SAFETY: `k < depth` keeps every pointer inside the panel and the rows.
    unsafe {
        if L::TILE_VECTORS == 2 {
            let mut acc = [[L::splat(0.0); 2]; ROWS];
            for k in 0..depth {
                let w = weights.add(k * PANEL);
                let (w0, w1) = (L::load(w), L::load(w.add(LANES)));
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
        } else {
            for half in [0, LANES] {
                let mut acc = [L::splat(0.0); ROWS];
                for k in 0..depth {
                    let w = L::load(weights.add(k * PANEL + half));
                    for (t, acc) in acc.iter_mut().enumerate() {
                        let x = L::splat(*inputs.add(t * depth + k));
                        *acc = x.mul_add(w, *acc);
                    }
                }
                for (out, acc) in out.iter_mut().zip(acc) {
                    acc.store(out.as_mut_ptr().add(half));
                }
            }
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

    fn ramp(n: usize, scale: f32) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 2_654_435_761) % 1_000) as f32 / 1_000.0 * scale - scale / 2.0)
            .collect()
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
        let packed = PackedLinear::pack(&w, columns, depth);
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
        let packed = PackedLinear::pack(&ramp(columns * depth, 2.0), columns, depth);
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
        let packed = PackedLinear::pack(&ramp(64 * 100, 2.0), 64, 100);
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
        let packed = PackedLinear::pack_gate_up(&gate, &up, depth);
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
                &packed,
                &mut out,
                Epilogue::SwiGlu,
            );
            for (i, y) in out.iter().enumerate() {
                let (g, u) = (dot(&gate, i / half, i % half), dot(&up, i / half, i % half));
                assert!((g / (1.0 + (-g).exp()) * u - y).abs() < 1e-5, "{isa:?}");
            }
            let plain = PackedLinear::pack(&gate, half, depth);
            let mut out = vec![1.0; rows * half];
            linear(&mut pool, isa, &x, rows, &plain, &mut out, Epilogue::AddTo);
            assert!((out[half] - 1.0 - dot(&gate, 1, 0)).abs() < 1e-5);
        }
    }

    #[test]
    fn copies_the_original_row() {
        let w = ramp(50 * 7, 2.0);
        let packed = PackedLinear::pack(&w, 50, 7);
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
