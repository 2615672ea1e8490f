//! Attention against its definition in f64, and the rule that a row's bits depend on its own path alone.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

pub(crate) mod scene;

use half::bf16;
use treespec_cuda::AttentionPlan;

use scene::{Model, Noise, Row, Scene, See, Sequence};

/// SmolLM2, a slice of Qwen3-8B, and shapes whose heads do not fill a block of 32, or a tile.
const SHAPES: [(usize, usize, usize); 6] = [
    (9, 3, 64),
    (8, 2, 128),
    (4, 2, 16),
    (3, 1, 40),
    (6, 2, 96),
    (2, 2, 32),
];

/// Rows per sequence whose definition is computed.
const CHECKED_ROWS: usize = 6;

fn compare(
    sequence: &Sequence,
    shape: treespec_cuda::AttentionShape,
    row: usize,
    bits: &[u16],
    what: &str,
) -> f64 {
    let exact = sequence.exact(shape, row);
    let got: Vec<f64> = bits
        .iter()
        .map(|&b| f64::from(bf16::from_bits(b)))
        .collect();
    let norm: f64 = exact.iter().map(|x| x * x).sum::<f64>().sqrt();
    let error: f64 = exact
        .iter()
        .zip(&got)
        .map(|(a, b)| (a - b).powi(2))
        .sum::<f64>()
        .sqrt();
    let bad = exact
        .iter()
        .zip(&got)
        .position(|(a, b)| b.is_nan() || (a - b).abs() > 0.03 + a.abs() / 100.0);
    if let Some(k) = bad {
        panic!(
            "{what} row {row}: element {k} is {} and should be {}",
            got[k], exact[k]
        );
    }
    let relative = error / norm.max(1e-9);
    assert!(
        relative < 1e-2,
        "{what} row {row}: relative error {relative}"
    );
    relative
}

#[test]
fn equals_the_definition() {
    let Some(device) = crate::device() else {
        return;
    };
    for (index, &(heads, kv_heads, head_dim)) in SHAPES.iter().enumerate() {
        let model = Model::new(&device, heads, kv_heads, head_dim);
        let mut noise = Noise::new(index as u64);
        let mut worst: f64 = 0.0;
        for context in [
            0, 1, 15, 16, 17, 48, 63, 64, 65, 127, 128, 200, 511, 1_023, 1_025, 3_000,
        ] {
            if context > 1_024 && index > 1 {
                continue;
            }
            let mut window = Sequence::chain(&model, &mut noise, context, 16);
            for row in 0..16 {
                // A drafter's block: not causal, and here with a window of 100.
                window.rows[row].see =
                    See::Range((context + row + 1).saturating_sub(100)..context + 16);
            }
            let sequences = [
                Sequence::chain(&model, &mut noise, context, 3),
                Sequence::tree(&model, &mut noise, context, 1 + context % 64, 20),
                window,
                Sequence::tree(&model, &mut noise, context / 2, 40, 63),
            ];
            let mut scene = Scene::new(&model, &sequences, &mut noise);
            let rows = scene
                .run(None, 1 + context % model.most_tile_rows())
                .unwrap();
            let mut first = 0;
            for (at, sequence) in sequences.iter().enumerate() {
                let count = sequence.rows.len();
                for row in (0..count).rev().step_by(count.div_ceil(CHECKED_ROWS)) {
                    let what = format!("{SHAPES:?}[{index}] context {context} sequence {at}");
                    worst = worst.max(compare(
                        sequence,
                        model.shape,
                        row,
                        &rows[first + row],
                        &what,
                    ));
                }
                first += count;
            }
        }
        eprintln!("attention {heads}/{kv_heads}/{head_dim}: worst relative error {worst:.2e}");
    }
}

#[test]
fn every_plan_gives_the_same_bits() {
    let Some(device) = crate::device() else {
        return;
    };
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (8, 2, 128), (3, 1, 40)] {
        let model = Model::new(&device, heads, kv_heads, head_dim);
        let mut noise = Noise::new(head_dim as u64);
        let sequences = [
            Sequence::tree(&model, &mut noise, 700, 33, 15),
            Sequence::chain(&model, &mut noise, 1_300, 2),
            Sequence::chain(&model, &mut noise, 0, 70),
            Sequence::tree(&model, &mut noise, 61, 17, 15),
        ];
        let mut scene = Scene::new(&model, &sequences, &mut noise);
        let expected = scene.run(None, model.most_tile_rows()).unwrap();
        for plan in AttentionPlan::candidates() {
            for tile_rows in 1..=model.most_tile_rows() {
                let Some(got) = scene.run(Some(plan), tile_rows) else {
                    eprintln!("{plan:?} does not fit this device");
                    continue;
                };
                let wrong = (0..got.len()).find(|&row| got[row] != expected[row]);
                assert_eq!(
                    wrong, None,
                    "first row that differs, {plan:?} tiles of {tile_rows}"
                );
            }
        }
    }
}

