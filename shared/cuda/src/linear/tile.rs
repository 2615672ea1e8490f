//! Which kernel runs a launch and with which grid. Nothing here changes a bit of the result.

use super::shape::LinearShape;
use crate::CudaError;

/// One kernel of `linear.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tile {
    pub(crate) name: &'static str,
    /// Panels of 16 rows of the matrix.
    pub(crate) panels: usize,
    /// Tiles of 8 rows of the batch.
    pub(crate) tiles: usize,
    /// Warps over the depth.
    pub(crate) depth_warps: usize,
    pub(crate) kind: TileKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileKind {
    /// Everything in flight at once.
    Direct,
    /// A ring of stages; the second is for blocks that have a multiprocessor to themselves.
    Streamed,
    StreamedAlone,
}

const fn tile(
    name: &'static str,
    panels: usize,
    tiles: usize,
    depth_warps: usize,
    kind: TileKind,
) -> Tile {
    Tile {
        name,
        panels,
        tiles,
        depth_warps,
        kind,
    }
}

pub(crate) const TILES: [Tile; 31] = [
    tile("linear_16x8", 1, 1, 8, TileKind::Direct),
    tile("linear_16x16", 1, 2, 8, TileKind::Direct),
    tile("linear_16x32", 1, 4, 8, TileKind::Direct),
    tile("linear_16x64", 1, 8, 8, TileKind::Direct),
    tile("linear_32x8", 2, 1, 8, TileKind::Direct),
    tile("linear_32x16", 2, 2, 8, TileKind::Direct),
    tile("linear_32x32", 2, 4, 8, TileKind::Direct),
    tile("linear_32x64", 2, 8, 8, TileKind::Direct),
    tile("linear_64x8_direct", 4, 1, 8, TileKind::Direct),
    tile("linear_64x16_direct", 4, 2, 8, TileKind::Direct),
    tile("linear_64x32_direct", 4, 4, 8, TileKind::Direct),
    tile("linear_64x8", 4, 1, 2, TileKind::Streamed),
    tile("linear_64x16", 4, 2, 2, TileKind::Streamed),
    tile("linear_64x32", 4, 4, 2, TileKind::Streamed),
    tile("linear_64x64", 4, 8, 2, TileKind::Streamed),
    tile("linear_128x8", 8, 1, 2, TileKind::Streamed),
    tile("linear_128x16", 8, 2, 2, TileKind::Streamed),
    tile("linear_128x32", 8, 4, 2, TileKind::Streamed),
    tile("linear_128x64", 8, 8, 2, TileKind::Streamed),
    tile("linear_128x128", 8, 16, 2, TileKind::StreamedAlone),
    tile("linear_64x8_deep", 4, 1, 4, TileKind::Streamed),
    tile("linear_64x16_deep", 4, 2, 4, TileKind::Streamed),
    tile("linear_64x32_deep", 4, 4, 4, TileKind::Streamed),
    tile("linear_64x64_deep", 4, 8, 4, TileKind::Streamed),
    tile("linear_128x32_deep", 8, 4, 4, TileKind::Streamed),
    tile("linear_128x64_deep", 8, 8, 4, TileKind::StreamedAlone),
    tile("linear_256x8", 16, 1, 1, TileKind::Streamed),
    tile("linear_256x16", 16, 2, 1, TileKind::Streamed),
    tile("linear_256x32", 16, 4, 1, TileKind::Streamed),
    tile("linear_256x64", 16, 8, 1, TileKind::Streamed),
    tile("linear_256x128", 16, 16, 1, TileKind::StreamedAlone),
];

/// Bytes before the data in shared memory, as in the kernel file.
const HEADER_BYTES: usize = 1024;

/// Most stages of a ring, as in the kernel file.
const MOST_STAGES: usize = 32;

/// Shared memory of a multiprocessor that the driver keeps for each block.
const RESERVED_BYTES: usize = 1024;

/// Shared memory per block from which two blocks of a comfortable ring fit a multiprocessor.
const LARGE_SHARED_MEMORY: usize = 160 << 10;

/// Blocks of 32 of the depth from which a warp has enough to copy for two panels.
const DEEP: usize = 32;

