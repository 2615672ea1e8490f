//! Weight matrices in the number format of their file, for engines that compute with it directly.

use half::{bf16, f16};

/// Number formats that keep their values when an engine widens them to f32 itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixFormat {
    /// IEEE single precision. Formats that are not listed here come as this.
    F32,
    /// bfloat16.
    Bf16,
    /// ggml Q8_0: blocks of 32 values, an f16 scale `d` and 32 i8; a value is `d * q`.
    Q8_0,
    /// ggml Q4_1: blocks of 32 values, f16 `d` and `m`, 16 bytes with value `j` in the low and value `j + 16` in the
    /// high half of byte `j`; a value is `d * q + m`, rounded after each operation.
    Q4_1,
}

impl MatrixFormat {
    /// Values per block; rows are whole blocks.
    pub const BLOCK: usize = 32;

    /// Bytes of a row of `columns` values, `None` when they are not whole blocks.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let blocks = columns
            .is_multiple_of(Self::BLOCK)
            .then_some(columns / Self::BLOCK);
        match self {
            Self::F32 => Some(columns * size_of::<f32>()),
            Self::Bf16 => Some(columns * size_of::<bf16>()),
            Self::Q8_0 => blocks.map(|blocks| blocks * (2 + Self::BLOCK)),
            Self::Q4_1 => blocks.map(|blocks| blocks * (4 + Self::BLOCK / 2)),
        }
    }
}

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
            MatrixFormat::Q8_0 => Q8Block::of(bytes)
                .flat_map(|block| block.quants.map(|q| f32::from(q) * block.scale))
                .collect(),
            MatrixFormat::Q4_1 => Q4Block::of(bytes)
                .flat_map(|block| {
                    block
                        .quants()
                        .map(|q| f32::from(q) * block.scale + block.min)
                })
                .collect(),
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

/// One block of a Q8_0 row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Q8Block {
    /// `d`, widened.
    pub scale: f32,
    /// Stored integers.
    pub quants: [i8; MatrixFormat::BLOCK],
}

impl Q8Block {
    /// The blocks of a stored row.
    pub fn of(row: &[u8]) -> impl Iterator<Item = Self> + '_ {
        let (blocks, _) = row.as_chunks::<{ 2 + MatrixFormat::BLOCK }>();
        blocks.iter().map(|block| Self {
            scale: f16::from_le_bytes([block[0], block[1]]).to_f32(),
            quants: std::array::from_fn(|i| block[2 + i] as i8),
        })
    }
}

/// One block of a Q4_1 row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Q4Block {
    /// `d`, widened.
    pub scale: f32,
    /// `m`, widened.
    pub min: f32,
    /// Two stored integers per byte.
    pub nibbles: [u8; MatrixFormat::BLOCK / 2],
}

impl Q4Block {
    /// The blocks of a stored row.
    pub fn of(row: &[u8]) -> impl Iterator<Item = Self> + '_ {
        let (blocks, _) = row.as_chunks::<{ 4 + MatrixFormat::BLOCK / 2 }>();
        blocks.iter().map(|block| Self {
            scale: f16::from_le_bytes([block[0], block[1]]).to_f32(),
            min: f16::from_le_bytes([block[2], block[3]]).to_f32(),
            nibbles: std::array::from_fn(|i| block[4 + i]),
        })
    }

    /// Stored integers 0..=15 in the order of the values.
    pub fn quants(&self) -> [u8; MatrixFormat::BLOCK] {
        const HALF: usize = MatrixFormat::BLOCK / 2;
        std::array::from_fn(|i| {
            if i < HALF {
                self.nibbles[i] & 15
            } else {
                self.nibbles[i - HALF] >> 4
            }
        })
    }
}
