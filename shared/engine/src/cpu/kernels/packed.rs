//! Weights rearranged for the linear kernels, in the number format that they are stored in.
//!
//! Decoding one token reads every weight once and is bound by memory, so weights stay as small as their file has them
//! and are widened in registers.

use treespec_checkpoint::{MatrixFormat, StoredMatrix};

use super::lanes::{LANES, Lanes};
use super::pack_column::pack_column;
use super::panel::{BLOCK, BlockFormat, PANEL, Q4_0, Q4_1, Q4K, Q6K, Q8_0, widen};
use super::weight_memory::{WeightMemory, WeightRegion};
use super::{Isa, PackedWeights, Precision};
use crate::EngineError;

/// A weight matrix `[columns, depth]` in panels of 32 output columns, so that one vector serves sixteen outputs. Parts
/// of different formats follow each other; each is padded with zeros to whole panels.
pub(crate) struct PackedLinear {
    parts: Vec<Part>,
    columns: usize,
    depth: usize,
}

/// Consecutive columns in one format.
pub(super) struct Part {
    pub(super) format: MatrixFormat,
    pub(super) arithmetic: Arithmetic,
    /// Index of its first panel in the whole.
    pub(super) first_panel: usize,
    pub(super) panels: usize,
    /// Its first output column in the whole.
    pub(super) first_column: usize,
    pub(super) columns: usize,
    panel_bytes: usize,
    weights: WeightRegion,
}

/// How a part is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arithmetic {
    /// Weights widened to f32.
    F32,
    /// Activations as integers, a scale per block of 32.
    Integer,
    /// Activations as bfloat16.
    Bf16,
}

impl Arithmetic {
    fn of(format: MatrixFormat, precision: Precision, isa: Isa) -> Self {
        match (precision, format) {
            (Precision::F32, _) | (_, MatrixFormat::F32) => Self::F32,
            (Precision::Quantised, MatrixFormat::Bf16) if isa.multiplies_bf16() => Self::Bf16,
            (Precision::Quantised, MatrixFormat::Bf16) => Self::F32,
            (Precision::Quantised, _) => Self::Integer,
        }
    }
}

/// Packs the weights of one model.
pub(crate) struct Packer {
    precision: Precision,
    isa: Isa,
    requantise: bool,
    memory: WeightMemory,
}

/// Which stored row becomes an output column: matrix and row, or padding.
type Source = Option<(usize, usize)>;

impl Packer {
    /// For kernels of `isa` that compute in `precision`.
    pub(crate) fn new(precision: Precision, isa: Isa) -> Self {
        Self {
            precision,
            isa,
            requantise: false,
            memory: WeightMemory::default(),
        }
    }

    /// Likewise for weights that only decide what is drafted: floating-point ones become Q8_0 where the precision is
    /// not f32, which changes them a little.
    pub(crate) fn for_drafter(&self) -> Self {
        Self {
            requantise: true,
            ..Self::new(self.precision, self.isa)
        }
    }

    /// Packs one matrix.
    ///
    /// # Errors
    /// [`EngineError::WeightMemory`], as all methods.
    pub(crate) fn pack(&mut self, matrix: StoredMatrix) -> Result<PackedLinear, EngineError> {
        self.pack_groups(vec![vec![matrix]])
    }

    /// Packs several matrices of equal depth below each other, for one pass over their common input. A pass can also
    /// start at any group.
    pub(crate) fn pack_groups(
        &mut self,
        groups: Vec<Vec<StoredMatrix>>,
    ) -> Result<PackedLinear, EngineError> {
        let groups: Vec<Vec<_>> = groups
            .into_iter()
            .map(|group| group.into_iter().map(|m| self.convert(m)).collect())
            .collect();
        let parts = groups
            .iter()
            .flat_map(|group| group.chunk_by(|a, b| a.format() == b.format()));
        let parts = parts.map(|matrices| {
            let rows = |(index, matrix): (usize, &StoredMatrix)| {
                (0..matrix.rows()).map(move |row| Some((index, row)))
            };
            let sources: Vec<Source> = matrices.iter().enumerate().flat_map(rows).collect();
            (matrices, sources)
        });
        self.pack_parts(parts)
    }

