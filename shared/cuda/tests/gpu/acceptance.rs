//! Acceptance on the device against the walk of treespec-tree.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::{
    AcceptanceBuffers, AcceptanceKernels, BatchState, Device, DeviceBuffer, DevicePtr, MOST_PATH,
    RootRows, TargetChoices, VerifiedRows,
};
use treespec_tree::{TokenTree, walk};

const NONE: u32 = u32::MAX;

/// Entries from row to row of the choices, and of their logits.
const STRIDES: (usize, usize) = (3, 2);

fn random_tree(nodes: usize, random: &mut StdRng) -> TokenTree {
    let mut tree = TokenTree::root_only(random.random_range(0..50));
    while tree.len() < nodes {
        // Mostly below the newest node: deep trees are the ones worth walking.
        let parent = match random.random_range(0..3) {
            0 => random.random_range(0..tree.len()),
            _ => tree.len() - 1,
        };
        let _ = tree.push(parent, random.random_range(0..40), 0.0);
    }
    tree
}

/// A batch as the host sees it. `None` takes no part.
struct Batch {
    rows: usize,
    trees: Vec<Option<TokenTree>>,
    /// Per row.
    choices: Vec<u32>,
    logits: Vec<f32>,
    committed: Vec<u32>,
}

impl Batch {
    fn new(sequences: usize, rows: usize, random: &mut StdRng) -> Self {
        let trees: Vec<_> = (0..sequences)
            .map(|s| {
                let nodes = random.random_range(1..=rows);
                (s % 6 != 5).then(|| random_tree(nodes, random))
            })
            .collect();
        let mut choices = Vec::new();
        for tree in &trees {
            for node in 0..rows {
                let children: Vec<usize> = tree
                    .as_ref()
                    .map(|tree| tree.children(node).collect())
                    .unwrap_or_default();
                choices.push(match random.random_range(0..12) {
                    0 => 1_000 + node as u32,
                    _ if children.is_empty() => random.random_range(0..40),
                    _ => {
                        let child = children[random.random_range(0..children.len())];
                        trees[choices.len() / rows].as_ref().unwrap().tokens()[child]
                    }
                });
            }
        }
        Self {
            rows,
            logits: (0..choices.len()).map(|row| 0.5 + row as f32).collect(),
            committed: (0..sequences as u32).map(|s| 10 * s).collect(),
            trees,
            choices,
        }
    }

    fn spread<T: Copy>(values: &[T], stride: usize, filler: T) -> Vec<T> {
        let mut spread = vec![filler; values.len() * stride];
        for (index, &value) in values.iter().enumerate() {
            spread[index * stride] = value;
        }
        spread
    }
}

/// The device side of a batch.
struct Arrays {
    choices: DeviceBuffer<u32>,
    logits: DeviceBuffer<f32>,
    normaliser: DeviceBuffer<f32>,
    tokens: DeviceBuffer<u32>,
    parents: DeviceBuffer<u32>,
    roots: DeviceBuffer<u32>,
    committed: DeviceBuffer<u32>,
    tables: DeviceBuffer<u32>,
    out: AcceptanceBuffers,
}

impl Arrays {
    fn new(device: &Arc<Device>, batch: &Batch) -> Self {
        let upload = |values: &[u32]| DeviceBuffer::from_slice(device, values).unwrap();
        let floats = |values: &[f32]| DeviceBuffer::from_slice(device, values).unwrap();
        let (mut tokens, mut parents) = (Vec::new(), Vec::new());
        for tree in &batch.trees {
            for node in 0..batch.rows {
                let tree = tree.as_ref().filter(|tree| node < tree.len());
                tokens.push(tree.map_or(0, |tree| tree.tokens()[node]));
                let parent = tree.and_then(|tree| tree.parent(node));
                parents.push(parent.map_or(NONE, |parent| parent as u32));
            }
        }
        let roots: Vec<u32> = batch
            .trees
            .iter()
            .map(|tree| tree.as_ref().map_or(NONE, |tree| tree.tokens()[0]))
            .collect();
        let normaliser: Vec<f32> = batch.logits.iter().map(|logit| logit + 1.0).collect();
        let out = AcceptanceBuffers::new(device, batch.trees.len()).unwrap();
        out.paths.fill_bytes(0xAB).unwrap();
        out.counts.fill_bytes(0xAB).unwrap();
        out.committed_before.fill_bytes(0xAB).unwrap();
        Self {
            choices: upload(&Batch::spread(&batch.choices, STRIDES.0, NONE)),
            logits: floats(&Batch::spread(&batch.logits, STRIDES.1, f32::NAN)),
            normaliser: floats(&normaliser),
            tokens: upload(&tokens),
            parents: upload(&parents),
            roots: upload(&roots),
            committed: upload(&batch.committed),
            tables: upload(&(0..batch.trees.len() as u32 * 4).collect::<Vec<_>>()),
            out,
        }
    }

