//! Weight matrices in the order in which the kernels read them.

use std::num::NonZero;
use std::sync::Arc;
use std::thread;

use half::bf16;
use treespec_checkpoint::{MatrixFormat, StoredMatrix};

use super::shape::{BLOCK_DEPTH, Layout, LinearShape, PANEL_ROWS};
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, KernelSource, Launch};

pub(crate) const RANDOM_SOURCE: KernelSource = KernelSource {
    name: "random_weights.cu",
    text: include_str!("../kernels/random_weights.cu"),
};

/// Values of a block of 32 of the depth of a panel.
const BLOCK_VALUES: usize = PANEL_ROWS * BLOCK_DEPTH;

/// Values that are packed before they are uploaded, so that a large head needs no second copy on the host.
const UPLOAD_VALUES: usize = 32 << 20;

/// A weight matrix on the device, bf16.
///
/// Rows come in panels of 16 and the depth in blocks of 32, padded with zeros: `[group][block][panel][step][lane][8]`
/// with groups of 1 panel in a small and 4 in a large matrix, where `lane = 4 * g + c` has, for step s of two, rows g and g + 8 at depths `8c + 4s + {0, 1}`, then at `8c + 4s + {2, 3}`:
/// what it passes to one `mma.m16n8k16`. The order of the depth is permuted alike in the activations.
pub struct PackedLinear {
    values: DeviceBuffer<bf16>,
    rows: usize,
    depth: usize,
    layout: Layout,
    shape: LinearShape,
}

impl PackedLinear {
    /// Packs matrices of the same depth, stacked, and uploads them. Values are rounded to bf16, ties to even.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for shapes that do not go together, or when there is too little memory.
    pub fn pack(
        device: &Arc<Device>,
        matrices: &[&StoredMatrix],
        layout: Layout,
    ) -> Result<Self, CudaError> {
        let (rows, depth) = stacked_shape(matrices)?;
        let shape = LinearShape::choose(rows, depth, layout, device.sm_count() as usize);
        Self::pack_with(device, matrices, layout, shape)
    }

    /// [`PackedLinear::pack`] with a shape of the caller's choice.
    ///
    /// # Errors
    /// As [`PackedLinear::pack`].
    pub fn pack_with(
        device: &Arc<Device>,
        matrices: &[&StoredMatrix],
        layout: Layout,
        shape: LinearShape,
    ) -> Result<Self, CudaError> {
        let (rows, depth) = stacked_shape(matrices)?;
        let linear = Self::uninit(device, rows, depth, layout, shape)?;
        let panel_values = linear.blocks() * BLOCK_VALUES;
        let panels = linear.values.len() / panel_values;
        let group = shape.group();
        let per_upload = (UPLOAD_VALUES / panel_values / group * group).clamp(group, panels);
        let mut part = vec![bf16::ZERO; per_upload * panel_values];
        for first in (0..panels).step_by(per_upload) {
            let part = &mut part[..per_upload.min(panels - first) * panel_values];
            pack_panels(part, first, panel_values, group, &|panel, row| {
                let row = source_row(layout, rows, panel, row)?;
                Some(bf16_row(matrices, row))
            });
            linear.values.write_at(first * panel_values, part)?;
        }
        Ok(linear)
    }

    /// Random values with standard deviation `scale`, made on the device: for benchmarks.
    ///
    /// # Errors
    /// When there is too little memory.
    pub fn random(
        device: &Arc<Device>,
        rows: usize,
        depth: usize,
        layout: Layout,
        seed: u64,
        scale: f32,
    ) -> Result<Self, CudaError> {
        let shape = LinearShape::choose(rows, depth, layout, device.sm_count() as usize);
        Self::random_with(device, rows, depth, layout, shape, seed, scale)
    }