    /// Packs gate and up projections for the SwiGLU epilogue: sixteen gate columns, then the sixteen up columns that
    /// they multiply, in every panel.
    pub(crate) fn pack_gate_up(
        &mut self,
        gate: StoredMatrix,
        up: StoredMatrix,
    ) -> Result<PackedLinear, EngineError> {
        assert_eq!(gate.rows(), up.rows(), "gate and up projections");
        let mut matrices = [gate, up].map(|m| self.convert(m));
        if matrices[0].format() != matrices[1].format() {
            matrices = matrices.map(|m| widened(&m));
        }
        let rows = matrices[0].rows();
        let sources: Vec<Source> = (0..rows.div_ceil(LANES) * PANEL)
            .map(|column| {
                let (panel, lane) = (column / PANEL, column % PANEL);
                let row = panel * LANES + lane % LANES;
                (row < rows).then_some((lane / LANES, row))
            })
            .collect();
        self.pack_parts(std::iter::once((&matrices[..], sources)))
    }

    fn convert(&self, matrix: StoredMatrix) -> StoredMatrix {
        let float = matches!(matrix.format(), MatrixFormat::F32 | MatrixFormat::Bf16);
        if self.requantise && self.precision == Precision::Quantised && float {
            return matrix.quantised_q8_0().unwrap_or(matrix);
        }
        matrix
    }

    fn pack_parts<'a>(
        &mut self,
        parts: impl Iterator<Item = (&'a [StoredMatrix], Vec<Source>)>,
    ) -> Result<PackedLinear, EngineError> {
        let mut packed = PackedLinear {
            parts: Vec::new(),
            columns: 0,
            depth: 0,
        };
        let mut first_panel = 0;
        for (matrices, sources) in parts {
            let (format, depth) = (matrices[0].format(), matrices[0].columns());
            assert!(
                matrices.iter().all(|m| m.columns() == depth)
                    && (packed.depth == 0 || packed.depth == depth),
                "matrices of one pass have equal depth"
            );
            let panels = sources.len().div_ceil(PANEL);
            let panel_bytes = panel_bytes(format, depth);
            let mut bytes = vec![0; panels * panel_bytes];
            for (column, source) in sources.iter().enumerate() {
                if let Some((matrix, row)) = *source {
                    let panel = &mut bytes[column / PANEL * panel_bytes..][..panel_bytes];
                    pack_column(panel, column % PANEL, &matrices[matrix], row);
                }
            }
            packed.parts.push(Part {
                format,
                arithmetic: Arithmetic::of(format, self.precision, self.isa),
                first_panel,
                panels,
                first_column: packed.columns,
                columns: sources.len(),
                panel_bytes,
                weights: self
                    .memory
                    .store(&bytes)
                    .map_err(EngineError::WeightMemory)?,
            });
            first_panel += panels;
            packed.columns += sources.len();
            packed.depth = depth;
        }
        Ok(packed)
    }
}

/// The matrix in f32.
fn widened(matrix: &StoredMatrix) -> StoredMatrix {
    let rows = (0..matrix.rows()).flat_map(|row| matrix.row_f32(row));
    StoredMatrix::from_f32(&rows.collect::<Vec<f32>>(), matrix.columns())
}

/// Bytes of a panel of `depth` inputs.
fn panel_bytes(format: MatrixFormat, depth: usize) -> usize {
    match format {
        MatrixFormat::F32 => depth * PANEL * size_of::<f32>(),
        // Inputs come in pairs.
        MatrixFormat::Bf16 => depth.next_multiple_of(2) * PANEL * size_of::<u16>(),
        MatrixFormat::Q4_0 => Q4_0::panel_bytes(depth),
        MatrixFormat::Q4_1 => Q4_1::panel_bytes(depth),
        MatrixFormat::Q8_0 => Q8_0::panel_bytes(depth),
        MatrixFormat::Q4_K => Q4K::panel_bytes(depth),
        MatrixFormat::Q6_K => Q6K::panel_bytes(depth),
    }
}