    fn choices(&self) -> TargetChoices {
        TargetChoices {
            tokens: self.choices.ptr(),
            stride: STRIDES.0,
            logits: self.logits.ptr(),
            logit_stride: STRIDES.1,
            normaliser: self.normaliser.ptr(),
        }
    }

    fn state(&self) -> BatchState {
        BatchState {
            roots: self.roots.ptr(),
            committed: self.committed.ptr(),
            max_depths: DevicePtr::NULL,
            tables: self.tables.ptr(),
            table_stride: 4,
        }
    }

    fn accept(&self, device: &Arc<Device>, batch: &Batch) {
        let rows = VerifiedRows {
            rows: batch.rows,
            tokens: self.tokens.ptr(),
            parents: self.parents.ptr(),
        };
        AcceptanceKernels::load(device)
            .unwrap()
            .accept(
                batch.trees.len(),
                self.choices(),
                rows,
                self.state(),
                &self.out,
            )
            .unwrap();
        device.synchronize().unwrap();
    }
}

#[test]
fn walks_equal_the_reference() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut random = StdRng::seed_from_u64(1);
    for rows in [1, 2, 16, 31, 32, 33, 64, 65, 128, 256] {
        let batch = Batch::new(13, rows, &mut random);
        let arrays = Arrays::new(&device, &batch);
        arrays.accept(&device, &batch);
        let counts = arrays.out.counts.read().unwrap();
        let paths = arrays.out.paths.read().unwrap();
        let roots = arrays.roots.read().unwrap();
        let committed = arrays.committed.read().unwrap();
        assert_eq!(arrays.out.committed_before.read().unwrap(), batch.committed);
        for (s, tree) in batch.trees.iter().enumerate() {
            let Some(tree) = tree else {
                assert_eq!((counts[s], roots[s]), (0, NONE));
                assert_eq!(committed[s], batch.committed[s]);
                assert_eq!(arrays.out.poll(s, 1), None);
                continue;
            };
            let mut expected = walk(tree, |node| batch.choices[s * rows + node]);
            if expected.path.len() > MOST_PATH {
                // The walk stops where the path is full; the child that comes next is the bonus token.
                expected.bonus = tree.tokens()[expected.path[MOST_PATH]];
                expected.path.truncate(MOST_PATH);
            }
            let count = expected.path.len();
            let what = format!("{rows} rows, sequence {s}");
            assert_eq!(counts[s] as usize, count, "{what}");
            assert_eq!(committed[s], batch.committed[s] + counts[s], "{what}");
            assert_eq!(roots[s], expected.bonus, "{what}");
            let path: Vec<usize> = paths[s * MOST_PATH..][..count]
                .iter()
                .map(|&node| node as usize)
                .collect();
            assert_eq!(path, expected.path, "{what}");
            let outcome = arrays.out.poll(s, 1).unwrap();
            assert_eq!(
                (outcome.step, outcome.committed_before),
                (1, batch.committed[s])
            );
            let walked = outcome.walked.unwrap();
            assert_eq!((walked.path, walked.bonus), (expected.path, expected.bonus));
            for (index, &node) in path.iter().enumerate() {
                let row = s * rows + node;
                assert_eq!(walked.tokens[index], tree.tokens()[node], "{what}");
                assert_eq!(walked.logits[index], batch.logits[row], "{what}");
                assert_eq!(walked.normalisers[index], batch.logits[row] + 1.0, "{what}");
            }
        }
    }
}

