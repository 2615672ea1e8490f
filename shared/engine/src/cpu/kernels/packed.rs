//! Weights rearranged for the linear kernel, in the number format that they are stored in.
//!
//! Decoding one token reads every weight once and is bound by memory, so weights stay as small as their file has them
//! and are widened in registers. Widening is exact (the same operations, rounded alike, as converting the file to
//! f32), so the format changes speed and never a bit of a result.

use treespec_checkpoint::{MatrixFormat, Q4Block, Q8Block, StoredMatrix};

use super::lanes::{LANES, Lanes};

/// Output columns of one panel.
pub(super) const PANEL: usize = 2 * LANES;
/// Inputs that share a scale in the block formats.
const BLOCK: usize = MatrixFormat::BLOCK;

/// A weight matrix `[columns, depth]` in panels of 32 output columns, so that one vector serves sixteen outputs.
/// Columns are padded with zeros to whole panels.
pub(crate) struct PackedLinear {
    weights: Weights,
    columns: usize,
    depth: usize,
}

/// Panels by format; the innermost dimension is the panel's columns.
enum Weights {
    /// `[panel][depth][32]`
    F32(Vec<f32>),
    /// `[panel][depth][32]`, the upper halves of f32.
    Bf16(Vec<u16>),
    /// Quants `[panel][depth][32]`, scales `[panel][block][32]`.
    Q8_0 { quants: Vec<i8>, scales: Vec<f32> },
    /// Nibbles `[panel][depth][16]`, column `c` in the low and `c + 16` in the high half; scales and minima
    /// `[panel][block][2][32]`.
    Q4_1 { nibbles: Vec<u8>, scales: Vec<f32> },
}

/// Which stored row becomes an output column: matrix and row, or padding.
type Source = Option<(usize, usize)>;

impl PackedLinear {
    /// Packs one matrix.
    pub(crate) fn pack(matrix: &StoredMatrix) -> Self {
        Self::pack_stacked(&[matrix])
    }

    /// Packs several matrices of equal depth below each other, for one pass over their common input.
    pub(crate) fn pack_stacked(matrices: &[&StoredMatrix]) -> Self {
        let sources: Vec<Source> = matrices
            .iter()
            .enumerate()
            .flat_map(|(index, matrix)| (0..matrix.rows()).map(move |row| Some((index, row))))
            .collect();
        Self::pack_sources(matrices, &sources)
    }

    /// Packs gate and up projections for the SwiGLU epilogue: sixteen gate columns, then the sixteen up columns that
    /// they multiply, in every panel.
    pub(crate) fn pack_gate_up(gate: &StoredMatrix, up: &StoredMatrix) -> Self {
        assert_eq!(gate.rows(), up.rows(), "gate and up projections");
        let columns = gate.rows().div_ceil(LANES) * PANEL;
        let sources: Vec<Source> = (0..columns)
            .map(|column| {
                let (panel, lane) = (column / PANEL, column % PANEL);
                let row = panel * LANES + lane % LANES;
                (row < gate.rows()).then_some((lane / LANES, row))
            })
            .collect();
        Self::pack_sources(&[gate, up], &sources)
    }