/// Settings that change speed and nothing else. The defaults are what was measured best.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearTuning {
    /// Blocks of 32 of the depth in a stage of the ring, for tiles of 4, 8 and 16 panels, and for those with four warps
    /// over the depth: multiples of 2, 2, 1 and 4.
    pub stage_depth: [usize; 4],
    /// Most bytes of a block's ring where two blocks share a multiprocessor. `None`: as much as fits.
    pub ring_bytes: Option<usize>,
    /// Row bucket from which tiles have 128 columns, where the bucket is a multiple of 128.
    pub wide_from: usize,
    /// Panels of the tiles of matrices that are made for 4 or 8. `None`: by the row bucket.
    pub panels: Option<usize>,
    /// Panels and tiles of 8 rows of the direct kernel. `None`: by the cost of a launch.
    pub direct: Option<(usize, usize)>,
}

impl Default for LinearTuning {
    fn default() -> Self {
        Self {
            stage_depth: [4, 2, 1, 4],
            ring_bytes: None,
            wide_from: 128,
            panels: None,
            direct: None,
        }
    }
}

impl LinearTuning {
    pub(crate) fn defines(&self) -> [(&'static str, String); 4] {
        let [four, eight, sixteen, deep] = self.stage_depth.map(|depth| depth.to_string());
        [
            ("KC_4", four),
            ("KC_8", eight),
            ("KC_16", sixteen),
            ("KC_DEEP", deep),
        ]
    }

    fn stage_depth(&self, tile: &Tile) -> usize {
        let [four, eight, sixteen, deep] = self.stage_depth;
        match (tile.panels, tile.depth_warps) {
            (_, 4) => deep,
            (4, _) => four,
            (8, _) => eight,
            _ => sixteen,
        }
    }
}

/// What a launch depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem {
    /// Panels with rows of the matrix.
    pub(crate) panels: usize,
    /// Blocks of 32 of the depth.
    pub(crate) blocks: usize,
    pub(crate) shape: LinearShape,
    /// Row bucket.
    pub(crate) rows: usize,
    pub(crate) sm_count: usize,
    /// Most bytes of shared memory of a block.
    pub(crate) shared: usize,
}

/// A launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Index in [`TILES`].
    pub(crate) tile: usize,
    pub(crate) grid: [usize; 2],
    /// Stages of the ring, or blocks of a warp in shared memory at a time.
    pub(crate) stages: usize,
    pub(crate) shared: usize,
}

impl Problem {
    pub(crate) fn plan(&self, tuning: &LinearTuning) -> Result<Plan, CudaError> {
        let plan = if self.shape.panels == 1 {
            self.direct(tuning)
        } else {
            self.streamed(tuning)
        };
        plan.ok_or_else(|| {
            CudaError::Unsupported(format!(
                "no tile for {} rows with {:?} in {} bytes of shared memory",
                self.rows, self.shape, self.shared
            ))
        })
    }

    /// Tiles of 8 rows in a block of the packed batch.
    fn block_tiles(&self) -> usize {
        self.rows.min(64) / 8
    }

    /// The first tile that there is and that fits, of the heights and widths in the order of preference.
    fn streamed(&self, tuning: &LinearTuning) -> Option<Plan> {
        let wide = self.rows >= tuning.wide_from
            && self.rows.is_multiple_of(128)
            && self.shared >= LARGE_SHARED_MEMORY;
        let widths = [wide.then_some(16), Some(self.block_tiles())];
        self.heights(tuning).into_iter().find_map(|panels| {
            widths.into_iter().flatten().find_map(|tiles| {
                let index = TILES.iter().position(|t| {
                    t.kind != TileKind::Direct
                        && (t.panels, t.tiles, t.depth_warps)
                            == (panels, tiles, self.shape.depth_warps)
                })?;
                self.ring(tuning, index)
            })
        })
    }

    /// Heights of tiles in panels. They do not enter the order of sums.
    fn heights(&self, tuning: &LinearTuning) -> [usize; 2] {
        let tall = match (self.shape.panels, tuning.panels) {
            (16, _) => return [16, 16],
            (_, Some(panels)) => panels == 8,
            (8, None) => true,
            // Tall tiles load the activations less often. For up to a block of rows that only pays where the device
            // takes all of them at once.
            _ if self.rows > 64 => true,
            _ if self.rows < 64 || self.shape.depth_warps != 2 => false,
            _ => {
                let waves = |panels| {
                    (self.panels.div_ceil(panels) * self.shape.split).div_ceil(2 * self.sm_count)
                };
                waves(8) * 8 <= waves(4) * 4
            }
        };
        if tall { [8, 4] } else { [4, 8] }
    }

