//! Drafts built on the device against the builders of treespec-tree, node by node.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::{
    BatchState, Device, DeviceBuffer, DevicePtr, DraftCandidates, DraftRecords, DraftRows,
    DraftTreeKernels, HeadTop,
};
use treespec_tree::{Candidate, DepthCandidates, TokenTree, best_first, chain};

const NONE: u32 = u32::MAX;
const TABLE: usize = 64;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Spread,
    /// All candidates weigh the same: every pop is a tie.
    Equal,
    /// Few values: many ties, also between depths.
    Coarse,
    /// Log-probabilities of 0: a child weighs as much as its parent.
    Certain,
    /// Not sorted, with NaN and negative infinity.
    Broken,
    /// Six tokens only: depths list them several times.
    Repeated,
    /// Normalisers that are no numbers.
    NoNormaliser,
}

const KINDS: [Kind; 7] = [
    Kind::Spread,
    Kind::Equal,
    Kind::Coarse,
    Kind::Certain,
    Kind::Broken,
    Kind::Repeated,
    Kind::NoNormaliser,
];

#[derive(Debug, Clone, Copy)]
struct Shape {
    sequences: usize,
    depths: usize,
    count: usize,
    budget: usize,
    /// Rows per sequence.
    rows: usize,
    tile_rows: usize,
}

/// A batch as the host sees it.
struct Batch {
    shape: Shape,
    head_rows: usize,
    stride: usize,
    ids: Vec<u32>,
    logits: Vec<f32>,
    normaliser: Vec<f32>,
    roots: Vec<u32>,
    committed: Vec<u32>,
    max_depths: Vec<u32>,
    tables: Vec<u32>,
}

impl Batch {
    fn new(shape: Shape, kind: Kind, random: &mut StdRng) -> Self {
        let head_rows = shape.depths + random.random_range(0..2);
        let stride = shape.count + random.random_range(0..3);
        let rows = shape.sequences * head_rows;
        let mut batch = Self {
            shape,
            head_rows,
            stride,
            ids: Vec::new(),
            logits: Vec::new(),
            normaliser: Vec::new(),
            roots: (0..shape.sequences as u32).map(|s| 500 + s).collect(),
            committed: (0..shape.sequences)
                .map(|_| random.random_range(0..700))
                .collect(),
            max_depths: vec![NONE; shape.sequences],
            tables: (0..shape.sequences * TABLE)
                .map(|_| random.random_range(0..1_000_000))
                .collect(),
        };
        for row in 0..rows {
            let normaliser: f32 = match kind {
                Kind::NoNormaliser if random.random_range(0..4) == 0 => f32::NAN,
                Kind::Certain => 8.0,
                _ => random.random_range(10.0..14.0),
            };
            let mut logits: Vec<f32> = (0..stride)
                .map(|rank| match kind {
                    Kind::Equal => 5.0,
                    Kind::Coarse => (random.random_range(0..4) as f32) * 0.25,
                    Kind::Certain if rank == 0 => 8.0,
                    Kind::Broken if random.random_range(0..7) == 0 => f32::NAN,
                    Kind::Broken if random.random_range(0..7) == 0 => f32::NEG_INFINITY,
                    _ => random.random_range(-4.0f32..8.0),
                })
                .collect();
            if !matches!(kind, Kind::Broken) {
                logits.sort_by(|a, b| b.total_cmp(a));
            }
            let ids = (0..stride as u32).map(|rank| match kind {
                Kind::Repeated => random.random_range(0..6),
                _ => row as u32 * 1_000 + rank,
            });
            batch.ids.extend(ids);
            batch.logits.extend(logits);
            batch.normaliser.push(normaliser);
        }
        // One sequence that takes no part, and some that are near the end of their context.
        for (sequence, limit) in batch.max_depths.iter_mut().enumerate() {
            match sequence % 4 {
                1 => *limit = random.random_range(0..shape.depths as u32 + 2),
                3 => batch.roots[sequence] = NONE,
                _ => {}
            }
        }
        batch.tables[TABLE / 2] = NONE;
        batch
    }

    fn reference(&self, sequence: usize, as_chain: bool) -> Option<TokenTree> {
        let root = self.roots[sequence];
        if root == NONE {
            return None;
        }
        let depths = (0..self.shape.depths)
            .map(|depth| {
                let row = sequence * self.head_rows + depth;
                (row * self.stride..row * self.stride + self.shape.count)
                    .map(|at| Candidate {
                        token: self.ids[at],
                        log_prob: self.logits[at] - self.normaliser[row],
                    })
                    .collect()
            })
            .collect();
        let depths = DepthCandidates(depths);
        let mut tree = if as_chain {
            chain(root, &depths)
        } else {
            best_first(root, &depths, self.shape.budget)
        };
        tree.truncate_depth(self.max_depths[sequence]);
        tree.truncate(self.shape.rows - 1);
        Some(tree)
    }