    fn pack_sources(matrices: &[&StoredMatrix], sources: &[Source]) -> Self {
        let depth = matrices[0].columns();
        assert!(
            matrices.iter().all(|m| m.columns() == depth),
            "matrices of one pass have equal depth"
        );
        let format = matrices[0].format();
        let format = if matrices.iter().all(|m| m.format() == format) {
            format
        } else {
            MatrixFormat::F32
        };
        let mut weights = Weights::zeroed(format, sources.len().div_ceil(PANEL), depth);
        for (column, source) in sources.iter().enumerate() {
            if let Some((matrix, row)) = *source {
                weights.set_column(column, depth, matrices[matrix], row);
            }
        }
        Self {
            weights,
            columns: sources.len(),
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

    /// Copies row `column` of the original matrix: the embedding of a token when head and embedding are tied.
    pub(crate) fn copy_row(&self, column: usize, out: &mut [f32]) {
        let mut values = vec![0.0; self.depth * PANEL];
        // SAFETY: the portable lanes run everywhere; `values` holds one panel.
        unsafe { self.unpack::<super::lanes::Portable>(column / PANEL, &mut values) };
        for (o, k) in out.iter_mut().zip(values.chunks_exact(PANEL)) {
            *o = k[column % PANEL];
        }
    }

    /// Widens panel `panel` to `[depth][32]`.
    ///
    /// # Safety
    /// The processor has the lanes' instruction set; `out` holds `depth * 32` values.
    #[inline(always)]
    pub(super) unsafe fn unpack<L: Lanes>(&self, panel: usize, out: &mut [f32]) {
        // SAFETY: the caller's contract.
        unsafe {
            match self.panel(panel) {
                Panel::F32(reader) => unpack_panel::<L, _>(reader, self.depth, out),
                Panel::Bf16(reader) => unpack_panel::<L, _>(reader, self.depth, out),
                Panel::Q8_0(reader) => unpack_panel::<L, _>(reader, self.depth, out),
                Panel::Q4_1(reader) => unpack_panel::<L, _>(reader, self.depth, out),
            }
        }
    }

    /// A reader of panel `panel`.
    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> Panel {
        let (depth, blocks) = (self.depth, self.depth / BLOCK);
        match &self.weights {
            Weights::F32(w) => Panel::F32(F32Panel(w[panel * depth * PANEL..].as_ptr())),
            Weights::Bf16(w) => Panel::Bf16(Bf16Panel(w[panel * depth * PANEL..].as_ptr())),
            Weights::Q8_0 { quants, scales } => Panel::Q8_0(Q8Panel {
                quants: quants[panel * depth * PANEL..].as_ptr(),
                scales: scales[panel * blocks * PANEL..].as_ptr(),
            }),
            Weights::Q4_1 { nibbles, scales } => Panel::Q4_1(Q4Panel {
                nibbles: nibbles[panel * depth * LANES..].as_ptr(),
                scales: scales[panel * blocks * 2 * PANEL..].as_ptr(),
            }),
        }
    }
}

impl Weights {
    fn zeroed(format: MatrixFormat, panels: usize, depth: usize) -> Self {
        let values = panels * depth * PANEL;
        match format {
            MatrixFormat::F32 => Self::F32(vec![0.0; values]),
            MatrixFormat::Bf16 => Self::Bf16(vec![0; values]),
            MatrixFormat::Q8_0 => Self::Q8_0 {
                quants: vec![0; values],
                scales: vec![0.0; values / BLOCK],
            },
            MatrixFormat::Q4_1 => Self::Q4_1 {
                nibbles: vec![0; values / 2],
                scales: vec![0.0; values / BLOCK * 2],
            },
        }
    }

    fn set_column(&mut self, column: usize, depth: usize, matrix: &StoredMatrix, row: usize) {
        let (panel, lane) = (column / PANEL, column % PANEL);
        let blocks = depth / BLOCK;
        match self {
            Self::F32(w) => {
                let panel = &mut w[panel * depth * PANEL..];
                for (k, value) in matrix.row_f32(row).into_iter().enumerate() {
                    panel[k * PANEL + lane] = value;
                }
            }
            Self::Bf16(w) => {
                let panel = &mut w[panel * depth * PANEL..];
                let (values, _) = matrix.row(row).as_chunks::<2>();
                for (k, value) in values.iter().enumerate() {
                    panel[k * PANEL + lane] = u16::from_le_bytes(*value);
                }
            }
            Self::Q8_0 { quants, scales } => {
                let quants = &mut quants[panel * depth * PANEL..];
                let scales = &mut scales[panel * blocks * PANEL..];
                for (b, block) in Q8Block::of(matrix.row(row)).enumerate() {
                    scales[b * PANEL + lane] = block.scale;
                    for (j, q) in block.quants.into_iter().enumerate() {
                        quants[(b * BLOCK + j) * PANEL + lane] = q;
                    }
                }
            }
            Self::Q4_1 { nibbles, scales } => {
                let nibbles = &mut nibbles[panel * depth * LANES..];
                let scales = &mut scales[panel * blocks * 2 * PANEL..];
                let shift = 4 * (lane / LANES);
                for (b, block) in Q4Block::of(matrix.row(row)).enumerate() {
                    scales[b * 2 * PANEL + lane] = block.scale;
                    scales[(b * 2 + 1) * PANEL + lane] = block.min;
                    for (j, q) in block.quants().into_iter().enumerate() {
                        nibbles[(b * BLOCK + j) * LANES + lane % LANES] |= q << shift;
                    }
                }
            }
        }
    }
}

/// One panel, by format.
pub(super) enum Panel {
    F32(F32Panel),
    Bf16(Bf16Panel),
    Q8_0(Q8Panel),
    Q4_1(Q4Panel),
}

/// Reads the weights of one panel, widened to f32.
///
/// # Safety
/// All methods: the processor has the lanes' instruction set, `block` and `k` lie inside the panel.
pub(super) trait PanelReader<L: Lanes>: Copy {
    /// What the inputs of one block share.
    type Scale: Copy;

    unsafe fn scale(self, block: usize) -> Self::Scale;

    /// The 32 weights of input `k`, which lies in the block of `scale`.
    unsafe fn weights(self, k: usize, scale: Self::Scale) -> [L; 2];
}

#[derive(Clone, Copy)]
pub(super) struct F32Panel(*const f32);

impl F32Panel {
    /// A panel that was unpacked to `[depth][32]`.
    pub(super) fn unpacked(values: &[f32]) -> Self {
        Self(values.as_ptr())
    }
}

impl<L: Lanes> PanelReader<L> for F32Panel {
    type Scale = ();

    #[inline(always)]
    unsafe fn scale(self, _block: usize) {}

    #[inline(always)]
    unsafe fn weights(self, k: usize, (): ()) -> [L; 2] {
        // SAFETY: the trait's contract.
        unsafe {
            let w = self.0.add(k * PANEL);
            [L::load(w), L::load(w.add(LANES))]
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bf16Panel(*const u16);

impl<L: Lanes> PanelReader<L> for Bf16Panel {
    type Scale = ();

    #[inline(always)]
    unsafe fn scale(self, _block: usize) {}

    #[inline(always)]
    unsafe fn weights(self, k: usize, (): ()) -> [L; 2] {
        // SAFETY: the trait's contract.
        unsafe {
            let w = self.0.add(k * PANEL);
            [L::load_bf16(w), L::load_bf16(w.add(LANES))]
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q8Panel {
    quants: *const i8,
    scales: *const f32,
}

impl<L: Lanes> PanelReader<L> for Q8Panel {
    type Scale = [L; 2];

    #[inline(always)]
    unsafe fn scale(self, block: usize) -> [L; 2] {
        // SAFETY: the trait's contract.
        unsafe {
            let scales = self.scales.add(block * PANEL);
            [L::load(scales), L::load(scales.add(LANES))]
        }
    }

    #[inline(always)]
    unsafe fn weights(self, k: usize, [low, high]: [L; 2]) -> [L; 2] {
        // SAFETY: the trait's contract.
        unsafe {
            let quants = self.quants.add(k * PANEL);
            [
                L::load_i8(quants).mul(low),
                L::load_i8(quants.add(LANES)).mul(high),
            ]
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q4Panel {
    nibbles: *const u8,
    scales: *const f32,
}

impl<L: Lanes> PanelReader<L> for Q4Panel {
    /// Scales, then minima.
    type Scale = [L; 4];

    #[inline(always)]
    unsafe fn scale(self, block: usize) -> [L; 4] {
        // SAFETY: the trait's contract.
        unsafe {
            let scales = self.scales.add(block * 2 * PANEL);
            [0, 1, 2, 3].map(|i| L::load(scales.add(i * LANES)))
        }
    }

    #[inline(always)]
    unsafe fn weights(self, k: usize, [low, high, low_min, high_min]: [L; 4]) -> [L; 2] {
        // SAFETY: the trait's contract.
        unsafe {
            let [q_low, q_high] = L::load_nibbles(self.nibbles.add(k * LANES));
            // Two roundings, like the conversion of the file to f32; a fused operation would differ.
            [q_low.mul(low).add(low_min), q_high.mul(high).add(high_min)]
        }
    }
}

/// # Safety
/// As [`PackedLinear::unpack`].
#[inline(always)]
unsafe fn unpack_panel<L: Lanes, R: PanelReader<L>>(reader: R, depth: usize, out: &mut [f32]) {
    debug_assert_eq!(out.len(), depth * PANEL);
    for start in (0..depth).step_by(BLOCK) {
        // SAFETY: `k < depth` stays inside the panel and `out`.
        unsafe {
            let scale = reader.scale(start / BLOCK);
            for k in start..depth.min(start + BLOCK) {
                let [low, high] = reader.weights(k, scale);
                low.store(out.as_mut_ptr().add(k * PANEL));
                high.store(out.as_mut_ptr().add(k * PANEL + LANES));
            }
        }
    }
}

/// Inputs `start..end` of the block that begins at `start`.
#[inline(always)]
pub(super) fn block_end(start: usize, depth: usize) -> usize {
    depth.min(start + BLOCK)
}

/// Starts of the blocks of a panel, with their index.
#[inline(always)]
pub(super) fn blocks(depth: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..depth.div_ceil(BLOCK)).map(|block| (block, block * BLOCK))
}
