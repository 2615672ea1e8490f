//! How the work of a launch is shared: a matter of speed, not of results.

use super::AttentionShape;
use crate::row_metadata::MAX_PATH;

/// Positions of a split, as in the kernel file.
const SPLIT: usize = 64;

/// Positions of a tail, as in the kernel file: up to 15 committed slots and a path, in whole tiles.
const TAIL: usize = (15usize + MAX_PATH).next_multiple_of(16);

/// Warps of a block, at most: each has nearly all the registers that a thread can have.
const MOST_WARPS: usize = 8;

/// Tiles times key heads per multiprocessor from which warps take whole tiles and share keys.
const MANY_GROUPS: usize = 8;

/// Blocks of a cluster that every device takes.
const MOST_BLOCKS: usize = 8;

/// What a launch runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Machine {
    pub(super) multiprocessors: usize,
    /// Bytes that a block can have.
    pub(super) shared_memory: usize,
}

/// How warps and blocks share the tiles of rows and the splits of positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionPlan {
    /// A cluster takes some tiles, and its warps share their splits.
    Splits {
        /// Tiles of a block: 1, 2, 4 or 8.
        tiles: usize,
        /// Splits that a block computes at a time: 1, 2, 4 or 8, times `tiles` at most 8.
        splits: usize,
        /// Blocks of the cluster, each with other splits: 1, 2, 4 or 8.
        blocks: usize,
    },
    /// Each warp of a block takes a tile through all splits.
    Tiles {
        /// Tiles of a block: 1 to 8.
        tiles: usize,
    },
}

impl AttentionPlan {
    /// The plan for `tiles` tiles of `tile_rows` rows that see up to `longest` positions. Measured on an H200
    /// (docs/benchmarks.md): eight splits of one tile per block are best or near it for all that a step has, a cluster as
    /// far as the device still takes all blocks at once, and tiles that share keys for the many rows of a prompt.
    pub(super) fn choose(
        machine: Machine,
        shape: AttentionShape,
        tiles: usize,
        tile_rows: usize,
        longest: usize,
    ) -> Self {
        let groups = tiles * shape.kv_heads;
        if groups > MANY_GROUPS * machine.multiprocessors {
            return Self::fitting(machine, shape, tile_rows, |n| Self::Tiles { tiles: n });
        }
        let wanted = longest.div_ceil(MOST_WARPS * SPLIT).clamp(1, MOST_BLOCKS);
        let room = (machine.multiprocessors / groups.max(1)).max(1);
        let blocks = 1 << wanted.next_power_of_two().min(room).ilog2();
        Self::fitting(machine, shape, tile_rows, |splits| Self::Splits {
            tiles: 1,
            splits,
            blocks,
        })
    }

    /// The plan with the most warps that the shared memory has room for.
    fn fitting(
        machine: Machine,
        shape: AttentionShape,
        tile_rows: usize,
        plan: impl Fn(usize) -> Self,
    ) -> Self {
        [MOST_WARPS, 4, 2]
            .map(&plan)
            .into_iter()
            .find(|plan| plan.shared_bytes(shape, tile_rows) <= machine.shared_memory)
            .unwrap_or_else(|| plan(1))
    }

    /// All plans that are worth a thought, the small ones first.
    pub fn candidates() -> impl Iterator<Item = Self> {
        let powers = [1, 2, 4, 8];
        let splits = powers.into_iter().flat_map(move |blocks| {
            powers.into_iter().flat_map(move |splits| {
                powers.into_iter().map(move |tiles| Self::Splits {
                    tiles,
                    splits,
                    blocks,
                })
            })
        });
        splits
            .chain(powers.map(|tiles| Self::Tiles { tiles }))
            .filter(Self::is_valid)
    }

    pub(super) fn is_valid(&self) -> bool {
        match *self {
            Self::Splits {
                tiles,
                splits,
                blocks,
            } => {
                [tiles, splits, blocks].iter().all(|n| n.is_power_of_two())
                    && tiles * splits <= MOST_WARPS
                    && blocks <= MOST_BLOCKS
            }
            Self::Tiles { tiles } => (1..=MOST_WARPS).contains(&tiles),
        }
    }

