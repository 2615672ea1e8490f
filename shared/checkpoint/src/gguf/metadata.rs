//! Values of the metadata section. Arrays stay in the file and are decoded when asked for, so that a file cannot make
//! the parser allocate more than a small multiple of its own size.

use super::cursor::{Cursor, OutOfBounds};

/// The value types of the format, by their number in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueType {
    Unsigned { bytes: u8 },
    Signed { bytes: u8 },
    Float32,
    Float64,
    Bool,
    String,
    Array,
}

impl ValueType {
    pub(super) fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::Unsigned { bytes: 1 },
            1 => Self::Signed { bytes: 1 },
            2 => Self::Unsigned { bytes: 2 },
            3 => Self::Signed { bytes: 2 },
            4 => Self::Unsigned { bytes: 4 },
            5 => Self::Signed { bytes: 4 },
            6 => Self::Float32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::Unsigned { bytes: 8 },
            11 => Self::Signed { bytes: 8 },
            12 => Self::Float64,
            _ => return None,
        })
    }

    /// Bytes of one value in the file, `None` for the types of variable length.
    fn fixed_len(self) -> Option<u64> {
        match self {
            Self::Unsigned { bytes } | Self::Signed { bytes } => Some(bytes.into()),
            Self::Float32 => Some(4),
            Self::Float64 => Some(8),
            Self::Bool => Some(1),
            Self::String | Self::Array => None,
        }
    }
}

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    /// Not necessarily UTF-8: checked when it is used as text.
    String(Vec<u8>),
    Array(ArrayExtent),
}

/// Where an array's elements lie in the file. The extent has been checked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ArrayExtent {
    pub(super) element: ValueType,
    pub(super) len: u64,
    pub(super) start: usize,
}

/// Why a value cannot be read.
#[derive(Debug)]
pub(super) enum ValueError {
    OutOfBounds(OutOfBounds),
    UnknownType(u32),
    NestedArray,
}

impl From<OutOfBounds> for ValueError {
    fn from(error: OutOfBounds) -> Self {
        Self::OutOfBounds(error)
    }
}

impl Value {
    /// Reads a value type and a value of it.
    pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<Self, ValueError> {
        match read_type(cursor)? {
            ValueType::Array => skip_array(cursor).map(Self::Array),
            other => Self::read_scalar(cursor, other),
        }
    }

    /// Reads a value that is not an array.
    pub(super) fn read_scalar(
        cursor: &mut Cursor<'_>,
        kind: ValueType,
    ) -> Result<Self, ValueError> {
        Ok(match kind {
            ValueType::Unsigned { bytes } => {
                Self::Unsigned(little_endian(cursor.take(bytes.into())?))
            }
            ValueType::Signed { bytes } => {
                let unused_bits = 64 - 8 * u32::from(bytes);
                let raw = little_endian(cursor.take(bytes.into())?);
                Self::Signed(((raw << unused_bits) as i64) >> unused_bits)
            }
            ValueType::Float32 => Self::Float(f32::from_le_bytes(cursor.array()?).into()),
            ValueType::Float64 => Self::Float(f64::from_le_bytes(cursor.array()?)),
            ValueType::Bool => Self::Bool(cursor.array::<1>()? != [0]),
            ValueType::String => Self::String(cursor.string()?.to_vec()),
            ValueType::Array => return Err(ValueError::NestedArray),
        })
    }

    /// A whole number of either signedness.
    pub(super) fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(*value),
            Self::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// For messages.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Unsigned(value) => value.to_string(),
            Self::Signed(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::String(value) => format!("'{}'", value.escape_ascii()),
            Self::Array(extent) => format!("an array of {}", extent.len),
        }
    }
}

fn read_type(cursor: &mut Cursor<'_>) -> Result<ValueType, ValueError> {
    let id = cursor.u32()?;
    ValueType::from_id(id).ok_or(ValueError::UnknownType(id))
}

/// Walks over an array. Arrays of arrays are legal in the format, but no known key has one.
fn skip_array(cursor: &mut Cursor<'_>) -> Result<ArrayExtent, ValueError> {
    let element = read_type(cursor)?;
    let len = cursor.u64()?;
    let start = cursor.position();
    match element.fixed_len() {
        Some(bytes) => {
            let total = len.checked_mul(bytes).ok_or(OutOfBounds(start))?;
            cursor.take(total)?;
        }
        None if element == ValueType::String => {
            for _ in 0..len {
                cursor.string()?;
            }
        }
        None => return Err(ValueError::NestedArray),
    }
    Ok(ArrayExtent {
        element,
        len,
        start,
    })
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |value, &byte| value << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_keep_their_sign() {
        let mut bytes = 3u32.to_le_bytes().to_vec();
        bytes.extend((-2i16).to_le_bytes());
        let value = Value::read(&mut Cursor::new(&bytes, 0)).unwrap();
        assert_eq!(value, Value::Signed(-2));
        assert_eq!(value.as_u64(), None);
    }

    #[test]
    fn an_array_longer_than_the_file_is_refused() {
        for element in [0u32, 8, 12] {
            let mut bytes = 9u32.to_le_bytes().to_vec();
            bytes.extend(element.to_le_bytes());
            bytes.extend(u64::MAX.to_le_bytes());
            bytes.extend([0; 16]);
            let read = Value::read(&mut Cursor::new(&bytes, 0));
            assert!(matches!(read, Err(ValueError::OutOfBounds(_))), "{read:?}");
        }
    }
}
