//! Device memory that a forward works in, allocated once for the largest row bucket.

use std::sync::Arc;

use half::bf16;

use crate::decoder::DecoderShape;
use crate::{CudaError, Device, DeviceBuffer, PackedRows, row_bucket};

/// Buffers of one forward; a row bucket of up to `rows` rows fits.
pub(crate) struct Activations {
    shape: DecoderShape,
    /// The residual stream, f32 `[rows][hidden]`.
    pub(crate) x: DeviceBuffer<f32>,
    /// Parts of the sum of squares of each row of the residual stream, f32 `[rows][parts]`.
    pub(crate) parts: DeviceBuffer<f32>,
    /// Queries, keys and values before rotation, f32 `[rows][qkv_width]`.
    pub(crate) qkv: DeviceBuffer<f32>,
    /// Rotated and scaled queries, bf16 `[rows][heads][padded head_dim]`.
    pub(crate) queries: DeviceBuffer<bf16>,
    input: DeviceBuffer<bf16>,
    attended: DeviceBuffer<bf16>,
    inner: DeviceBuffer<bf16>,
}

impl Activations {
    /// For up to `rows` rows.
    pub(crate) fn new(
        device: &Arc<Device>,
        shape: DecoderShape,
        rows: usize,
        most_parts: usize,
    ) -> Result<Self, CudaError> {
        let rows = row_bucket(rows);
        let padded_dim = crate::padded_dim(shape.head_dim);
        let packed = |depth: usize| DeviceBuffer::zeroed(device, PackedRows::len(rows, depth));
        Ok(Self {
            x: DeviceBuffer::zeroed(device, rows * shape.hidden)?,
            parts: DeviceBuffer::zeroed(device, rows * most_parts.max(1))?,
            qkv: DeviceBuffer::zeroed(device, rows * shape.qkv_width())?,
            queries: DeviceBuffer::zeroed(device, rows * shape.heads * padded_dim)?,
            input: packed(shape.hidden)?,
            attended: packed(shape.query_width())?,
            inner: packed(shape.intermediate)?,
            shape,
        })
    }

    /// Input of the linear layer behind a norm.
    pub(crate) fn input(&self, rows: usize) -> PackedRows {
        PackedRows::new(self.input.ptr(), self.shape.hidden, rows)
    }

    /// Output of the attention.
    pub(crate) fn attended(&self, rows: usize) -> PackedRows {
        PackedRows::new(self.attended.ptr(), self.shape.query_width(), rows)
    }

    /// Input of the last linear layer of an MLP.
    pub(crate) fn inner(&self, rows: usize) -> PackedRows {
        PackedRows::new(self.inner.ptr(), self.shape.intermediate, rows)
    }
}