    fn physical(&self, sequence: usize, logical: usize) -> u32 {
        let table = &self.tables[sequence * TABLE..][..TABLE];
        match table.get(logical / 16) {
            None | Some(&NONE) => NONE,
            Some(&block) => block * 16 + logical as u32 % 16,
        }
    }
}

/// What the kernel wrote.
struct Built {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    kv_slot: Vec<u32>,
    path_len: Vec<u32>,
    paths: Vec<u16>,
    vis_begin: Vec<u32>,
    vis_end: Vec<u32>,
    parents: Vec<u32>,
    seq_rows: Vec<u32>,
    tiles: Vec<u32>,
    records: DraftRecords,
}

fn build(device: &Arc<Device>, batch: &Batch, as_chain: bool) -> Built {
    let shape = batch.shape;
    let kernels = DraftTreeKernels::load(device).unwrap();
    let upload = |values: &[u32]| DeviceBuffer::from_slice(device, values).unwrap();
    let floats = |values: &[f32]| DeviceBuffer::from_slice(device, values).unwrap();
    let poisoned = |len: usize| {
        let buffer = DeviceBuffer::<u32>::uninit(device, len).unwrap();
        buffer.fill_bytes(0xAB).unwrap();
        buffer
    };
    let (ids, logits, normaliser) = (
        upload(&batch.ids),
        floats(&batch.logits),
        floats(&batch.normaliser),
    );
    let (roots, committed) = (upload(&batch.roots), upload(&batch.committed));
    let (max_depths, tables) = (upload(&batch.max_depths), upload(&batch.tables));
    let rows = shape.sequences * shape.rows;
    let row_arrays: [_; 7] = std::array::from_fn(|_| poisoned(rows));
    let paths = DeviceBuffer::<u16>::uninit(device, rows * 64).unwrap();
    paths.fill_bytes(0xAB).unwrap();
    let tile_count = shape.sequences * shape.rows.div_ceil(shape.tile_rows);
    let (seq_rows, tiles) = (poisoned(shape.sequences), poisoned(tile_count * 4));
    let records = DraftRecords::new(device, shape.sequences, shape.rows).unwrap();
    let candidates = DraftCandidates {
        top: HeadTop {
            ids: ids.ptr(),
            logits: logits.ptr(),
            stride: batch.stride,
            normaliser: normaliser.ptr(),
            gathered: DevicePtr::NULL,
        },
        rows: batch.head_rows,
        depths: shape.depths,
        count: shape.count,
    };
    let state = BatchState {
        roots: roots.ptr(),
        committed: committed.ptr(),
        max_depths: max_depths.ptr(),
        tables: tables.ptr(),
        table_stride: TABLE,
    };
    let [
        tokens,
        positions,
        kv_slot,
        path_len,
        vis_begin,
        vis_end,
        parents,
    ] = &row_arrays;
    let out = DraftRows {
        rows: shape.rows,
        tokens: tokens.ptr(),
        positions: positions.ptr(),
        kv_slot: kv_slot.ptr(),
        path_len: path_len.ptr(),
        paths: paths.ptr(),
        vis_begin: vis_begin.ptr(),
        vis_end: vis_end.ptr(),
        parents: parents.ptr(),
        seq_rows: seq_rows.ptr(),
        tiles: tiles.ptr(),
        tile_rows: shape.tile_rows,
    };
    let to = records.device_ptr();
    if as_chain {
        kernels.chain(shape.sequences, candidates, state, out, to)
    } else {
        kernels.tree(shape.sequences, shape.budget, candidates, state, out, to)
    }
    .unwrap();
    device.synchronize().unwrap();
    Built {
        tokens: tokens.read().unwrap(),
        positions: positions.read().unwrap(),
        kv_slot: kv_slot.read().unwrap(),
        path_len: path_len.read().unwrap(),
        paths: paths.read().unwrap(),
        vis_begin: vis_begin.read().unwrap(),
        vis_end: vis_end.read().unwrap(),
        parents: parents.read().unwrap(),
        seq_rows: seq_rows.read().unwrap(),
        tiles: tiles.read().unwrap(),
        records,
    }
}

