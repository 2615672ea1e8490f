//! Rotary embeddings with the norm per head in front of them, and the store of new keys and values.

use std::f64::consts::LOG2_E;
use std::sync::Arc;

use crate::attention::AttentionShape;
use crate::kv_cache::{KvCache, KvLayer};
use crate::row_metadata::RowArrays;
use crate::{CudaError, Device, DevicePtr, Function, KernelSource, Launch};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "rotary.cu",
    text: include_str!("kernels/rotary.cu"),
};

/// Warps of a block, as in the kernel file.
const WARPS: usize = 4;

/// RMS norm over the elements of every head (Qwen3). Weights are f32 `[head_dim]`.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms {
    /// Weight for query heads.
    pub query: DevicePtr,
    /// Weight for key heads.
    pub key: DevicePtr,
    /// Added to the mean square.
    pub eps: f32,
}

/// Context rows of a drafter for all its layers. Arrays are u32 per row.
#[derive(Debug, Clone, Copy)]
pub struct ContextRows {
    /// f32 `[rows][layers][2 * kv_heads * head_dim]`: keys, then values, before norm and rotation.
    pub kv: DevicePtr,
    /// Absolute positions.
    pub positions: DevicePtr,
    /// Physical slots; `u32::MAX` for rows that are not there.
    pub kv_slot: DevicePtr,
    /// Rows.
    pub rows: usize,
}

/// The kernels of `rotary.cu` for one model.
pub struct RotaryKernels {
    device: Arc<Device>,
    shape: AttentionShape,
    rotate: Function,
    context: Function,
}

pub(crate) fn defines(head_dim: usize) -> [(&'static str, String); 1] {
    [("HEAD_DIM", head_dim.to_string())]
}

impl RotaryKernels {
    /// Compiles them for the shape of a model.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a shape that the kernels do not cover, or as [`Device::module`].
    pub fn load(device: &Arc<Device>, shape: AttentionShape) -> Result<Self, CudaError> {
        shape.check()?;
        let module = device.module(&SOURCE, &defines(shape.head_dim))?;
        Ok(Self {
            rotate: module.function("rotate_rows")?,
            context: module.function("rotate_context")?,
            shape,
            device: device.clone(),
        })
    }

    /// Normalises and rotates queries and keys of `qkv`, f32 `[rows][(heads + 2 * kv_heads) * head_dim]`. Queries, scaled
    /// by `log2(e) / sqrt(head_dim)`, become bf16 `[rows][heads][padded head_dim]`; keys and values go to the rows' slots
    /// of `layer`. `inverse_frequencies` are f32 `[head_dim / 2]`.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn rotate(
        &self,
        qkv: DevicePtr,
        rows: &RowArrays,
        norms: Option<HeadNorms>,
        inverse_frequencies: DevicePtr,
        queries: DevicePtr,
        layer: KvLayer,
    ) -> Result<(), CudaError> {
        let AttentionShape {
            heads,
            kv_heads,
            head_dim,
        } = self.shape;
        let scale = (LOG2_E / (head_dim as f64).sqrt()) as f32;
        let norms = norms.unwrap_or(HeadNorms {
            query: DevicePtr::NULL,
            key: DevicePtr::NULL,
            eps: 0.0,
        });
        let items = rows.bucket * (heads + kv_heads);
        Launch::new(&self.rotate)
            .grid(items.div_ceil(WARPS), 1, 1)
            .block(32 * WARPS)
            .arg(qkv)
            .arg(rows.positions)
            .arg(rows.kv_slot)
            .arg(inverse_frequencies)
            .arg(norms.query)
            .arg(norms.key)
            .arg(norms.eps)
            .arg(scale)
            .arg(queries)
            .arg(layer.keys)
            .arg(layer.values)
            .arg(rows.bucket as u32)
            .arg(heads as u32)
            .arg(kv_heads as u32)
            .run(&self.device)
    }

    /// Normalises and rotates the keys of context rows and stores keys and values of all layers of `cache`. `key_norms`
    /// are f32 `[layers][head_dim]`, or null.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn context(
        &self,
        context: ContextRows,
        key_norms: DevicePtr,
        eps: f32,
        inverse_frequencies: DevicePtr,
        cache: &KvCache,
    ) -> Result<(), CudaError> {
        let shape = cache.shape();
        let items = context.rows * shape.layers * shape.kv_heads;
        Launch::new(&self.context)
            .grid(items.div_ceil(WARPS), 1, 1)
            .block(32 * WARPS)
            .arg(context.kv)
            .arg(context.positions)
            .arg(context.kv_slot)
            .arg(inverse_frequencies)
            .arg(key_norms)
            .arg(eps)
            .arg(cache.ptr())
            .arg(shape.blocks as u32)
            .arg(context.rows as u32)
            .arg(shape.layers as u32)
            .arg(shape.kv_heads as u32)
            .run(&self.device)
    }
}
