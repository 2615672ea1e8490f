//! The grammar masks of rows, on their way to the device and there.

use std::ops::Range;
use std::sync::Arc;

use treespec_sampling::TokenMask;

use crate::{CudaError, Device, DeviceBuffer, DevicePtr, Event, PinnedBuffer};

/// A mask per row.
pub(super) struct GrammarMasks {
    device: Arc<Device>,
    /// Words of a mask.
    stride: usize,
    masks: DeviceBuffer<u32>,
    /// Made with the first mask: most sequences have no grammar.
    staging: Option<Staging>,
}

/// Where masks lie until they were copied.
struct Staging {
    words: PinnedBuffer<u32>,
    /// Rows that the next upload copies.
    rows: Vec<usize>,
    /// Where the last copy has ended.
    copied: Event,
    in_flight: bool,
}

impl GrammarMasks {
    /// For `rows` rows of masks of `stride` words.
    pub(super) fn new(device: &Arc<Device>, rows: usize, stride: usize) -> Result<Self, CudaError> {
        Ok(Self {
            device: device.clone(),
            stride,
            masks: DeviceBuffer::zeroed(device, rows * stride)?,
            staging: None,
        })
    }

    /// Where they are, row after row.
    pub(super) fn ptr(&self) -> DevicePtr {
        self.masks.ptr()
    }

    /// The mask of a row from the next upload on.
    pub(super) fn set(&mut self, row: usize, mask: &TokenMask) -> Result<(), CudaError> {
        let staging = match &mut self.staging {
            Some(staging) => staging,
            none => none.insert(Staging {
                words: PinnedBuffer::new(&self.device, self.masks.len())?,
                rows: Vec::new(),
                copied: Event::new(&self.device)?,
                in_flight: false,
            }),
        };
        if std::mem::take(&mut staging.in_flight) {
            staging.copied.synchronize()?;
        }
        let words = &mut staging.words.as_mut_slice()[row * self.stride..(row + 1) * self.stride];
        // A mask holds no token beyond its own words.
        words.fill(0);
        for (word, &own) in words.iter_mut().zip(mask.words()) {
            *word = own;
        }
        staging.rows.push(row);
        Ok(())
    }

    /// Launches the copies of the masks that were set.
    pub(super) fn upload(&mut self) -> Result<(), CudaError> {
        let Some(staging) = &mut self.staging else {
            return Ok(());
        };
        if staging.rows.is_empty() {
            return Ok(());
        }
        for rows in runs(std::mem::take(&mut staging.rows)) {
            let words = rows.start * self.stride..rows.end * self.stride;
            self.masks.copy_from(words.start, &staging.words, words)?;
        }
        staging.copied.record(self.device.stream())?;
        staging.in_flight = true;
        Ok(())
    }
}

/// Rows as ranges without gaps.
fn runs(mut rows: Vec<usize>) -> Vec<Range<usize>> {
    rows.sort_unstable();
    rows.dedup();
    let runs = rows.chunk_by(|a, b| a + 1 == *b);
    runs.map(|run| run[0]..run[0] + run.len()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_copied_together() {
        assert_eq!(runs(vec![5, 3, 4, 9, 4]), [3..6, 9..10]);
        assert!(runs(Vec::new()).is_empty());
    }
}