fn check(batch: &Batch, built: &Built, as_chain: bool, what: &str) {
    let shape = batch.shape;
    for sequence in 0..shape.sequences {
        let what = format!("{what} {shape:?} sequence {sequence}");
        let expected = batch.reference(sequence, as_chain);
        let nodes = expected.as_ref().map_or(0, TokenTree::len);
        assert_eq!(built.seq_rows[sequence] as usize, nodes, "{what}");
        match &expected {
            // Equal log-probabilities compare as numbers; there is no NaN in a tree and no negative zero.
            Some(tree) => assert_eq!(&built.records.tree(sequence).unwrap(), tree, "{what}"),
            None => assert!(built.records.tree(sequence).is_err(), "{what}"),
        }
        let committed = batch.committed[sequence];
        for node in 0..shape.rows {
            let row = sequence * shape.rows + node;
            let what = format!("{what} node {node}");
            let got = (
                built.tokens[row],
                built.positions[row],
                built.kv_slot[row],
                built.parents[row],
            );
            let Some(tree) = expected.as_ref().filter(|tree| node < tree.len()) else {
                let position = if expected.is_some() { committed } else { 0 };
                assert_eq!(got, (0, position, NONE, NONE), "{what}: padding");
                let sees = (built.path_len[row], built.vis_end[row]);
                assert_eq!(sees, (0, 0), "{what}: padding sees something");
                continue;
            };
            let parent = tree.parent(node).map_or(NONE, |parent| parent as u32);
            let slot = batch.physical(sequence, committed as usize + node);
            let expected = (
                tree.tokens()[node],
                committed + tree.depth(node),
                slot,
                parent,
            );
            assert_eq!(got, expected, "{what}: token, position, slot, parent");
            if as_chain {
                let range = (built.vis_begin[row], built.vis_end[row]);
                assert_eq!(range, (0, committed + node as u32 + 1), "{what}");
                assert_eq!(built.path_len[row], 0, "{what}");
            } else {
                let path: Vec<usize> = built.paths[row * 64..][..built.path_len[row] as usize]
                    .iter()
                    .map(|&at| at as usize)
                    .collect();
                assert_eq!(path, tree.path(node), "{what}: path");
                assert_eq!(built.vis_end[row], 0, "{what}: a range besides the path");
            }
        }
        let tiles = shape.rows.div_ceil(shape.tile_rows);
        for tile in 0..tiles {
            let first = tile * shape.tile_rows;
            let rows = nodes.saturating_sub(first).min(shape.tile_rows) as u32;
            let owner = if rows == 0 { NONE } else { sequence as u32 };
            let first = (sequence * shape.rows + first) as u32;
            let got = &built.tiles[(sequence * tiles + tile) * 4..][..4];
            assert_eq!(got, [owner, first, rows, 0], "{what} tile {tile}");
        }
    }
}

#[test]
fn trees_equal_the_reference() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut random = StdRng::seed_from_u64(1);
    for kind in KINDS {
        for budget in [1, 7, 16, 31, 32, 33, 63, 64, 65, 128, 255] {
            for depths in [1, 4, 15, 31] {
                let shape = Shape {
                    sequences: 5,
                    depths,
                    count: match random.random_range(0..3) {
                        0 => random.random_range(1..=budget),
                        _ => budget,
                    },
                    budget,
                    rows: (budget + 1 + random.random_range(0..4)).min(256),
                    tile_rows: random.random_range(1..6),
                };
                let batch = Batch::new(shape, kind, &mut random);
                let built = build(&device, &batch, false);
                check(&batch, &built, false, &format!("{kind:?}"));
            }
        }
    }
}

#[test]
fn the_deepest_paths_fit() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut random = StdRng::seed_from_u64(2);
    let shape = Shape {
        sequences: 3,
        depths: 63,
        count: 4,
        budget: 200,
        rows: 201,
        tile_rows: 4,
    };
    let batch = Batch::new(shape, Kind::Certain, &mut random);
    check(&batch, &build(&device, &batch, false), false, "deep");
}

#[test]
fn chains_equal_the_reference() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut random = StdRng::seed_from_u64(3);
    for kind in KINDS {
        for depths in [1, 7, 15, 31, 255] {
            let shape = Shape {
                sequences: 6,
                depths,
                count: 1,
                budget: depths,
                rows: (depths + 1 + random.random_range(0..3)).min(256),
                tile_rows: random.random_range(1..6),
            };
            let batch = Batch::new(shape, kind, &mut random);
            check(
                &batch,
                &build(&device, &batch, true),
                true,
                &format!("{kind:?}"),
            );
        }
    }
}

#[test]
fn a_smaller_budget_gives_a_prefix() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut shape = Shape {
        sequences: 1,
        depths: 15,
        count: 63,
        budget: 63,
        rows: 64,
        tile_rows: 4,
    };
    let batch = Batch::new(shape, Kind::Spread, &mut StdRng::seed_from_u64(4));
    let mut large = build(&device, &batch, false).records.tree(0).unwrap();
    shape.budget = 16;
    let small = Batch { shape, ..batch };
    large.truncate(16);
    assert_eq!(
        build(&device, &small, false).records.tree(0).unwrap(),
        large
    );
}
