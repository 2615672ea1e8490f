//! The header of a GGUF file: metadata, and where in the file each tensor lies.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::quantized::GgmlDType;

use super::cursor::{Cursor, OutOfBounds};
use super::metadata::{Value, ValueError};
use super::tensor_type;
use crate::CheckpointError;
use crate::mapped_file::MappedFile;
use crate::shape::element_count;

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// ggml's own limit for the number of dimensions.
const MAX_DIMENSIONS: u32 = 4;

/// A checked header: every extent lies inside the file.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: HashMap<String, Value>,
    pub(super) tensors: HashMap<String, StoredTensor>,
}

#[derive(Debug)]
pub(super) struct StoredTensor {
    pub(super) dtype: GgmlDType,
    /// Row-major, outermost first (the file has them reversed).
    pub(super) shape: Vec<usize>,
    /// Whole blocks of `dtype`, as many as `shape` needs.
    pub(super) bytes: Range<usize>,
}

impl Header {
    pub(super) fn read(file: &MappedFile) -> Result<Self, CheckpointError> {
        let mut reader = HeaderReader::after_magic(file)?;
        let version = reader.get(Cursor::u32)?;
        if !matches!(version, 2 | 3) {
            let message =
                format!("GGUF version {version} is not supported; supported: 2, 3 (little-endian)");
            return Err(reader.malformed(message));
        }
        let tensor_count = reader.get(Cursor::u64)?;
        let metadata_count = reader.get(Cursor::u64)?;
        let metadata = reader.metadata(metadata_count)?;
        let entries = reader.tensor_entries(tensor_count)?;
        let tensors = reader.place(entries, alignment(file, &metadata)?)?;
        Ok(Self { metadata, tensors })
    }
}

/// A tensor as listed in the header, before its extent is checked.
struct TensorEntry {
    name: String,
    shape: Vec<usize>,
    type_id: u32,
    offset: u64,
}

struct HeaderReader<'a> {
    file: &'a MappedFile,
    cursor: Cursor<'a>,
}

impl<'a> HeaderReader<'a> {
    fn after_magic(file: &'a MappedFile) -> Result<Self, CheckpointError> {
        let magic = file.get(..MAGIC.len()).unwrap_or(file);
        if magic != MAGIC {
            return Err(CheckpointError::NotGguf {
                path: file.path().to_owned(),
                magic: magic.escape_ascii().to_string(),
            });
        }
        let cursor = Cursor::new(file, MAGIC.len());
        Ok(Self { file, cursor })
    }

    fn malformed(&self, message: impl Into<String>) -> CheckpointError {
        CheckpointError::malformed(self.file.path(), message)
    }

    fn ends_early(&self, OutOfBounds(offset): OutOfBounds) -> CheckpointError {
        self.malformed(format!(
            "the file ends inside its header (at byte {offset})"
        ))
    }

    fn get<T>(
        &mut self,
        read: impl Fn(&mut Cursor<'a>) -> Result<T, OutOfBounds>,
    ) -> Result<T, CheckpointError> {
        read(&mut self.cursor).map_err(|error| self.ends_early(error))
    }

    fn name(&mut self) -> Result<String, CheckpointError> {
        let bytes = self.get(Cursor::string)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| {
            let name = bytes.escape_ascii();
            self.malformed(format!("a key or tensor name is not UTF-8: '{name}'"))
        })
    }