    fn ring(&self, tuning: &LinearTuning, index: usize) -> Option<Plan> {
        let tile = &TILES[index];
        let depth = tuning.stage_depth(tile);
        let stage_bytes = depth * (tile.panels * 1024 + tile.tiles * 512);
        let room = match tile.kind {
            TileKind::Streamed if self.shared >= LARGE_SHARED_MEMORY => {
                let half = (self.shared + RESERVED_BYTES) / 2 - RESERVED_BYTES - HEADER_BYTES;
                half.min(tuning.ring_bytes.unwrap_or(half))
            }
            _ => self.shared - HEADER_BYTES,
        };
        let steps = self.blocks.div_ceil(self.shape.split).div_ceil(depth);
        let stages = (room / stage_bytes).min(MOST_STAGES).min(steps);
        // A stage is refilled while the next one is read.
        if stages < 2 && stages < steps {
            return None;
        }
        let sums = tile.depth_warps * tile.tiles * 8 * (tile.panels * 16 + 4) * 4;
        let shared = HEADER_BYTES + (stages * stage_bytes).max(sums);
        (shared <= self.shared).then_some(Plan {
            tile: index,
            grid: [
                self.shape.split * self.rows / (tile.tiles * 8),
                self.panels.div_ceil(tile.panels),
            ],
            stages,
            shared,
        })
    }