/// The path `tokens` with the last row asking `query`, as some part of a batch; returns the index of its last row.
fn place(
    model: &Model,
    noise: &mut Noise,
    tokens: &[scene::Token],
    query: &[bf16],
    batch: usize,
    tree: bool,
) -> (Sequence, usize) {
    let length = tokens.len();
    let other = |noise: &mut Noise| Row {
        query: noise.query(model),
        token: noise.token(model),
        see: See::Range(0..1),
    };
    // How much of the path is among the new rows.
    let new = 1 + noise.below(length.min(batch).min(64));
    let committed = length - new;
    let mut rows: Vec<Row> = (0..batch).map(|_| other(noise)).collect();
    let mut nodes: Vec<usize> = (0..new).collect();
    if tree {
        // The path's nodes are any, in order, behind the root.
        while nodes.len() < batch && noise.below(8) > 0 {
            let free: Vec<usize> = (1..batch).filter(|n| !nodes.contains(n)).collect();
            let Some(&next) = free.get(noise.below(free.len().max(1))) else {
                break;
            };
            let out = noise.below(nodes.len().max(2) - 1) + 1;
            if out < nodes.len() {
                nodes[out] = next;
                nodes.sort_unstable();
            }
        }
        let mut paths: Vec<Vec<u16>> = Vec::new();
        for (node, row) in rows.iter_mut().enumerate() {
            let mut path = match nodes.iter().position(|&n| n == node) {
                Some(0) => Vec::new(),
                Some(depth) => paths[nodes[depth - 1]].clone(),
                None => loop {
                    let parent = noise.below(node);
                    if paths[parent].len() < 64 {
                        break paths[parent].clone();
                    }
                },
            };
            path.push(node as u16);
            row.see = See::Path(path.clone());
            paths.push(path);
        }
    } else {
        for (row, see) in rows.iter_mut().zip(committed + 1..) {
            row.see = See::Range(0..see);
        }
    }
    for (depth, &node) in nodes.iter().enumerate() {
        rows[node].token = tokens[committed + depth].clone();
    }
    let last = nodes[new - 1];
    rows[last].query = query.to_vec();
    let committed = tokens[..committed].to_vec();
    (Sequence { committed, rows }, last)
}

#[test]
fn a_path_has_the_same_bits_everywhere() {
    let Some(device) = crate::device() else {
        return;
    };
    let plans: Vec<AttentionPlan> = AttentionPlan::candidates().collect();
    for (index, &(heads, kv_heads, head_dim)) in SHAPES.iter().enumerate() {
        let model = Model::new(&device, heads, kv_heads, head_dim);
        let mut noise = Noise::new(100 + index as u64);
        for length in [
            1, 2, 16, 17, 63, 64, 65, 66, 100, 128, 129, 300, 1_025, 2_100,
        ] {
            if length > 1_024 && index > 1 {
                continue;
            }
            let tokens = noise.tokens(&model, length);
            let query = noise.query(&model);
            let alone = Sequence {
                committed: tokens[..length - 1].to_vec(),
                rows: vec![Row {
                    query: query.clone(),
                    token: tokens[length - 1].clone(),
                    see: See::Range(0..length),
                }],
            };
            let expected = Scene::new(&model, std::slice::from_ref(&alone), &mut noise)
                .run(None, 1)
                .unwrap()
                .remove(0);
            compare(&alone, model.shape, 0, &expected, "alone");
            for (batch, tree) in [
                (1, true),
                (2, false),
                (5, false),
                (17, false),
                (65, false),
                (2, true),
                (17, true),
                (33, true),
                (64, true),
                (64, true),
            ] {
                let (own, last) = place(&model, &mut noise, &tokens, &query, batch, tree);
                let mut sequences = vec![own];
                let mut first = 0;
                if noise.below(2) == 0 {
                    let context = noise.below(400);
                    let other = Sequence::tree(&model, &mut noise, context, 9, 6);
                    first = other.rows.len();
                    sequences.insert(0, other);
                    let context = noise.below(90);
                    sequences.push(Sequence::chain(&model, &mut noise, context, 4));
                }
                let mut scene = Scene::new(&model, &sequences, &mut noise);
                let plan = plans[noise.below(plans.len())];
                let tile_rows = 1 + noise.below(model.most_tile_rows());
                let plan = (noise.below(3) > 0).then_some(plan);
                let Some(got) = scene.run(plan, tile_rows) else {
                    continue;
                };
                let wrong = (0..expected.len()).find(|&k| got[first + last][k] != expected[k]);
                assert_eq!(
                    wrong, None,
                    "first element that differs: {:?} length {length} batch {batch} tree {tree} {plan:?} tiles of {tile_rows}",
                    model.shape
                );
            }
        }
    }
}

#[test]
fn a_row_that_sees_nothing_is_zero() {
    let Some(device) = crate::device() else {
        return;
    };
    let model = Model::new(&device, 9, 3, 64);
    let mut noise = Noise::new(9);
    let mut sequence = Sequence::chain(&model, &mut noise, 40, 3);
    sequence.rows[1].see = See::Range(7..7);
    let sequences = [sequence];
    let mut scene = Scene::new(&model, &sequences, &mut noise);
    for plan in AttentionPlan::candidates() {
        let rows = scene.run(Some(plan), 3).unwrap();
        assert!(rows[1].iter().all(|&bits| bits == 0), "{plan:?}");
        assert!(rows[0].iter().any(|&bits| bits != 0), "{plan:?}");
    }
}