#[test]
fn logits_without_a_number_commit_nothing() {
    let Some(device) = crate::device() else {
        return;
    };
    let chain = TokenTree::from_parents(&[5, 6, 7], &[-1, 0, 1]).unwrap();
    let mut batch = Batch {
        rows: 4,
        trees: vec![Some(chain.clone()), Some(chain.clone()), Some(chain)],
        choices: [6, 7, NONE, 1].repeat(3),
        logits: vec![1.0; 12],
        committed: vec![3, 4, 5],
    };
    // A broken row beside the path does not matter, one on it does, and a logit counts as well as a choice.
    batch.choices[4..8].copy_from_slice(&[6, 9, NONE, NONE]);
    batch.choices[8..12].copy_from_slice(&[6, 7, 8, 1]);
    batch.logits[9] = f32::INFINITY;
    let arrays = Arrays::new(&device, &batch);
    arrays.accept(&device, &batch);
    assert_eq!(arrays.out.counts.read().unwrap(), [0, 2, 0]);
    assert_eq!(arrays.committed.read().unwrap(), [3, 6, 5]);
    assert_eq!(arrays.roots.read().unwrap(), [5, 9, 5]);
    assert_eq!(arrays.out.poll(0, 1).unwrap().walked, Err(2));
    assert_eq!(arrays.out.poll(1, 1).unwrap().walked.unwrap().bonus, 9);
    assert_eq!(arrays.out.poll(2, 1).unwrap().walked, Err(1));
}

#[test]
fn steps_are_numbered_and_two_are_kept() {
    let Some(device) = crate::device() else {
        return;
    };
    let batch = Batch {
        rows: 1,
        trees: vec![Some(TokenTree::root_only(5))],
        choices: vec![6],
        logits: vec![1.0],
        committed: vec![0],
    };
    let arrays = Arrays::new(&device, &batch);
    for step in 1..=3 {
        assert_eq!(arrays.out.poll(0, step), None);
        arrays.accept(&device, &batch);
        assert_eq!(arrays.out.poll(0, step).unwrap().committed_before, step - 1);
    }
    assert_eq!(arrays.out.poll(0, 1), None);
    assert!(arrays.out.poll(0, 2).is_some());
}

#[test]
fn plain_decoding_advances() {
    let Some(device) = crate::device() else {
        return;
    };
    let batch = Batch {
        rows: 1,
        trees: vec![
            Some(TokenTree::root_only(5)),
            None,
            Some(TokenTree::root_only(7)),
        ],
        choices: vec![6, 8, NONE],
        logits: vec![1.0; 3],
        committed: vec![15, 0, 63],
    };
    let arrays = Arrays::new(&device, &batch);
    let buffers: [DeviceBuffer<u32>; 5] = std::array::from_fn(|_| {
        let buffer = DeviceBuffer::uninit(&device, 3).unwrap();
        buffer.fill_bytes(0xAB).unwrap();
        buffer
    });
    let [tokens, positions, kv_slot, vis_begin, vis_end] = &buffers;
    let rows = RootRows {
        tokens: tokens.ptr(),
        positions: positions.ptr(),
        kv_slot: kv_slot.ptr(),
        vis_begin: vis_begin.ptr(),
        vis_end: vis_end.ptr(),
    };
    let kernels = AcceptanceKernels::load(&device).unwrap();
    let read = || buffers.each_ref().map(|buffer| buffer.read().unwrap());

    kernels
        .advance(3, None, arrays.state(), rows, &arrays.out)
        .unwrap();
    assert_eq!(
        read(),
        [
            vec![5, 0, 7],
            vec![15, 0, 63],
            // Tables are 0..4, 4..8, 8..12.
            vec![15, NONE, 11 * 16 + 15],
            vec![0, 0, 0],
            vec![16, 0, 64],
        ]
    );
    assert_eq!(arrays.roots.read().unwrap(), [5, NONE, 7]);

    kernels
        .advance(3, Some(arrays.choices()), arrays.state(), rows, &arrays.out)
        .unwrap();
    // The last sequence is at fault and stays; the first fills its next block.
    assert_eq!(
        read(),
        [
            vec![6, 0, 7],
            vec![16, 0, 63],
            vec![16, NONE, 11 * 16 + 15],
            vec![0, 0, 0],
            vec![17, 0, 64],
        ]
    );
    assert_eq!(arrays.committed.read().unwrap(), [16, 0, 63]);
    assert_eq!(arrays.out.counts.read().unwrap(), [1, 0, 0]);
    let first = arrays.out.poll(0, 1).unwrap();
    let walked = first.walked.unwrap();
    assert_eq!(
        (walked.path, walked.tokens, walked.bonus),
        (vec![0], vec![5], 6)
    );
    assert_eq!(arrays.out.poll(1, 1), None);
    assert_eq!(arrays.out.poll(2, 1).unwrap().walked, Err(0));
}
