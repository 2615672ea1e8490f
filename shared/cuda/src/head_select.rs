//! The k best logits of every row of a head pass and its log-normaliser, without reading the vocabulary again.

use std::sync::Arc;

use crate::{CudaError, Device, DeviceBuffer, DevicePtr, Function, KernelSource, Launch};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "head_select.cu",
    text: include_str!("kernels/head_select.cu"),
};

/// Threads of a block, as in the kernel file.
const THREADS: usize = 512;

/// Logits of a group, as in the kernel file and in the head's epilogue.
const GROUP: usize = 64;

/// Most groups that a thread keeps in registers.
const MOST_KEYS: usize = 32;

/// Most tokens that a row can return.
pub const MOST_TOP: usize = 256;

/// What the head's epilogue leaves. `groups` below is `vocab` in groups of 64, rounded up.
#[derive(Debug, Clone, Copy)]
pub struct HeadLogits {
    /// f32 `[rows][stride]`, the first `vocab` of each row are read.
    pub logits: DevicePtr,
    /// Values from row to row, a multiple of 64.
    pub stride: usize,
    /// f32 `[rows][group_stride]`: the largest logit of every group; NaN does not count.
    pub group_max: DevicePtr,
    /// f32 `[rows][group_stride]`: sum of `exp(logit - largest)`. Null when no normaliser is wanted.
    pub group_sum: DevicePtr,
    /// Values from row to row, at least `groups`.
    pub group_stride: usize,
}

/// Where the best tokens of every row go.
#[derive(Debug, Clone, Copy)]
pub struct HeadTop {
    /// u32 `[rows][stride]`, best first, ties to the lower id. `u32::MAX` where a row has fewer that are numbers above
    /// negative infinity.
    pub ids: DevicePtr,
    /// f32 `[rows][stride]`: their logits, negative infinity where there is no token.
    pub logits: DevicePtr,
    /// Entries from row to row, at least k.
    pub stride: usize,
    /// f32 `[rows]`: `ln(sum(exp(logit)))`, NaN when not asked for.
    pub normaliser: DevicePtr,
    /// f32 `[rows]`: the logit of the row's gather token, NaN without one. Only written when tokens are gathered.
    pub gathered: DevicePtr,
}

/// Device memory for a [`HeadTop`].
pub struct HeadTopBuffers {
    /// `[rows][stride]`.
    pub ids: DeviceBuffer<u32>,
    /// `[rows][stride]`.
    pub logits: DeviceBuffer<f32>,
    /// `[rows]`.
    pub normaliser: DeviceBuffer<f32>,
    /// `[rows]`.
    pub gathered: DeviceBuffer<f32>,
    stride: usize,
}

impl HeadTopBuffers {
    /// Room for the `k` best of `rows` rows.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn new(device: &Arc<Device>, rows: usize, k: usize) -> Result<Self, CudaError> {
        Ok(Self {
            ids: DeviceBuffer::zeroed(device, rows * k)?,
            logits: DeviceBuffer::zeroed(device, rows * k)?,
            normaliser: DeviceBuffer::zeroed(device, rows)?,
            gathered: DeviceBuffer::zeroed(device, rows)?,
            stride: k,
        })
    }

    /// Where they are.
    pub fn top(&self) -> HeadTop {
        HeadTop {
            ids: self.ids.ptr(),
            logits: self.logits.ptr(),
            stride: self.stride,
            normaliser: self.normaliser.ptr(),
            gathered: self.gathered.ptr(),
        }
    }
}

/// The kernels of `head_select.cu` for one vocabulary.
pub struct HeadSelectKernels {
    device: Arc<Device>,
    select: Function,
    argmax: Function,
    vocab: usize,
}

impl HeadSelectKernels {
    /// Compiles them for heads of `vocab` rows.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a vocabulary that the kernels do not cover, and as [`Device::module`].
    pub fn load(device: &Arc<Device>, vocab: usize) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE, &definitions(vocab)?)?;
        Ok(Self {
            select: module.function("head_select")?,
            argmax: module.function("head_argmax")?,
            device: device.clone(),
            vocab,
        })
    }

    /// Groups of 64 of the vocabulary.
    pub fn groups(&self) -> usize {
        self.vocab.div_ceil(GROUP)
    }

    /// Selects the `k` best of each of the first `rows` rows. `gather` is a u32 token per row, `u32::MAX` for none, or
    /// null.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] when `k` is not in 1..=256 or does not fit the output, or when the launch is refused.
    pub fn select(
        &self,
        head: HeadLogits,
        rows: usize,
        k: usize,
        gather: DevicePtr,
        out: HeadTop,
    ) -> Result<(), CudaError> {
        if k == 0 || k > MOST_TOP || k > out.stride {
            return Err(CudaError::Unsupported(format!(
                "the {k} best of a row: the head selects 1 to {}",
                MOST_TOP.min(out.stride)
            )));
        }
        let function = if k == 1 { &self.argmax } else { &self.select };
        let launch = Launch::new(function)
            .grid(rows, 1, 1)
            .block(THREADS)
            .arg(head.logits)
            .arg(head.group_max)
            .arg(head.group_sum)
            .arg(gather)
            .arg(self.vocab as u32)
            .arg(head.stride as u32)
            .arg(head.group_stride as u32);
        let launch = if k == 1 { launch } else { launch.arg(k as u32) };
        launch
            .arg(out.stride as u32)
            .arg(out.ids)
            .arg(out.logits)
            .arg(out.normaliser)
            .arg(out.gathered)
            .run(&self.device)
    }
}

/// Definitions that the kernel file is compiled with.
pub(crate) fn definitions(vocab: usize) -> Result<[(&'static str, String); 1], CudaError> {
    let keys = vocab.div_ceil(GROUP).div_ceil(THREADS);
    if keys == 0 || keys > MOST_KEYS {
        return Err(CudaError::Unsupported(format!(
            "a head of {vocab} rows: 1 to {} work",
            MOST_KEYS * THREADS * GROUP
        )));
    }
    Ok([("KEYS", keys.to_string())])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_groups_of_a_vocabulary_fit_the_threads() {
        for (vocab, keys) in [
            (1, 1),
            (32_768, 1),
            (32_769, 2),
            (49_152, 2),
            (151_936, 5),
            (248_320, 8),
        ] {
            assert_eq!(
                definitions(vocab).unwrap()[0].1,
                keys.to_string(),
                "{vocab}"
            );
        }
        assert!(definitions(0).is_err());
        assert!(definitions(32 * 512 * 64 + 1).is_err());
    }
}