    /// Results that each thread merges, four elements each.
    pub(super) fn items(&self, shape: AttentionShape, tile_rows: usize) -> usize {
        match *self {
            Self::Splits {
                tiles,
                splits,
                blocks,
            } => {
                let elements = tiles * tile_rows * shape.group() * shape.head_dim;
                (elements / 4).div_ceil(blocks * 32 * tiles * splits)
            }
            Self::Tiles { .. } => 0,
        }
    }

    /// Bytes of shared memory, in the order of the kernel file.
    pub(super) fn shared_bytes(&self, shape: AttentionShape, tile_rows: usize) -> usize {
        let width = shape.width();
        let rows = tile_rows * shape.group();
        // Queries as the matrix product takes them, and the list of cache rows.
        let warp_memory = width / 32 * 2 * 32 * 16 + SPLIT * 4;
        match *self {
            Self::Splits { tiles, splits, .. } => {
                let warps = tiles * splits;
                let parts = warps * rows * (width + 4) * 4;
                let sums = warps * 16 * 8;
                let state = self.items(shape, tile_rows) * 32 * warps * (16 + 8);
                let tails = tiles * tile_rows * TAIL * 4;
                parts + sums + state + tails + warps * warp_memory + tiles * 16
            }
            Self::Tiles { tiles } => {
                tiles * (width / 8 * 32 * 16 + tile_rows * TAIL * 4 + warp_memory + 8)
            }
        }
    }
}

/// Rows of a tile that should take the least time.
pub(super) fn tile_rows(
    machine: Machine,
    shape: AttentionShape,
    sequences: usize,
    rows: usize,
    longest: usize,
    trees: bool,
) -> usize {
    let most = 16 / shape.group();
    if !trees {
        return most;
    }
    // Every node of a tile but the first has products of its own for its path, so small tiles, as long as the device has
    // room for them and for the cluster that a long context wants.
    let wanted = longest.div_ceil(MOST_WARPS * SPLIT).clamp(1, MOST_BLOCKS);
    let fits = |tile_rows: &usize| {
        let groups = sequences * rows.div_ceil(*tile_rows) * shape.kv_heads;
        2 * groups * wanted <= machine.multiprocessors
    };
    (1..most).find(fits).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Machine = Machine {
        multiprocessors: 132,
        shared_memory: 227 * 1024,
    };
    const WORKSTATION: Machine = Machine {
        multiprocessors: 188,
        shared_memory: 99 * 1024,
    };
    const SMALL: AttentionShape = AttentionShape {
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
    };
    const LARGE: AttentionShape = AttentionShape {
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
    };

    #[test]
    fn every_choice_fits_the_machine() {
        for machine in [H200, WORKSTATION] {
            for shape in [SMALL, LARGE] {
                for rows in [1, 17, 65, 512] {
                    for longest in [1, 100, 1_000, 3_000, 40_000] {
                        let tile_rows = tile_rows(machine, shape, 1, rows, longest, true);
                        assert!((1..=16 / shape.group()).contains(&tile_rows));
                        let tiles = rows.div_ceil(tile_rows);
                        let plan = AttentionPlan::choose(machine, shape, tiles, tile_rows, longest);
                        assert!(plan.is_valid());
                        assert!(plan.shared_bytes(shape, tile_rows) <= machine.shared_memory);
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_are_spread_and_many_share_keys() {
        let decode = AttentionPlan::choose(H200, SMALL, 1, 1, 2_000);
        assert!(
            matches!(decode, AttentionPlan::Splits { blocks, .. } if blocks > 1),
            "{decode:?}"
        );
        let step = AttentionPlan::choose(H200, LARGE, 4, 4, 512);
        assert_eq!(
            step,
            AttentionPlan::Splits {
                tiles: 1,
                splits: 8,
                blocks: 1
            }
        );
        assert_eq!(tile_rows(H200, SMALL, 1, 16, 512, true), 1);
        assert_eq!(tile_rows(H200, SMALL, 1, 64, 512, true), 3);
        let prefill = AttentionPlan::choose(H200, LARGE, 1_024, 4, 4_000);
        assert!(
            matches!(
                prefill,
                AttentionPlan::Tiles { tiles } | AttentionPlan::Splits { tiles, .. } if tiles > 1
            ),
            "{prefill:?}"
        );
    }
}
