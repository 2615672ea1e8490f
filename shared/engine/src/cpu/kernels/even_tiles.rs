//! Rows split into tiles of even sizes.

use std::ops::Range;

/// As few tiles of at most `most` items as possible, of even sizes: 26 items are 6 + 7 + 6 + 7, not 8 + 8 + 8 + 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EvenTiles {
    items: usize,
    count: usize,
}

impl EvenTiles {
    pub(super) fn new(items: usize, most: usize) -> Self {
        Self {
            items,
            count: items.div_ceil(most),
        }
    }

    /// How many tiles.
    pub(super) fn count(self) -> usize {
        self.count
    }

    /// The items of tile `tile`.
    #[inline(always)]
    pub(super) fn tile(self, tile: usize) -> Range<usize> {
        self.items * tile / self.count..self.items * (tile + 1) / self.count
    }

    /// The items of every tile.
    #[inline(always)]
    pub(super) fn iter(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.count).map(move |tile| self.tile(tile))
    }
}
