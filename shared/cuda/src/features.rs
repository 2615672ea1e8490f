//! The drafter's input side, run where the target is: `hidden_norm(fc(concat taps))` (z-lab/dflash, `dflash/model.py`).

use std::sync::Arc;

use half::bf16;
use treespec_checkpoint::{DrafterCheckpoint, TargetConfig};
use treespec_engine::EngineError;

use crate::decoder::Taps;
use crate::linear::{Epilogue, Layout, LinearKernels, PackedLinear};
use crate::rows::RowKernels;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, PackedRows};

/// Weights and buffers of the projection.
pub(crate) struct FeatureProjection {
    fc: PackedLinear,
    hidden_norm: DeviceBuffer<f32>,
    eps: f32,
    width: usize,
    taps: Taps,
    tapped: DeviceBuffer<bf16>,
    gathered: DeviceBuffer<bf16>,
    projected: DeviceBuffer<f32>,
    /// f32 `[rows][width]`, the latest result that was asked for on the device.
    pub(crate) rows: DeviceBuffer<f32>,
}

impl FeatureProjection {
    /// For forwards of up to `rows` rows.
    pub(crate) fn load(
        device: &Arc<Device>,
        drafter: &DrafterCheckpoint,
        target: &TargetConfig,
        rows: usize,
    ) -> Result<Self, EngineError> {
        drafter.check_target(target)?;
        let config = &drafter.config;
        let (width, depth) = (config.hidden_size, config.taps.len() * config.hidden_size);
        let fc = drafter.matrix("fc.weight", [width, depth])?;
        let norm = drafter.tensor("hidden_norm.weight", &[width])?;
        let packed = || DeviceBuffer::<bf16>::zeroed(device, PackedRows::len(rows, depth));
        let tapped = packed()?;
        Ok(Self {
            fc: PackedLinear::pack(device, &[&fc], Layout::Plain)?,
            hidden_norm: DeviceBuffer::from_slice(device, &norm)?,
            eps: config.rms_norm_eps,
            width,
            taps: Taps {
                layers: config.taps.clone(),
                out: tapped.ptr(),
            },
            tapped,
            gathered: packed()?,
            projected: DeviceBuffer::zeroed(device, crate::row_bucket(rows) * width)?,
            rows: DeviceBuffer::zeroed(device, crate::row_bucket(rows) * width)?,
        })
    }

    /// Width of a feature row.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// What a forward writes.
    pub(crate) fn taps(&self) -> &Taps {
        &self.taps
    }

    /// A buffer for the taps of forwards of up to `rows` rows, more than this was made for.
    pub(crate) fn more_taps(
        &self,
        device: &Arc<Device>,
        rows: usize,
    ) -> Result<(DeviceBuffer<bf16>, Taps), CudaError> {
        let tapped = DeviceBuffer::zeroed(device, PackedRows::len(rows, self.fc.depth()))?;
        let taps = Taps {
            out: tapped.ptr(),
            ..self.taps.clone()
        };
        Ok((tapped, taps))
    }

    /// Features of the first `count` rows of a forward of the bucket `bucket` that wrote `taps`, f32 `[count][width]`.
    pub(crate) fn read_tapped(
        &self,
        linear: &LinearKernels,
        rows: &RowKernels,
        taps: &Taps,
        bucket: usize,
        count: usize,
    ) -> Result<Vec<f32>, CudaError> {
        let depth = self.fc.depth();
        let row_bytes = depth.next_multiple_of(32) * size_of::<bf16>();
        let most = self.rows.len() / self.width;
        let mut features = Vec::with_capacity(count * self.width);
        // Blocks of 64 packed rows are contiguous, and `most` is whole blocks.
        for first in (0..count).step_by(most) {
            let out = taps.out.add_bytes(first * row_bytes);
            let tapped = PackedRows::new(out, depth, most.min(bucket - first));
            let none = PackedRows::new(DevicePtr::NULL, self.width, tapped.rows);
            self.project(linear, rows, tapped, self.rows.ptr(), none)?;
            let taken = most.min(count - first);
            features.extend(self.rows.read_range(0, taken * self.width)?);
        }
        Ok(features)
    }

    /// Features of the rows that `source_rows` names, u32 per row of the bucket of `out`, of a forward of `forward_rows`
    /// rows: f32 to `out_rows` (may be null or host memory), bf16 to `out` (may be null).
    pub(crate) fn project_selected(
        &self,
        linear: &LinearKernels,
        rows: &RowKernels,
        source_rows: DevicePtr,
        forward_rows: usize,
        out_rows: DevicePtr,
        out: PackedRows,
    ) -> Result<(), CudaError> {
        let tapped = PackedRows::new(self.tapped.ptr(), self.fc.depth(), forward_rows);
        let gathered = PackedRows::new(self.gathered.ptr(), self.fc.depth(), out.rows);
        rows.gather(source_rows, tapped, gathered, None)?;
        self.project(linear, rows, gathered, out_rows, out)
    }

    fn project(
        &self,
        linear: &LinearKernels,
        rows: &RowKernels,
        input: PackedRows,
        out_rows: DevicePtr,
        out: PackedRows,
    ) -> Result<(), CudaError> {
        linear.launch(
            &self.fc,
            input,
            None,
            Epilogue::Store {
                out: self.projected.ptr(),
                ld: self.width,
            },
        )?;
        rows.norm(
            self.projected.ptr(),
            self.hidden_norm.ptr(),
            self.eps,
            self.width,
            out_rows,
            out,
        )
    }
}