    fn metadata(&mut self, count: u64) -> Result<HashMap<String, Value>, CheckpointError> {
        // Every entry takes bytes of the file, so a false count ends at the file's end, not in a huge allocation.
        let mut metadata = HashMap::new();
        for _ in 0..count {
            let key = self.name()?;
            let value = Value::read(&mut self.cursor).map_err(|error| match error {
                ValueError::OutOfBounds(error) => self.ends_early(error),
                ValueError::UnknownType(id) => {
                    self.malformed(format!("metadata {key} has the unknown value type {id}"))
                }
                ValueError::NestedArray => {
                    self.malformed(format!("metadata {key} is an array of arrays"))
                }
            })?;
            if metadata.contains_key(&key) {
                return Err(self.malformed(format!("metadata {key} is there twice")));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    fn tensor_entries(&mut self, count: u64) -> Result<Vec<TensorEntry>, CheckpointError> {
        let mut entries = Vec::new();
        for _ in 0..count {
            entries.push(self.tensor_entry()?);
        }
        Ok(entries)
    }

    fn tensor_entry(&mut self) -> Result<TensorEntry, CheckpointError> {
        let name = self.name()?;
        let dimensions = self.get(Cursor::u32)?;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            let expected = format!("expected 1 to {MAX_DIMENSIONS}");
            return Err(self.malformed(format!(
                "tensor {name} has {dimensions} dimensions, {expected}"
            )));
        }
        let mut shape = Vec::with_capacity(dimensions as usize);
        for _ in 0..dimensions {
            let dim = self.get(Cursor::u64)?;
            shape.push(usize::try_from(dim).unwrap_or(usize::MAX));
        }
        shape.reverse();
        Ok(TensorEntry {
            name,
            shape,
            type_id: self.get(Cursor::u32)?,
            offset: self.get(Cursor::u64)?,
        })
    }

    /// Turns offsets, which count from the aligned end of the header, into extents of the file.
    fn place(
        &self,
        entries: Vec<TensorEntry>,
        alignment: u64,
    ) -> Result<HashMap<String, StoredTensor>, CheckpointError> {
        let data_start = (self.cursor.position() as u64)
            .checked_next_multiple_of(alignment)
            .unwrap_or(u64::MAX);
        let mut tensors = HashMap::new();
        for entry in entries {
            let tensor = self.stored_tensor(&entry, data_start, alignment)?;
            if tensors.contains_key(&entry.name) {
                return Err(self.malformed(format!("tensor {} is there twice", entry.name)));
            }
            tensors.insert(entry.name, tensor);
        }
        Ok(tensors)
    }

    fn stored_tensor(
        &self,
        entry: &TensorEntry,
        data_start: u64,
        alignment: u64,
    ) -> Result<StoredTensor, CheckpointError> {
        let TensorEntry { name, shape, .. } = entry;
        let dtype =
            tensor_type::from_id(entry.type_id).ok_or_else(|| CheckpointError::TensorDtype {
                name: name.clone(),
                path: self.file.path().to_owned(),
                dtype: tensor_type::name_of_unsupported(entry.type_id),
            })?;
        let row = shape.last().copied().unwrap_or(0);
        let len = element_count(shape)
            .filter(|&elements| elements > 0 && row.is_multiple_of(dtype.block_size()))
            .and_then(|elements| tensor_type::stored_len(dtype, elements))
            .ok_or_else(|| {
                self.malformed(format!(
                    "tensor {name} has the impossible shape {shape:?} ({dtype:?})"
                ))
            })?;
        if !entry.offset.is_multiple_of(alignment) {
            let offset = entry.offset;
            return Err(self.malformed(format!(
                "tensor {name} starts at offset {offset}, not a multiple of {alignment}"
            )));
        }
        let bytes = extent(data_start, entry.offset, len, self.file.len()).ok_or_else(|| {
            let present = self.file.len();
            self.malformed(format!(
                "truncated: the data of tensor {name} ends beyond the file's {present} bytes"
            ))
        })?;
        Ok(StoredTensor {
            dtype,
            shape: shape.clone(),
            bytes,
        })
    }
}

fn alignment(file: &MappedFile, metadata: &HashMap<String, Value>) -> Result<u64, CheckpointError> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.get(KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    value
        .as_u64()
        .filter(|alignment| alignment.is_power_of_two() && (8..=1 << 20).contains(alignment))
        .ok_or_else(|| CheckpointError::InvalidField {
            path: file.path().to_owned(),
            field: KEY.to_owned(),
            value: value.describe(),
            expected: "a power of two from 8 to 1048576".to_owned(),
        })
}

fn extent(data_start: u64, offset: u64, len: usize, file_len: usize) -> Option<Range<usize>> {
    let start = usize::try_from(data_start.checked_add(offset)?).ok()?;
    let end = start.checked_add(len)?;
    (end <= file_len).then_some(start..end)
}