    /// [`PackedLinear::random`] with a shape of the caller's choice.
    ///
    /// # Errors
    /// As [`PackedLinear::random`], or for a shape that there is no kernel for.
    pub fn random_with(
        device: &Arc<Device>,
        rows: usize,
        depth: usize,
        layout: Layout,
        shape: LinearShape,
        seed: u64,
        scale: f32,
    ) -> Result<Self, CudaError> {
        let linear = Self::uninit(device, rows, depth, layout, shape)?;
        let kernel = device
            .module(&RANDOM_SOURCE, &[])?
            .function("random_weights")?;
        let vectors = linear.values.len() / 8;
        Launch::new(&kernel)
            .grid(vectors.div_ceil(256).min(4096), 1, 1)
            .block(256)
            .arg(linear.values.ptr())
            .arg(vectors as u64)
            .arg(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
            .arg(scale)
            .run(device)?;
        Ok(linear)
    }

    fn uninit(
        device: &Arc<Device>,
        rows: usize,
        depth: usize,
        layout: Layout,
        shape: LinearShape,
    ) -> Result<Self, CudaError> {
        let wrong = |what: &str| {
            Err(CudaError::Unsupported(format!(
                "a matrix of {rows} by {depth}: {what}"
            )))
        };
        if rows == 0 || depth == 0 {
            return wrong("it is empty");
        }
        if layout == Layout::GateUp && !rows.is_multiple_of(16) {
            return wrong("gate and up need a multiple of 8 rows each");
        }
        if !shape.is_valid() || shape.split > depth.div_ceil(BLOCK_DEPTH) {
            return wrong(&format!("there is no kernel for {shape:?}"));
        }
        if layout == Layout::Head && shape.panels < 4 {
            return wrong("a head needs tiles of at least 64 rows");
        }
        let panels = rows.div_ceil(PANEL_ROWS).next_multiple_of(shape.padding());
        let values = panels * depth.div_ceil(BLOCK_DEPTH) * BLOCK_VALUES;
        // The kernels number blocks of 32 in 32 bits.
        if values / BLOCK_VALUES > u32::MAX as usize {
            return wrong("it is too large");
        }
        Ok(Self {
            values: DeviceBuffer::uninit(device, values)?,
            rows,
            depth,
            layout,
            shape,
        })
    }

    /// Rows, those of gate and up both counted.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of an input row.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// How the rows are packed.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The order of its sums.
    pub fn shape(&self) -> LinearShape {
        self.shape
    }

    /// Parts of a row's sum of squares that [`super::Epilogue::Residual`] writes.
    pub fn parts(&self) -> usize {
        self.rows.div_ceil(self.shape.part_rows())
    }

    /// Groups of 64 rows, see [`super::Epilogue::Head`].
    pub fn groups(&self) -> usize {
        self.rows.div_ceil(64)
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> u64 {
        size_of::<bf16>() as u64 * self.values.len() as u64
    }

    /// Blocks of 32 of the depth.
    pub(crate) fn blocks(&self) -> usize {
        self.depth.div_ceil(BLOCK_DEPTH)
    }

    /// Panels that hold rows; more may be there, all zero.
    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.values.ptr()
    }
}

fn stacked_shape(matrices: &[&StoredMatrix]) -> Result<(usize, usize), CudaError> {
    let depth = matrices.first().map_or(0, |matrix| matrix.columns());
    if let Some(other) = matrices.iter().find(|matrix| matrix.columns() != depth) {
        let columns = other.columns();
        return Err(CudaError::Unsupported(format!(
            "matrices of {depth} and {columns} columns in one linear layer"
        )));
    }
    Ok((matrices.iter().map(|matrix| matrix.rows()).sum(), depth))
}

/// The row of the stacked matrices that is row `row` of a panel.
fn source_row(layout: Layout, rows: usize, panel: usize, row: usize) -> Option<usize> {
    match layout {
        Layout::Plain | Layout::Head => Some(panel * PANEL_ROWS + row).filter(|row| *row < rows),
        Layout::GateUp => {
            let (half, width) = (PANEL_ROWS / 2, rows / 2);
            let of_each = panel * half + row % half;
            (of_each < width).then_some(of_each + if row < half { 0 } else { width })
        }
    }
}

fn bf16_row(matrices: &[&StoredMatrix], mut row: usize) -> Vec<bf16> {
    for matrix in matrices {
        if row >= matrix.rows() {
            row -= matrix.rows();
            continue;
        }
        return match matrix.format() {
            MatrixFormat::Bf16 => {
                let (values, _) = matrix.row(row).as_chunks::<2>();
                values
                    .iter()
                    .map(|bytes| bf16::from_le_bytes(*bytes))
                    .collect()
            }
            _ => matrix
                .row_f32(row)
                .into_iter()
                .map(bf16::from_f32)
                .collect(),
        };
    }
    Vec::new()
}

/// Fills whole groups of panels from panel number `first` on all cores; `row_of(panel, row)` are the values of a row, or
/// none for zeros.
fn pack_panels(
    out: &mut [bf16],
    first: usize,
    panel_values: usize,
    group: usize,
    row_of: &(impl Fn(usize, usize) -> Option<Vec<bf16>> + Sync),
) {
    let group_values = panel_values * group;
    let groups = out.len() / group_values;
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let per_thread = groups.div_ceil(threads).max(1);
    thread::scope(|scope| {
        for (index, part) in out.chunks_mut(per_thread * group_values).enumerate() {
            scope.spawn(move || {
                for (offset, values) in part.chunks_mut(group_values).enumerate() {
                    values.fill(bf16::ZERO);
                    let number = first + (index * per_thread + offset) * group;
                    for panel in 0..group {
                        for row in 0..PANEL_ROWS {
                            if let Some(row_values) = row_of(number + panel, row) {
                                pack_row(values, group, panel, row, &row_values);
                            }
                        }
                    }
                }
            });
        }
    });
}

fn pack_row(out: &mut [bf16], group: usize, panel: usize, row: usize, values: &[bf16]) {
    for (blocks, values) in out
        .chunks_mut(BLOCK_VALUES * group)
        .zip(values.chunks(BLOCK_DEPTH))
    {
        let block = &mut blocks[panel * BLOCK_VALUES..][..BLOCK_VALUES];
        for (k, value) in values.iter().enumerate() {
            block[place_in_block(row, k)] = *value;
        }
    }
}

/// Where row `row` at depth `k` lies in a block of a panel.
fn place_in_block(row: usize, k: usize) -> usize {
    let (step, lane) = (k % 8 / 4, row % 8 * 4 + k / 8);
    let register = k % 4 / 2 * 2 + row / 8;
    step * (BLOCK_VALUES / 2) + lane * 8 + register * 2 + k % 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_holds_the_fragments_of_two_steps() {
        // As the instruction wants them: for each lane and step a0..a3, two values each.
        let mut seen = vec![false; BLOCK_VALUES];
        for step in 0..2 {
            for lane in 0..32 {
                let (g, c) = (lane / 4, lane % 4);
                for register in 0..4 {
                    for half in 0..2 {
                        let row = g + register % 2 * 8;
                        let k = 8 * c + 4 * step + register / 2 * 2 + half;
                        let place = place_in_block(row, k);
                        assert_eq!(place, step * 256 + lane * 8 + register * 2 + half);
                        seen[place] = true;
                    }
                }
            }
        }
        assert!(seen.iter().all(|seen| *seen));
    }

    #[test]
    fn gate_and_up_share_panels() {
        let rows_of = |panel| (0..16).map(move |row| source_row(Layout::GateUp, 48, panel, row));
        let first: Vec<_> = rows_of(0).map(Option::unwrap).collect();
        assert_eq!(first[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(first[8..], [24, 25, 26, 27, 28, 29, 30, 31]);
        assert_eq!(rows_of(2).next_back().unwrap(), Some(47));
        assert!(rows_of(3).all(|row| row.is_none()));
    }

    #[test]
    fn stacked_rows_are_packed_and_the_rest_is_zero() {
        let value = |row: usize, k: usize| (row * 100 + k) as f32;
        let matrix = |rows: std::ops::Range<usize>| {
            let values: Vec<f32> = rows
                .flat_map(|r| (0..40).map(move |k| value(r, k)))
                .collect();
            StoredMatrix::from_f32(&values, 40)
        };
        let (a, b) = (matrix(0..11), matrix(11..20));
        for group in [1, 4] {
            let mut out = vec![bf16::NAN; 8 * 2 * BLOCK_VALUES];
            pack_panels(&mut out, 0, 2 * BLOCK_VALUES, group, &|panel, row| {
                let row = source_row(Layout::Plain, 20, panel, row)?;
                Some(bf16_row(&[&a, &b], row))
            });
            for row in 0..128 {
                for k in 0..64 {
                    let (panel, block) = (row / 16, k / 32);
                    let number = (panel / group * 2 + block) * group + panel % group;
                    let got = out[number * BLOCK_VALUES + place_in_block(row % 16, k % 32)];
                    let real = row < 20 && k < 40;
                    let expected = if real { value(row, k) } else { 0.0 };
                    assert_eq!(got, bf16::from_f32(expected), "{group}: {row}, depth {k}");
                }
            }
        }
    }
}
