//! The outputs of a linear pass: where a panel's columns go and what is done to them on the way.

use super::SharedMut;
use super::lanes::{LANES, Lanes};
use super::packed::Part;
use super::panel::PANEL;

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
    pub(super) fn columns_per_panel(self) -> usize {
        match self {
            Self::SwiGlu => LANES,
            Self::Store | Self::AddTo => PANEL,
        }
    }
}

/// Row-major rows of f32.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) inputs: &'a [f32],
    pub(super) count: usize,
}

/// Where panels of a pass are written.
pub(super) struct Output<'a> {
    values: SharedMut<'a, f32>,
    /// Columns of a row; also the distance between rows.
    columns: usize,
    /// Output column of the matrix that column 0 of a row holds.
    first_column: usize,
    pub(super) epilogue: Epilogue,
}

/// The outputs of a panel.
#[derive(Debug, Clone, Copy)]
pub(super) struct PanelPlace {
    /// First output column.
    column: usize,
    /// Columns that are not padding.
    width: usize,
}

impl PanelPlace {
    pub(super) fn new(part: &Part, panel: usize, epilogue: Epilogue) -> Self {
        let local = panel - part.first_panel;
        match epilogue {
            Epilogue::SwiGlu => Self {
                column: panel * LANES,
                width: LANES,
            },
            Epilogue::Store | Epilogue::AddTo => Self {
                column: part.first_column + local * PANEL,
                width: PANEL.min(part.columns - local * PANEL),
            },
        }
    }
}

impl<'a> Output<'a> {
    /// All columns, `[rows, columns]`, through `epilogue`.
    pub(super) fn new(values: &'a mut [f32], columns: usize, epilogue: Epilogue) -> Self {
        Self {
            values: SharedMut::new(values),
            columns,
            first_column: 0,
            epilogue,
        }
    }

    /// Plain output of the columns from `first_column`, `[rows, columns]`.
    pub(super) fn store(values: &'a mut [f32], columns: usize, first_column: usize) -> Self {
        Self {
            values: SharedMut::new(values),
            columns,
            first_column,
            epilogue: Epilogue::Store,
        }
    }

    /// Writes one row of one panel.
    ///
    /// # Safety
    /// Nobody else writes these outputs.
    #[inline(always)]
    pub(super) unsafe fn finish<L: Lanes>(
        &self,
        values: &[f32; PANEL],
        row: usize,
        panel: PanelPlace,
    ) {
        let start = panel.column - self.first_column;
        let count = panel.width.min(self.columns.saturating_sub(start));
        // SAFETY: the caller's contract.
        let target = unsafe { self.values.part(row * self.columns + start, count) };
        match self.epilogue {
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
}
