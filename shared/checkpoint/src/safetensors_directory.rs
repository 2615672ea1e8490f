//! The tensors of a directory of safetensors files: one file, or shards with or without an index.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata};
use safetensors::{SafeTensorError, SafeTensors};

use crate::config_file::ConfigFile;
use crate::mapped_file::MappedFile;
use crate::{CheckpointError, MatrixFormat, StoredMatrix, float_bytes};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// All tensors of a directory, by name.
#[derive(Debug)]
pub(crate) struct SafetensorsDirectory {
    directory: PathBuf,
    files: Vec<MappedFile>,
    tensors: HashMap<String, StoredTensor>,
}

#[derive(Debug)]
struct StoredTensor {
    file: usize,
    bytes: Range<usize>,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl SafetensorsDirectory {
    /// Maps every safetensors file of `directory` and checks all headers against the files' lengths.
    pub(crate) fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let single = directory.join(SINGLE_FILE);
        if single.exists() {
            return Self::from_files(directory, &[single]);
        }
        let index = ConfigFile::open_if_present(&directory.join(INDEX_FILE))?;
        let Some(index) = index else {
            return Self::from_files(directory, &safetensors_files(directory)?);
        };
        let weight_map = weight_map(&index)?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        let paths: Vec<PathBuf> = names.iter().map(|name| directory.join(name)).collect();
        if let Some(missing) = paths.iter().find(|path| !path.is_file()) {
            return Err(CheckpointError::NotFound {
                path: missing.clone(),
                what: "a shard listed in model.safetensors.index.json",
                fix: "fetch the checkpoint again, with all of its shards".to_owned(),
            });
        }
        let opened = Self::from_files(directory, &paths)?;
        match weight_map.keys().find(|name| !opened.contains(name)) {
            Some(name) => Err(CheckpointError::MissingTensor {
                name: name.clone(),
                path: directory.join(&weight_map[name]),
            }),
            None => Ok(opened),
        }
    }

    fn from_files(directory: &Path, paths: &[PathBuf]) -> Result<Self, CheckpointError> {
        let mut opened = Self {
            directory: directory.to_owned(),
            files: Vec::with_capacity(paths.len()),
            tensors: HashMap::new(),
        };
        for path in paths {
            let file = MappedFile::open(path)?;
            let (data_start, metadata) = read_header(&file)?;
            for (name, info) in metadata.tensors() {
                let stored = StoredTensor {
                    file: opened.files.len(),
                    bytes: data_start + info.data_offsets.0..data_start + info.data_offsets.1,
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                };
                if let Some(other) = opened.tensors.insert(name.clone(), stored) {
                    let other = opened.files[other.file].path().display().to_string();
                    let message =
                        format!("tensor {name} is stored twice; the other copy is in {other}");
                    return Err(CheckpointError::malformed(path, message));
                }
            }
            opened.files.push(file);
        }
        Ok(opened)
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of tensor data in all files.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.tensors
            .values()
            .map(|tensor| tensor.bytes.len() as u64)
            .sum()
    }

    /// Fails unless `name` is stored with `shape` in a number format that can be widened to f32.
    pub(crate) fn check(&self, name: &str, shape: &[usize]) -> Result<(), CheckpointError> {
        self.find(name, shape).map(|_| ())
    }

