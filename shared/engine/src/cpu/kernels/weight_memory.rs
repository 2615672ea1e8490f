//! Memory for packed weights: few large maps instead of many small allocations.
//!
//! Decoding reads every weight once per step. Spread over pages of 4 KiB that is bound by address translation and by
//! prefetchers that stop at the end of a page, so weights lie together in maps that the system may back with large pages.

use std::io;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

/// Size of a map; a larger request gets one of its own size. Pages that are never touched take no memory.
const MAP_BYTES: usize = 64 << 20;
/// Regions start at cache lines.
const LINE: usize = 64;

/// Hands out regions of its maps.
#[derive(Default)]
pub(crate) struct WeightMemory {
    map: Option<Arc<MmapRaw>>,
    used: usize,
}

/// Part of a map. Never changed once it is filled.
pub(super) struct WeightRegion {
    map: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

impl WeightMemory {
    /// A copy of `bytes` at a cache line.
    ///
    /// # Errors
    /// When the operating system has no memory.
    pub(super) fn store(&mut self, bytes: &[u8]) -> io::Result<WeightRegion> {
        let room = self.map.as_ref().map(|map| map.len() - self.used);
        if room.is_none_or(|room| room < bytes.len()) {
            let options = MmapOptions::new().len(bytes.len().max(MAP_BYTES)).clone();
            let map = MmapRaw::from(options.map_anon()?);
            // A kernel without large pages refuses: slower, not wrong.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            self.map = Some(Arc::new(map));
            self.used = 0;
        }
        let map = self.map.clone().expect("a map was made above");
        let region = WeightRegion {
            start: self.used,
            len: bytes.len(),
            map,
        };
        // SAFETY: the region is inside the map and nobody refers to it yet: `used` only grows.
        unsafe {
            let target = region.map.as_mut_ptr().add(region.start);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
        self.used = (self.used + bytes.len())
            .next_multiple_of(LINE)
            .min(region.map.len());
        Ok(region)
    }
}

impl WeightRegion {
    /// The stored bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the region is inside the map, which lives as long as `self`, and is never written again.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.start), self.len) }
    }
}