impl PackedLinear {
    /// Outputs per row.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Inputs per row.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// What one pass over the matrix reads and multiplies.
    pub(crate) fn weights(&self) -> PackedWeights {
        let of_part = |part: &Part| {
            let values = (part.columns * self.depth) as u64;
            let mut weights = PackedWeights {
                bytes: (part.panels * part.panel_bytes) as u64,
                ..PackedWeights::default()
            };
            match part.arithmetic {
                Arithmetic::Integer => weights.int8 = values,
                Arithmetic::Bf16 => weights.bf16 = values,
                Arithmetic::F32 => weights.f32 = values,
            }
            weights
        };
        self.parts.iter().map(of_part).sum()
    }

    /// Panels of the matrix.
    pub(super) fn panels(&self) -> usize {
        self.parts
            .last()
            .map_or(0, |part| part.first_panel + part.panels)
    }

    /// The parts, in the order of their columns.
    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The panel of column `column`, where a part begins or the last one ends.
    ///
    /// # Panics
    /// When none does.
    pub(super) fn panel_at(&self, column: usize) -> usize {
        if column == self.columns {
            return self.panels();
        }
        let part = self.parts.iter().find(|part| part.first_column == column);
        part.expect("a group begins at the column").first_panel
    }

    /// Index of the part that holds panel `panel`.
    pub(super) fn part_of(&self, panel: usize) -> usize {
        self.parts
            .partition_point(|part| part.first_panel + part.panels <= panel)
    }

    /// Copies row `column` of the original matrix: the embedding of a token when head and embedding are tied.
    pub(crate) fn copy_row(&self, column: usize, out: &mut [f32]) {
        let index = self
            .parts
            .partition_point(|part| part.first_column + part.columns <= column);
        let part = &self.parts[index];
        let local = column - part.first_column;
        super::pack_column::read_column(part.format, part.panel(local / PANEL), local % PANEL, out);
    }
}

impl Part {
    /// The bytes of its panel `panel`, and of what follows.
    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        &self.weights.bytes()[panel * self.panel_bytes..]
    }

    /// Widens a panel of a block format to `[depth][32]`.
    ///
    /// # Safety
    /// The processor has the lanes' instruction set; `out` holds `depth * 32` values.
    #[inline(always)]
    pub(super) unsafe fn widen<L: Lanes>(&self, panel: usize, depth: usize, out: &mut [f32]) {
        debug_assert_eq!(out.len(), depth * PANEL);
        let (panel, out) = (self.panel(panel).as_ptr(), out.as_mut_ptr());
        // SAFETY: the caller's contract; the panel is one of the part's format.
        unsafe {
            match self.format {
                MatrixFormat::Q4_0 => widen::<L, Q4_0>(panel, depth, out),
                MatrixFormat::Q4_1 => widen::<L, Q4_1>(panel, depth, out),
                MatrixFormat::Q8_0 => widen::<L, Q8_0>(panel, depth, out),
                MatrixFormat::Q4_K => widen::<L, Q4K>(panel, depth, out),
                MatrixFormat::Q6_K => widen::<L, Q6K>(panel, depth, out),
                MatrixFormat::F32 | MatrixFormat::Bf16 => {
                    unreachable!("floating-point panels are read as they are")
                }
            }
        }
    }
}

const _: () = assert!(BLOCK.is_multiple_of(2 * LANES));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_count_by_their_products_and_bytes_with_padding() {
        let (rows, depth) = (40, 64);
        let float = || StoredMatrix::from_f32(&vec![1.0; rows * depth], depth);
        let groups = || vec![vec![float().quantised_q8_0().unwrap()], vec![float()]];
        let values = (rows * depth) as u64;
        // Both parts are padded to two panels.
        let bytes = 2 * (Q8_0::panel_bytes(depth) + depth * PANEL * size_of::<f32>()) as u64;

        let mut packer = Packer::new(Precision::Quantised, Isa::Portable);
        let quantised = PackedWeights {
            bytes,
            int8: values,
            bf16: 0,
            f32: values,
        };
        assert_eq!(packer.pack_groups(groups()).unwrap().weights(), quantised);

        let mut packer = Packer::new(Precision::F32, Isa::Portable);
        let widened = PackedWeights {
            int8: 0,
            f32: 2 * values,
            ..quantised
        };
        assert_eq!(packer.pack_groups(groups()).unwrap().weights(), widened);
    }
}