    /// The tensor's values, widened to f32.
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let (stored, widen) = self.find(name, shape)?;
        Ok(widen(self.bytes_of(stored)))
    }

    /// The tensor as a matrix, bf16 as stored and everything else widened to f32.
    pub(crate) fn matrix(
        &self,
        name: &str,
        shape: [usize; 2],
    ) -> Result<StoredMatrix, CheckpointError> {
        let (stored, widen) = self.find(name, &shape)?;
        let bytes = self.bytes_of(stored);
        let as_stored = (stored.dtype == Dtype::BF16)
            .then(|| StoredMatrix::new(MatrixFormat::Bf16, shape, bytes.to_vec()))
            .flatten();
        Ok(as_stored.unwrap_or_else(|| StoredMatrix::from_f32(&widen(bytes), shape[1])))
    }

    /// The bytes of a tensor as they are in the file.
    pub(crate) fn stored_bytes(&self, name: &str) -> Result<&[u8], CheckpointError> {
        self.tensors
            .get(name)
            .map(|stored| self.bytes_of(stored))
            .ok_or_else(|| self.missing(name))
    }

    fn find(&self, name: &str, shape: &[usize]) -> Result<(&StoredTensor, Widen), CheckpointError> {
        let stored = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        if stored.shape != shape {
            return Err(CheckpointError::TensorShape {
                name: name.to_owned(),
                path: self.files[stored.file].path().to_owned(),
                stored: stored.shape.clone(),
                wanted: shape.to_vec(),
            });
        }
        match stored.dtype {
            Dtype::F32 => Ok((stored, float_bytes::from_f32)),
            Dtype::F16 => Ok((stored, float_bytes::from_f16)),
            Dtype::BF16 => Ok((stored, float_bytes::from_bf16)),
            other => Err(CheckpointError::TensorDtype {
                name: name.to_owned(),
                path: self.files[stored.file].path().to_owned(),
                dtype: format!("{other:?}"),
            }),
        }
    }

    fn bytes_of(&self, stored: &StoredTensor) -> &[u8] {
        &self.files[stored.file][stored.bytes.clone()]
    }

    fn missing(&self, name: &str) -> CheckpointError {
        CheckpointError::MissingTensor {
            name: name.to_owned(),
            path: self.directory.clone(),
        }
    }
}

type Widen = fn(&[u8]) -> Vec<f32>;

/// The start of the tensor data, and the header. The header's extents are inside the file and match the shapes.
fn read_header(file: &MappedFile) -> Result<(usize, Metadata), CheckpointError> {
    match SafeTensors::read_metadata(file) {
        Ok((header_len, metadata)) => Ok((HEADER_LEN_BYTES + header_len, metadata)),
        Err(SafeTensorError::MetadataIncompleteBuffer) => Err(wrong_data_length(file)),
        Err(SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength) => {
            Err(CheckpointError::malformed(
                file.path(),
                format!(
                    "truncated or not a safetensors file: it ends inside its header ({} bytes)",
                    file.len()
                ),
            ))
        }
        Err(error) => Err(CheckpointError::malformed(
            file.path(),
            format!("not a valid safetensors file: {error}"),
        )),
    }
}

const HEADER_LEN_BYTES: usize = 8;

/// Says whether the file is shorter or longer than its (otherwise valid) header describes.
fn wrong_data_length(file: &MappedFile) -> CheckpointError {
    let lengths = || {
        let header_len = u64::from_le_bytes(*file.first_chunk()?);
        let data_start = HEADER_LEN_BYTES.checked_add(usize::try_from(header_len).ok()?)?;
        let header: Metadata =
            serde_json::from_slice(file.get(HEADER_LEN_BYTES..data_start)?).ok()?;
        Some((header.data_len() as u64, (file.len() - data_start) as u64))
    };
    match lengths() {
        Some((described, present)) if described > present => CheckpointError::Truncated {
            path: file.path().to_owned(),
            described,
            present,
        },
        _ => {
            CheckpointError::malformed(file.path(), "the file is longer than its header describes")
        }
    }
}

/// The index: tensor name -> file name. File names must stay inside the directory.
fn weight_map(index: &ConfigFile) -> Result<BTreeMap<String, String>, CheckpointError> {
    let map = index.required("weight_map", index.value("weight_map"))?;
    let invalid = |value: &dyn std::fmt::Display| {
        index.invalid("weight_map", value, "tensor names with file names")
    };
    let entries = map.as_object().ok_or_else(|| invalid(map))?;
    entries
        .iter()
        .map(|(tensor, file)| {
            let name = file.as_str().ok_or_else(|| invalid(file))?;
            let mut parts = Path::new(name).components();
            match (parts.next(), parts.next()) {
                (Some(Component::Normal(_)), None) => Ok((tensor.clone(), name.to_owned())),
                _ => Err(invalid(file)),
            }
        })
        .collect()
}

fn safetensors_files(directory: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let entries =
        std::fs::read_dir(directory).map_err(|source| CheckpointError::io(directory, source))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry
            .map_err(|source| CheckpointError::io(directory, source))?
            .path();
        if path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
        {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        return Err(CheckpointError::NotFound {
            path: directory.join(SINGLE_FILE),
            what: "weights",
            fix: "the directory needs model.safetensors, its shards with model.safetensors.index.json, or be a GGUF file instead"
                .to_owned(),
        });
    }
    paths.sort();
    Ok(paths)
}
