//! A target checkpoint on disk, in either format.

use std::path::{Path, PathBuf};

use crate::config_file::ConfigFile;
use crate::gguf::{GgufTarget, is_gguf};
use crate::safetensors_directory::SafetensorsDirectory;
use crate::{CheckpointError, StoredMatrix, TargetConfig};

/// A target model: its configuration, and its tensors under Hugging Face names whatever the format.
///
/// Files are memory-mapped and must not be changed in place while the checkpoint is open.
#[derive(Debug)]
pub struct TargetCheckpoint {
    /// Checked hyper-parameters.
    pub config: TargetConfig,
    path: PathBuf,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    Safetensors(SafetensorsDirectory),
    Gguf(GgufTarget),
}

impl TargetCheckpoint {
    /// Opens a Hugging Face directory (config.json and safetensors) or a GGUF file.
    ///
    /// # Errors
    /// When a file is missing or damaged, when the configuration asks for a computation that is not supported, or when
    /// a tensor of [`TargetConfig::tensors`] is missing or has another shape: a checkpoint that opens can be loaded.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let (config, weights) = if is_gguf(path) {
            let target = GgufTarget::open(path)?;
            (target.config().clone(), Weights::Gguf(target))
        } else {
            let config = open_model_config(path)?;
            let generation = ConfigFile::open_if_present(&path.join("generation_config.json"))?;
            let config = TargetConfig::from_hugging_face(&config, generation.as_ref())?;
            (
                config,
                Weights::Safetensors(SafetensorsDirectory::open(path)?),
            )
        };
        let checkpoint = Self {
            config,
            path: path.to_owned(),
            weights,
        };
        for tensor in checkpoint.config.tensors() {
            checkpoint.check(&tensor.name, &tensor.shape)?;
        }
        Ok(checkpoint)
    }

    /// The values of the tensor with the Hugging Face name `name`, row-major in `shape`, converted to f32.
    ///
    /// Query and key projections come in half-split RoPE order from both formats.
    ///
    /// # Errors
    /// When the tensor is missing, has another shape, or is stored in a number format without a conversion.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        match &self.weights {
            Weights::Safetensors(directory) => directory.tensor(name, shape),
            Weights::Gguf(target) => target.tensor(name, shape),
        }
    }

    /// The matrix with the Hugging Face name `name`, `[rows, columns]`, in the number format of the file where
    /// [`crate::MatrixFormat`] has it, otherwise as f32. The values are those of [`TargetCheckpoint::tensor`].
    ///
    /// # Errors
    /// As [`TargetCheckpoint::tensor`].
    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<StoredMatrix, CheckpointError> {
        match &self.weights {
            Weights::Safetensors(directory) => directory.matrix(name, shape),
            Weights::Gguf(target) => target.matrix(name, shape),
        }
    }

    /// Whether a tensor is stored under the Hugging Face name `name`.
    pub fn has_tensor(&self, name: &str) -> bool {
        match &self.weights {
            Weights::Safetensors(directory) => directory.contains(name),
            Weights::Gguf(target) => target.contains(name),
        }
    }

    /// Whether the file has tensors in a quantised format, whether or not [`crate::MatrixFormat`] keeps it.
    pub fn is_quantised(&self) -> bool {
        match &self.weights {
            Weights::Safetensors(_) => false,
            Weights::Gguf(target) => target.is_quantised(),
        }
    }

    /// Bytes of all stored tensors, for load progress.
    pub fn total_bytes(&self) -> u64 {
        match &self.weights {
            Weights::Safetensors(directory) => directory.total_bytes(),
            Weights::Gguf(target) => target.total_bytes(),
        }
    }

    /// The model's name for display: the directory's name, or the file's without `.gguf`.
    pub fn label(&self) -> String {
        label_of(&self.path)
    }

    /// Where the checkpoint was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check(&self, name: &str, shape: &[usize]) -> Result<(), CheckpointError> {
        match &self.weights {
            Weights::Safetensors(directory) => directory.check(name, shape),
            Weights::Gguf(target) => target.check(name, shape),
        }
    }
}

/// config.json of a Hugging Face directory.
pub(crate) fn open_model_config(directory: &Path) -> Result<ConfigFile, CheckpointError> {
    if !directory.exists() {
        return Err(CheckpointError::NotFound {
            path: directory.to_owned(),
            what: "model",
            fix: "give a Hugging Face directory or a GGUF file".to_owned(),
        });
    }
    ConfigFile::open(
        &directory.join("config.json"),
        "model configuration",
        "a model directory needs config.json beside its *.safetensors",
    )
}

pub(crate) fn label_of(path: &Path) -> String {
    let canonical = path.canonicalize();
    let path = canonical.as_deref().unwrap_or(path);
    let name = if path.is_dir() {
        path.file_name()
    } else {
        path.file_stem()
    };
    name.map_or_else(
        || "model".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}
