//! Typed, range-checked access to the fields of a JSON configuration file.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::CheckpointError;

/// A JSON object on disk. Fields are addressed by dotted paths (`rope_parameters.rope_theta`); null counts as absent.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl ConfigFile {
    /// Reads `path`. `fix` tells the user what to do when the file does not exist.
    pub(crate) fn open(
        path: &Path,
        what: &'static str,
        fix: &str,
    ) -> Result<Self, CheckpointError> {
        Self::open_if_present(path)?.ok_or_else(|| CheckpointError::NotFound {
            path: path.to_owned(),
            what,
            fix: fix.to_owned(),
        })
    }

    /// Reads `path`, or gives `None` when there is no such file.
    pub(crate) fn open_if_present(path: &Path) -> Result<Option<Self>, CheckpointError> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::io(path, source)),
        };
        let json = |message: String| CheckpointError::Json {
            path: path.to_owned(),
            message,
        };
        match serde_json::from_slice(&text) {
            Ok(Value::Object(fields)) => Ok(Some(Self {
                path: path.to_owned(),
                fields,
            })),
            Ok(_) => Err(json("the top level is not an object".to_owned())),
            Err(error) => Err(json(error.to_string())),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub(crate) fn into_value(self) -> Value {
        Value::Object(self.fields)
    }

    /// The value of `field`, `None` when it is absent or null.
    pub(crate) fn value(&self, field: &str) -> Option<&Value> {
        let mut parts = field.split('.');
        let first = self.fields.get(parts.next()?)?;
        parts
            .try_fold(first, |value, part| value.get(part))
            .filter(|value| !value.is_null())
    }

    /// `value`, or an error that the field is missing.
    pub(crate) fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, CheckpointError> {
        value.ok_or_else(|| CheckpointError::MissingField {
            path: self.path.clone(),
            field: field.to_owned(),
        })
    }

    /// A whole number inside `range`.
    pub(crate) fn count(
        &self,
        field: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, CheckpointError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        self.count_of(field, value, &range).map(Some)
    }

    /// A required whole number inside `range`.
    pub(crate) fn required_count(
        &self,
        field: &str,
        range: RangeInclusive<usize>,
    ) -> Result<usize, CheckpointError> {
        self.required(field, self.count(field, range)?)
    }

    /// A list of whole numbers inside `range`; a bare number is a list of one.
    pub(crate) fn counts(
        &self,
        field: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<Vec<usize>>, CheckpointError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Array(values)) => values
                .iter()
                .map(|value| self.count_of(field, value, &range))
                .collect::<Result<_, _>>()
                .map(Some),
            Some(value) => Ok(Some(vec![self.count_of(field, value, &range)?])),
        }
    }

    /// A positive, finite number.
    pub(crate) fn positive(&self, field: &str) -> Result<Option<f64>, CheckpointError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            _ => Err(self.invalid(field, value, "a positive number")),
        }
    }

    /// A boolean.
    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, CheckpointError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| self.invalid(field, value, "true or false"))
    }

    /// A string.
    pub(crate) fn text(&self, field: &str) -> Result<Option<&str>, CheckpointError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        value
            .as_str()
            .map(Some)
            .ok_or_else(|| self.invalid(field, value, "a string"))
    }

    /// A list of strings.
    pub(crate) fn texts(&self, field: &str) -> Result<Option<Vec<&str>>, CheckpointError> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        value
            .as_array()
            .and_then(|values| values.iter().map(Value::as_str).collect::<Option<Vec<_>>>())
            .map(Some)
            .ok_or_else(|| self.invalid(field, value, "a list of strings"))
    }

    /// The error for a value that makes no sense.
    pub(crate) fn invalid(
        &self,
        field: &str,
        value: impl Display,
        expected: impl Into<String>,
    ) -> CheckpointError {
        CheckpointError::InvalidField {
            path: self.path.clone(),
            field: field.to_owned(),
            value: value.to_string(),
            expected: expected.into(),
        }
    }

    /// The error for a value that is legal but not implemented.
    pub(crate) fn unsupported(
        &self,
        field: &str,
        value: impl Display,
        supported: impl Into<String>,
    ) -> CheckpointError {
        CheckpointError::Unsupported {
            path: self.path.clone(),
            field: field.to_owned(),
            value: value.to_string(),
            supported: supported.into(),
        }
    }

    fn count_of(
        &self,
        field: &str,
        value: &Value,
        range: &RangeInclusive<usize>,
    ) -> Result<usize, CheckpointError> {
        value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok())
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                self.invalid(field, value, expected)
            })
    }
}
