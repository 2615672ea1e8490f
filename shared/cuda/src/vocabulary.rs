//! The target's embedding and head on the device: its own, and shared with the drafter where both run in one process.

use std::sync::Arc;

use half::bf16;
use treespec_checkpoint::{TargetCheckpoint, TargetConfig};
use treespec_engine::EngineError;

use crate::linear::{Layout, PackedLinear};
use crate::{CudaError, Device, DeviceBuffer};

/// Embedding table and head of a target.
pub(crate) struct Vocabulary {
    /// bf16 `[vocab][hidden]`.
    pub(crate) embedding: DeviceBuffer<bf16>,
    /// Absent when it was left out.
    pub(crate) head: Option<PackedLinear>,
    pub(crate) size: usize,
}

impl Vocabulary {
    pub(crate) fn load(
        device: &Arc<Device>,
        target: &TargetCheckpoint,
        with_head: bool,
    ) -> Result<Self, EngineError> {
        let config = &target.config;
        let shape = [config.vocab_size, config.hidden_size];
        let table = target.matrix("model.embed_tokens.weight", shape)?;
        let mut values = Vec::with_capacity(config.vocab_size * config.hidden_size);
        for row in 0..table.rows() {
            values.extend(table.row_f32(row).into_iter().map(bf16::from_f32));
        }
        let head = match (with_head, config.tie_word_embeddings) {
            (false, _) => None,
            (true, true) => Some(PackedLinear::pack(device, &[&table], Layout::Head)?),
            (true, false) => {
                let head = target.matrix("lm_head.weight", shape)?;
                Some(PackedLinear::pack(device, &[&head], Layout::Head)?)
            }
        };
        Ok(Self {
            embedding: DeviceBuffer::from_slice(device, &values)?,
            head,
            size: config.vocab_size,
        })
    }

    /// Random values made on the device.
    pub(crate) fn random(device: &Arc<Device>, config: &TargetConfig) -> Result<Self, CudaError> {
        let (size, hidden) = (config.vocab_size, config.hidden_size);
        let scale = 1.0 / (hidden as f32).sqrt();
        // A few hundred different rows are enough for an embedding that is only timed.
        let rows: Vec<bf16> = (0..size * hidden)
            .map(|i| bf16::from_f32(((i * 2_654_435_761) % 2_003) as f32 / 1_001.5 - 1.0))
            .collect();
        Ok(Self {
            embedding: DeviceBuffer::from_slice(device, &rows)?,
            head: Some(PackedLinear::random(
                device,
                size,
                hidden,
                Layout::Head,
                7,
                scale,
            )?),
            size,
        })
    }

    pub(crate) fn head(&self) -> Result<&PackedLinear, EngineError> {
        self.head.as_ref().ok_or(EngineError::NoHead)
    }
}
