//! Weight matrices in the number format of their file, for engines that compute with it directly.

mod blocks;
mod format;
mod quantise;
mod superblocks;

pub use blocks::{Q4_0Block, Q4_1Block, Q8_0Block};
pub use format::MatrixFormat;
pub use superblocks::{Q4KBlock, Q6KBlock};

/// A matrix, row-major, little-endian, in its file's format.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredMatrix {
    format: MatrixFormat,
    columns: usize,
    bytes: Vec<u8>,
}

impl StoredMatrix {
    /// A matrix of stored bytes. `None` when they are not `rows` rows of `columns` values in `format`.
    pub fn new(format: MatrixFormat, [rows, columns]: [usize; 2], bytes: Vec<u8>) -> Option<Self> {
        let expected = format.row_bytes(columns)?.checked_mul(rows)?;
        (columns > 0 && bytes.len() == expected).then_some(Self {
            format,
            columns,
            bytes,
        })
    }

    /// A matrix of f32 values, `[values.len() / columns, columns]`.
    ///
    /// # Panics
    /// When `columns` is 0.
    pub fn from_f32(values: &[f32], columns: usize) -> Self {
        assert!(columns > 0, "a matrix has at least one column");
        Self {
            format: MatrixFormat::F32,
            columns,
            bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    /// The number format.
    pub fn format(&self) -> MatrixFormat {
        self.format
    }

    /// Values per row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.bytes.len() / self.row_bytes()
    }

    /// The stored bytes of a row.
    ///
    /// # Panics
    /// When there is no such row, like a slice index.
    pub fn row(&self, row: usize) -> &[u8] {
        let width = self.row_bytes();
        &self.bytes[row * width..(row + 1) * width]
    }

    /// The values of a row.
    ///
    /// # Panics
    /// When there is no such row, like a slice index.
    pub fn row_f32(&self, row: usize) -> Vec<f32> {
        let bytes = self.row(row);
        match self.format {
            MatrixFormat::F32 => crate::float_bytes::from_f32(bytes),
            MatrixFormat::Bf16 => crate::float_bytes::from_bf16(bytes),
            MatrixFormat::Q8_0 => Q8_0Block::of(bytes).flat_map(|b| b.values()).collect(),
            MatrixFormat::Q4_0 => Q4_0Block::of(bytes).flat_map(|b| b.values()).collect(),
            MatrixFormat::Q4_1 => Q4_1Block::of(bytes).flat_map(|b| b.values()).collect(),
            MatrixFormat::Q4_K => Q4KBlock::of(bytes).flat_map(|b| b.values()).collect(),
            MatrixFormat::Q6_K => Q6KBlock::of(bytes).flat_map(|b| b.values()).collect(),
        }
    }

    /// The rows in another order: row `i` of the result is row `order(i)`.
    pub(crate) fn reorder_rows(self, order: impl Fn(usize) -> usize) -> Self {
        let bytes = (0..self.rows())
            .flat_map(|row| self.row(order(row)))
            .copied()
            .collect();
        Self { bytes, ..self }
    }

    fn row_bytes(&self) -> usize {
        self.format
            .row_bytes(self.columns)
            .expect("a stored matrix has rows of whole blocks")
    }
}