    /// The smallest tile for which the device takes all blocks at once and a block all of its depth at once: latency is
    /// what counts, and a tile's columns cost more of it than its panels (docs/benchmarks.md has the figures).
    fn direct(&self, tuning: &LinearTuning) -> Option<Plan> {
        let column_tiles = self.rows / 8;
        let mut best: Option<((usize, usize), usize, Plan)> = None;
        for (index, tile) in TILES.iter().enumerate() {
            let fits = tile.kind == TileKind::Direct
                && self.block_tiles().is_multiple_of(tile.tiles)
                && tuning.direct.is_none_or(|(panels, tiles)| {
                    (panels, tiles.min(self.block_tiles())) == (tile.panels, tile.tiles)
                });
            if !fits {
                continue;
            }
            let unit = tile.panels * 1024 + tile.tiles * 512;
            let sums = tile.tiles * 8 * (tile.panels * 16 + 4) * 4;
            let per_warp = (self.shared - HEADER_BYTES) / 8;
            let blocks_of_warp = self.blocks.div_ceil(8);
            let stages = (per_warp / unit).min(blocks_of_warp);
            if stages == 0 || sums > per_warp {
                continue;
            }
            let shared = HEADER_BYTES + 8 * (stages * unit).max(sums);
            let grid = [column_tiles / tile.tiles, self.panels.div_ceil(tile.panels)];
            let blocks = grid[0] * grid[1];
            let at_once = ((self.shared + RESERVED_BYTES) / (shared + RESERVED_BYTES)).clamp(1, 2);
            let waits =
                blocks_of_warp.div_ceil(stages) + blocks.div_ceil(self.sm_count * at_once) - 2;
            let thin = usize::from(tile.panels == 1 && self.blocks >= DEEP);
            let size = 4 * tile.tiles + 2 * tile.panels + 4 * thin + usize::from(tile.panels > 2);
            let cost = (waits, size);
            let plan = Plan {
                tile: index,
                grid,
                stages,
                shared,
            };
            if best.is_none_or(|(least, fewest, _)| (cost, blocks) < (least, fewest)) {
                best = Some((cost, blocks, plan));
            }
        }
        best.map(|(_, _, plan)| plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::Layout;

    const HOPPER: (usize, usize) = (132, 232_448);
    const SMALL_SHARED: (usize, usize) = (188, 101_376);

    fn problem(
        rows: usize,
        depth: usize,
        batch: usize,
        (sm_count, shared): (usize, usize),
    ) -> Problem {
        Problem {
            panels: rows.div_ceil(16),
            blocks: depth.div_ceil(32),
            shape: LinearShape::choose(rows, depth, Layout::Plain, sm_count),
            rows: batch,
            sm_count,
            shared,
        }
    }

    fn name(problem: Problem) -> (&'static str, [usize; 2]) {
        let plan = problem.plan(&LinearTuning::default()).unwrap();
        (TILES[plan.tile].name, plan.grid)
    }

    #[test]
    fn small_matrices_spread_over_the_device() {
        assert_eq!(name(problem(576, 576, 8, HOPPER)), ("linear_16x8", [1, 36]));
        assert_eq!(
            name(problem(576, 576, 16, HOPPER)),
            ("linear_16x8", [2, 36])
        );
        assert_eq!(name(problem(960, 576, 8, HOPPER)), ("linear_16x8", [1, 60]));
        for (rows, depth, batch, tile, grid) in [
            (3072, 576, 8, "linear_16x8", [1, 192]),
            (3072, 576, 32, "linear_32x16", [2, 96]),
            (3072, 576, 64, "linear_32x32", [2, 96]),
            (960, 576, 64, "linear_32x8", [8, 30]),
            (576, 1536, 16, "linear_32x8", [2, 18]),
            (576, 1536, 64, "linear_32x16", [4, 18]),
            (576, 2880, 16, "linear_16x8", [2, 36]),
        ] {
            let got = name(problem(rows, depth, batch, HOPPER));
            assert_eq!(got, (tile, grid), "{rows} by {depth} with {batch}");
        }
    }

    #[test]
    fn large_matrices_keep_one_column_tile_up_to_a_block_of_rows() {
        let name_of = |depth_warps, rows, depth, batch, machine| {
            let problem = problem(rows, depth, batch, machine);
            let shape = LinearShape {
                depth_warps,
                ..problem.shape
            };
            name(Problem { shape, ..problem })
        };
        for (warps, rows, batch, tile, grid) in [
            (2, 4096, 8, "linear_64x8", [3, 64]),
            (2, 4096, 64, "linear_64x64", [3, 64]),
            (2, 24_576, 32, "linear_64x32", [1, 384]),
            // One wave of tall tiles, not one and a half of short ones.
            (2, 24_576, 64, "linear_128x64", [1, 192]),
            (2, 151_936, 64, "linear_64x64", [1, 2374]),
            (2, 4096, 320, "linear_128x64", [15, 32]),
            (2, 4096, 512, "linear_128x128", [12, 32]),
            (4, 4096, 8, "linear_64x8_deep", [3, 64]),
            (4, 24_576, 64, "linear_64x64_deep", [1, 384]),
            (4, 4096, 512, "linear_128x64_deep", [24, 32]),
        ] {
            let got = name_of(warps, rows, 4096, batch, HOPPER);
            assert_eq!(got, (tile, grid), "{rows} with {batch}");
        }
        assert_eq!(name_of(2, 4096, 4096, 512, SMALL_SHARED).0, "linear_128x64");
        assert_eq!(
            name_of(4, 4096, 4096, 512, SMALL_SHARED).0,
            "linear_64x64_deep"
        );
    }

    #[test]
    fn two_blocks_of_a_large_matrix_share_a_multiprocessor() {
        for batch in [8, 16, 32, 64] {
            let plan = problem(24_576, 4096, batch, HOPPER)
                .plan(&LinearTuning::default())
                .unwrap();
            assert!(2 * (plan.shared + RESERVED_BYTES) <= 228 << 10, "{plan:?}");
            assert!(plan.shared > 80 << 10, "{plan:?}");
        }
    }

    #[test]
    fn every_plan_fits_and_covers_the_batch() {
        for machine in [HOPPER, SMALL_SHARED, (1, 101_376)] {
            for panels in [1, 4, 8, 16] {
                for (split, depth_warps) in if panels == 1 { 1..2 } else { 1..9 }
                    .flat_map(|split| [1, 2, 4, 8].map(|warps| (split, warps)))
                {
                    for depth in [40, 576, 2880, 20_480] {
                        for batch in [8, 16, 32, 64, 128, 192, 320, 512] {
                            let shape = LinearShape {
                                panels,
                                depth_warps,
                                split,
                            };
                            if !shape.is_valid() {
                                continue;
                            }
                            let problem = Problem {
                                shape,
                                ..problem(200, depth, batch, machine)
                            };
                            if split > problem.blocks {
                                continue;
                            }
                            let plan = problem.plan(&LinearTuning::default()).unwrap();
                            let tile = TILES[plan.tile];
                            assert!(plan.shared <= machine.1);
                            assert!(plan.grid[1] * tile.panels >= problem.panels);
                            assert!(
                                problem.panels.next_multiple_of(shape.padding())
                                    >= plan.grid[1] * tile.panels
                            );
                            assert_eq!(plan.grid[0] * tile.tiles * 8, batch * split);
                            assert!(plan.stages >= 1);
                        }
                    }
                }
            }
        }
    }
}
