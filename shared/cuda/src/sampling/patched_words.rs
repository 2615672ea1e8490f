//! Words on the device of which the host changes a few between launches.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{
    CudaError, Device, DeviceBuffer, DevicePtr, Event, Function, Launch, Module, PinnedBuffer,
};

/// Threads of a block, as in the kernel file.
const THREADS: usize = 256;

/// Words that are changed one by one; longer lists are copied as they are.
const FEW: usize = 64;

/// Changes of one launch.
const MOST_PATCHES: usize = 4_096;

/// Device memory whose changes are collected and made by one launch: a copy for each would wait for the device each time.
pub(super) struct PatchedWords {
    device: Arc<Device>,
    kernel: Function,
    words: DeviceBuffer<u32>,
    /// What the next upload changes.
    staged: BTreeMap<u32, u32>,
    patches: PinnedBuffer<u32>,
    /// Where the last launch has read the patches.
    read: Event,
}

impl PatchedWords {
    /// `len` zeros. `module` is that of the sampler's kernel file.
    pub(super) fn new(
        device: &Arc<Device>,
        module: &Module,
        len: usize,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            device: device.clone(),
            kernel: module.function("patch_words")?,
            words: DeviceBuffer::zeroed(device, len)?,
            staged: BTreeMap::new(),
            patches: PinnedBuffer::new(device, 2 * MOST_PATCHES)?,
            read: Event::new(device)?,
        })
    }

    /// Where word `index` is.
    pub(super) fn at(&self, index: usize) -> DevicePtr {
        self.words.offset(index)
    }

    /// Sets words from `index` on, by the next upload at the latest.
    pub(super) fn set(&mut self, index: usize, values: &[u32]) -> Result<(), CudaError> {
        if values.len() <= FEW {
            self.staged
                .extend((index as u32..).zip(values.iter().copied()));
            return Ok(());
        }
        // What was staged for these words is older than what they become now.
        let range = index as u32..(index + values.len()) as u32;
        self.staged.retain(|at, _| !range.contains(at));
        self.words.write_at(index, values)
    }

    /// Launches the staged changes.
    pub(super) fn upload(&mut self) -> Result<(), CudaError> {
        while !self.staged.is_empty() {
            self.read.synchronize()?;
            let count = self.staged.len().min(MOST_PATCHES);
            let pairs = self.patches.as_mut_slice().as_chunks_mut::<2>().0;
            for (pair, (&at, &value)) in pairs.iter_mut().zip(&self.staged) {
                *pair = [at, value];
            }
            Launch::new(&self.kernel)
                .grid(count.div_ceil(THREADS), 1, 1)
                .block(THREADS)
                .arg(self.patches.device_ptr())
                .arg(count as u32)
                .arg(self.words.ptr())
                .run(&self.device)?;
            self.read.record(self.device.stream())?;
            let rest = self.staged.keys().nth(count).copied();
            self.staged = match rest {
                Some(first) => self.staged.split_off(&first),
                None => BTreeMap::new(),
            };
        }
        Ok(())
    }
}
