//! In which order a weight matrix is summed, and with which tiles.

/// Rows of the matrix that one `mma` instruction multiplies.
pub(crate) const PANEL_ROWS: usize = 16;

/// Values of the depth in a block of the packed layouts.
pub(crate) const BLOCK_DEPTH: usize = 32;

/// KiB of weights per multiprocessor up to which a matrix is small.
const SMALL_KIB_PER_SM: usize = 32;

/// Least blocks of 32 of the depth that are worth a block of their own in a cluster.
const LEAST_RANGE: usize = 8;

/// Blocks of 32 of the depth up to which a large matrix is shallow.
const SHALLOW: usize = 32;

/// How the rows of a matrix are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// In their order.
    Plain,
    /// The rows of a gate, then as many of an up projection: interleaved by eights, so that one tile has both.
    GateUp,
    /// In their order, for the head's epilogue: its groups of 64 rows must lie in one tile.
    Head,
}

/// Warps of a block over which the depth of a large matrix is dealt, unless the tile is very tall.
const DEPTH_WARPS: usize = 4;

/// The order in which the products of an output are added, and the tile that goes with it.
///
/// The depth is cut into `split` ranges, a range into blocks of 32 values that go in turn to `depth_warps` warps. All row
/// buckets keep that order, so the bits of a row do not depend on the rows beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearShape {
    /// Panels of 16 rows of the matrix per block for few rows: 1 (small matrices), 4, 8 or 16. Buckets may use other
    /// heights.
    pub panels: usize,
    /// Warps of a block that share a range of the depth: 8 where `panels` is 1, 2 or 4 where it is 4 or 8, 1 where it is
    /// 16.
    pub depth_warps: usize,
    /// Blocks of a cluster, each of which takes a range of the depth: 1 to 8; 1 where `panels` is 1.
    pub split: usize,
}

impl LinearShape {
    /// A shape with the usual number of warps over the depth.
    #[must_use]
    pub const fn new(panels: usize, split: usize) -> Self {
        let depth_warps = match panels {
            1 => 8,
            16 => 1,
            _ => DEPTH_WARPS,
        };
        Self {
            panels,
            depth_warps,
            split,
        }
    }

    /// The shape for a matrix of `rows` by `depth` on a device with `sm_count` multiprocessors. The row bucket is not
    /// among the arguments: all buckets must add in the same order.
    ///
    /// * Up to 32 KiB of weights per multiprocessor latency is all: every panel has a block, which requests all of its
    ///   weights at once.
    /// * Larger matrices get tiles of 64 rows, and their depth is split until there are 1.4 blocks for each
    ///   multiprocessor: two fit, and with fewer the copies of one block do not keep the memory busy while it ends. A
    ///   cluster costs the exchange of the sums, so the smallest split that is enough is taken.
    /// * Where the depth is so small that a block is all beginning and end, the blocks are made as few as that allows.
    #[must_use]
    pub fn choose(rows: usize, depth: usize, layout: Layout, sm_count: usize) -> Self {
        let panels = rows.div_ceil(PANEL_ROWS);
        let blocks = depth.div_ceil(BLOCK_DEPTH);
        if layout != Layout::Head && panels * blocks <= sm_count * SMALL_KIB_PER_SM {
            return Self::new(1, 1);
        }
        let enough = sm_count * 7 / 5;
        if blocks <= SHALLOW && panels.div_ceil(16) >= enough {
            return Self::new(16, 1);
        }
        let mut splits = [1, 2, 3, 4, 6, 8]
            .into_iter()
            .filter(|split| *split == 1 || split * LEAST_RANGE <= blocks);
        let largest = splits.clone().next_back().unwrap_or(1);
        let split = splits.find(|split| panels.div_ceil(4) * split >= enough);
        Self::new(4, split.unwrap_or(largest))
    }

    /// Rows that share a part of a sum of squares. Fixed by the order of sums, like everything that changes bits.
    pub(crate) fn part_rows(self) -> usize {
        if self.panels == 1 { 16 } else { 64 }
    }

    /// Panels that the packed matrix is padded to a multiple of: the tallest tile of any bucket.
    pub(crate) fn padding(self) -> usize {
        match self.panels {
            1 => 4,
            16 => 16,
            _ => 8,
        }
    }

    /// Panels whose blocks of 32 alternate in memory: of large matrices those of the shortest tile, so that it copies few
    /// and long pieces.
    pub(crate) fn group(self) -> usize {
        if self.panels == 1 { 1 } else { 4 }
    }

    pub(crate) fn is_valid(self) -> bool {
        match (self.panels, self.depth_warps) {
            (1, 8) => self.split == 1,
            (4 | 8, 2 | 4) | (16, 1) => (1..=8).contains(&self.split),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMS: usize = 132;

    fn choose(rows: usize, depth: usize) -> (usize, usize) {
        let shape = LinearShape::choose(rows, depth, Layout::Plain, SMS);
        (shape.panels, shape.split)
    }

    #[test]
    fn small_matrices_are_not_split() {
        for (rows, depth) in [
            (960, 576),
            (576, 576),
            (3072, 576),
            (576, 1536),
            (576, 2880),
            (1536, 576),
        ] {
            assert_eq!(choose(rows, depth), (1, 1), "{rows}x{depth}");
        }
    }

    #[test]
    fn large_matrices_fill_the_device_with_the_least_split() {
        assert_eq!(choose(6144, 4096), (4, 2));
        assert_eq!(choose(4096, 4096), (4, 3));
        assert_eq!(choose(24576, 4096), (4, 1));
        assert_eq!(choose(4096, 12288), (4, 3));
        assert_eq!(choose(151_936, 4096), (4, 1));
        assert_eq!(choose(1024, 3072), (4, 8));
        assert_eq!(choose(49_152, 576), (16, 1));
        assert_eq!(choose(16_384, 576), (4, 1));
    }

    #[test]
    fn a_head_keeps_its_groups_in_one_tile() {
        for (rows, depth) in [(49_152, 576), (512, 64), (65, 32)] {
            let shape = LinearShape::choose(rows, depth, Layout::Head, SMS);
            assert!(shape.panels >= 4 && shape.is_valid(), "{shape:?}");
        }
    }

    #[test]
    fn every_shape_is_valid_and_no_range_is_empty() {
        for sm_count in [1, 20, 132, 188] {
            for rows in [1, 16, 80, 4096, 20_000, 300_000] {
                for depth in [1, 32, 40, 256, 4096, 65_536] {
                    let shape = LinearShape::choose(rows, depth, Layout::Plain, sm_count);
                    assert!(shape.is_valid(), "{shape:?}");
                    assert!(
                        shape.split <= depth.div_ceil(BLOCK_DEPTH),
                        "{rows}x{depth} {shape:?}"
                    );
                }
            }
        }
    }
}
