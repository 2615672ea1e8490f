//! A drafter checkpoint on disk.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::config_file::ConfigFile;
use crate::safetensors_directory::SafetensorsDirectory;
use crate::target::label_of;
use crate::{CheckpointError, CouplingProfile, DrafterConfig, StoredMatrix, TargetConfig};

/// A DFlash v1 drafter (z-lab layout): a directory with config.json and safetensors.
///
/// Files are memory-mapped and must not be changed in place while the checkpoint is open.
#[derive(Debug)]
pub struct DrafterCheckpoint {
    /// Checked hyper-parameters.
    pub config: DrafterConfig,
    /// What was fitted for sampled answers, where that was done.
    pub coupling: Option<CouplingProfile>,
    path: PathBuf,
    weights: SafetensorsDirectory,
}

impl DrafterCheckpoint {
    /// Opens a drafter directory.
    ///
    /// # Errors
    /// When a file is missing or damaged, when the configuration or an extra tensor belongs to another kind of drafter
    /// (DFlash2, DSpark, Domino, JetSpec, ...), or when a tensor of [`DrafterConfig::tensors`] is missing or has another
    /// shape.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        if !path.is_dir() {
            return Err(CheckpointError::NotFound {
                path: path.to_owned(),
                what: "drafter directory",
                fix: "give a directory with config.json and *.safetensors of a DFlash drafter"
                    .to_owned(),
            });
        }
        let config = ConfigFile::open(
            &path.join("config.json"),
            "drafter configuration",
            "a drafter directory needs config.json beside its *.safetensors",
        )?;
        let checkpoint = Self {
            config: DrafterConfig::from_config(&config)?,
            coupling: CouplingProfile::open(path)?,
            path: path.to_owned(),
            weights: SafetensorsDirectory::open(path)?,
        };
        checkpoint.check_tensors()?;
        Ok(checkpoint)
    }

    /// The values of a tensor, row-major in `shape`, converted to f32. `name` has no `model.` prefix.
    ///
    /// # Errors
    /// When the tensor is missing, has another shape, or is stored in a number format without a conversion.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        self.weights.tensor(&self.stored_name(name), shape)
    }

    /// A matrix, `[rows, columns]`, in the number format of the file where [`crate::MatrixFormat`] has it, otherwise
    /// as f32. `name` has no `model.` prefix.
    ///
    /// # Errors
    /// As [`DrafterCheckpoint::tensor`].
    pub fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<StoredMatrix, CheckpointError> {
        self.weights.matrix(&self.stored_name(name), shape)
    }

    /// Whether a tensor is stored under `name`, with or without the `model.` prefix.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.weights.contains(&self.stored_name(name))
    }

    /// Bytes of all stored tensors, for load progress.
    pub fn total_bytes(&self) -> u64 {
        self.weights.total_bytes()
    }

    /// The drafter's name for display: that of its directory.
    pub fn label(&self) -> String {
        label_of(&self.path)
    }

    /// Where the checkpoint was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether this drafter can draft for `target`.
    ///
    /// # Errors
    /// When a tap is not a layer of the target, or is its last one (the reference taps it after the final norm, which
    /// no other tap is), when the hidden sizes or the number of target layers differ, or when the mask token is outside
    /// the target's vocabulary.
    pub fn check_target(&self, target: &TargetConfig) -> Result<(), CheckpointError> {
        let mismatch = |message: String| Err(CheckpointError::DrafterMismatch(message));
        let config = &self.config;
        let layers = target.num_layers;
        let last = layers.saturating_sub(1);
        if let Some(tap) = config.taps.iter().find(|&&tap| tap >= layers) {
            return mismatch(format!(
                "drafter's target_layer_ids contains {tap} but the target has only {layers} layers (0..{last})"
            ));
        }
        if config.taps.contains(&last) {
            return mismatch(format!(
                "drafter's target_layer_ids contains {last}, the target's last layer, which cannot be tapped before the final norm"
            ));
        }
        if config.hidden_size != target.hidden_size {
            return mismatch(format!(
                "drafter's hidden_size is {} but the target's is {}",
                config.hidden_size, target.hidden_size
            ));
        }
        if let Some(expected) = config
            .num_target_layers
            .filter(|&expected| expected != layers)
        {
            return mismatch(format!(
                "drafter's num_target_layers is {expected} but the target has {layers} layers"
            ));
        }
        if config.mask_token_id as usize >= target.vocab_size {
            return mismatch(format!(
                "drafter's mask_token_id is {} but the target's vocabulary has only {} tokens",
                config.mask_token_id, target.vocab_size
            ));
        }
        Ok(())
    }

    /// SHA-256 (hex) over the stored bytes of `fc.weight`, then of `hidden_norm.weight`: the part of the drafter that
    /// the verifier computes, so both sides must hold the same.
    ///
    /// # Errors
    /// When one of the two is missing.
    pub fn projection_hash(&self) -> Result<String, CheckpointError> {
        let mut hash = Sha256::new();
        for name in ["fc.weight", "hidden_norm.weight"] {
            hash.update(self.weights.stored_bytes(&self.stored_name(name))?);
        }
        Ok(crate::hex::encode(&hash.finalize()))
    }

    fn stored_name(&self, name: &str) -> String {
        let prefixed = format!("model.{name}");
        if !self.weights.contains(name) && self.weights.contains(&prefixed) {
            prefixed
        } else {
            name.to_owned()
        }
    }

    fn check_tensors(&self) -> Result<(), CheckpointError> {
        let tensors = self.config.tensors();
        let known: HashSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let is_unknown = |name: &&str| !known.contains(name.strip_prefix("model.").unwrap_or(name));
        if let Some(name) = self.weights.names().filter(is_unknown).min() {
            return Err(CheckpointError::UnexpectedTensor {
                name: name.to_owned(),
                path: self.path.clone(),
                model: "a DFlash v1 drafter",
            });
        }
        for tensor in &tensors {
            self.weights
                .check(&self.stored_name(&tensor.name), &tensor.shape)?;
        }
        Ok(())
    }
}
