//! A GGUF file: its metadata by key and its tensors by name.

use std::path::Path;

use candle_core::quantized::GgmlDType;

use super::cursor::Cursor;
use super::header::{Header, StoredTensor};
use super::metadata::{Value, ValueType};
use super::tensor_type;
use crate::mapped_file::MappedFile;
use crate::{CheckpointError, MatrixFormat, StoredMatrix, float_bytes};

/// A parsed and fully bounds-checked GGUF file.
#[derive(Debug)]
pub(crate) struct GgufFile {
    file: MappedFile,
    header: Header,
}

impl GgufFile {
    /// Maps the file and parses its header.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = MappedFile::open(path)?;
        let header = Header::read(&file)?;
        Ok(Self { file, header })
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    pub(crate) fn contains_tensor(&self, name: &str) -> bool {
        self.header.tensors.contains_key(name)
    }

    pub(crate) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// Bytes of tensor data.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.header.tensors.values().fold(0, |sum, tensor| {
            sum.saturating_add(tensor.bytes.len() as u64)
        })
    }

    /// Whether a tensor is in a block format.
    pub(crate) fn is_quantised(&self) -> bool {
        let float = |dtype| matches!(dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16);
        self.header
            .tensors
            .values()
            .any(|tensor| !float(tensor.dtype))
    }

    /// Fails unless the tensor `name` has `shape`. `label` is the name to use in errors.
    pub(crate) fn check(
        &self,
        name: &str,
        shape: &[usize],
        label: &str,
    ) -> Result<(), CheckpointError> {
        self.find(name, shape, label).map(|_| ())
    }

    /// The values of tensor `name`, converted to f32. `label` is the name to use in errors.
    pub(crate) fn tensor(
        &self,
        name: &str,
        shape: &[usize],
        label: &str,
    ) -> Result<Vec<f32>, CheckpointError> {
        let tensor = self.find(name, shape, label)?;
        let bytes = &self.file[tensor.bytes.clone()];
        match tensor.dtype {
            GgmlDType::F32 => Ok(float_bytes::from_f32(bytes)),
            GgmlDType::F16 => Ok(float_bytes::from_f16(bytes)),
            GgmlDType::BF16 => Ok(float_bytes::from_bf16(bytes)),
            quantized => tensor_type::dequantize(quantized, bytes).map_err(|error| {
                let message = format!("tensor {name} ({quantized:?}) cannot be converted: {error}");
                CheckpointError::malformed(self.path(), message)
            }),
        }
    }

    /// The tensor as a matrix, in its own format where [`MatrixFormat`] has it and otherwise as f32.
    pub(crate) fn matrix(
        &self,
        name: &str,
        shape: [usize; 2],
        label: &str,
    ) -> Result<StoredMatrix, CheckpointError> {
        let tensor = self.find(name, &shape, label)?;
        let format = match tensor.dtype {
            GgmlDType::BF16 => Some(MatrixFormat::Bf16),
            GgmlDType::Q8_0 => Some(MatrixFormat::Q8_0),
            GgmlDType::Q4_0 => Some(MatrixFormat::Q4_0),
            GgmlDType::Q4_1 => Some(MatrixFormat::Q4_1),
            GgmlDType::Q4K => Some(MatrixFormat::Q4_K),
            GgmlDType::Q6K => Some(MatrixFormat::Q6_K),
            _ => None,
        };
        let stored = format.and_then(|format| {
            let bytes = self.file[tensor.bytes.clone()].to_vec();
            StoredMatrix::new(format, shape, bytes)
        });
        match stored {
            Some(stored) => Ok(stored),
            None => {
                let values = self.tensor(name, &shape, label)?;
                Ok(StoredMatrix::from_f32(&values, shape[1]))
            }
        }
    }

    fn find(
        &self,
        name: &str,
        shape: &[usize],
        label: &str,
    ) -> Result<&StoredTensor, CheckpointError> {
        let tensor =
            self.header
                .tensors
                .get(name)
                .ok_or_else(|| CheckpointError::MissingTensor {
                    name: label.to_owned(),
                    path: self.path().to_owned(),
                })?;
        if tensor.shape != shape {
            return Err(CheckpointError::TensorShape {
                name: label.to_owned(),
                path: self.path().to_owned(),
                stored: tensor.shape.clone(),
                wanted: shape.to_vec(),
            });
        }
        Ok(tensor)
    }

    /// A whole number, `None` when the key is absent.
    pub(crate) fn count(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        self.typed(key, "a whole number", Value::as_u64)
    }

    /// A floating point number, `None` when the key is absent.
    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.typed(key, "a number", |value| match value {
            Value::Float(number) => Some(*number),
            other => other.as_u64().map(|number| number as f64),
        })
    }

    /// A boolean, `None` when the key is absent.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(key, "a boolean", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// A string, `None` when the key is absent.
    pub(crate) fn text(&self, key: &str) -> Result<Option<String>, CheckpointError> {
        self.typed(key, "a UTF-8 string", |value| match value {
            Value::String(bytes) => String::from_utf8(bytes.clone()).ok(),
            _ => None,
        })
    }

    /// A list of strings, `None` when the key is absent.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<String>>, CheckpointError> {
        self.typed(key, "a list of UTF-8 strings", |value| {
            self.elements(value, ValueType::String, |element| match element {
                Value::String(bytes) => String::from_utf8(bytes).ok(),
                _ => None,
            })
        })
    }

    /// A list of 32-bit integers (the token types), `None` when the key is absent.
    pub(crate) fn integers(&self, key: &str) -> Result<Option<Vec<u64>>, CheckpointError> {
        self.typed(key, "a list of 32-bit integers", |value| {
            [
                ValueType::Signed { bytes: 4 },
                ValueType::Unsigned { bytes: 4 },
            ]
            .into_iter()
            .find_map(|kind| self.elements(value, kind, |element| element.as_u64()))
        })
    }

    /// `value`, or an error that `key` is missing.
    pub(crate) fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, CheckpointError> {
        value.ok_or_else(|| CheckpointError::MissingField {
            path: self.path().to_owned(),
            field: key.to_owned(),
        })
    }

    /// The error for a metadata value that makes no sense.
    pub(crate) fn invalid(&self, key: &str, expected: impl Into<String>) -> CheckpointError {
        CheckpointError::InvalidField {
            path: self.path().to_owned(),
            field: key.to_owned(),
            value: self.describe(key),
            expected: expected.into(),
        }
    }

    /// The error for a metadata value that is legal but not implemented.
    pub(crate) fn unsupported(&self, key: &str, supported: impl Into<String>) -> CheckpointError {
        CheckpointError::Unsupported {
            path: self.path().to_owned(),
            field: key.to_owned(),
            value: self.describe(key),
            supported: supported.into(),
        }
    }

    fn describe(&self, key: &str) -> String {
        self.header
            .metadata
            .get(key)
            .map_or_else(|| "absent".to_owned(), Value::describe)
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(value) => convert(value)
                .map(Some)
                .ok_or_else(|| self.invalid(key, expected)),
        }
    }

    fn elements<T>(
        &self,
        value: &Value,
        kind: ValueType,
        convert: impl Fn(Value) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Value::Array(extent) = value else {
            return None;
        };
        if extent.element != kind {
            return None;
        }
        let mut cursor = Cursor::new(&self.file, extent.start);
        (0..extent.len)
            .map(|_| {
                Value::read_scalar(&mut cursor, kind)
                    .ok()
                    .and_then(&convert)
            })
            .collect()
    }
}
