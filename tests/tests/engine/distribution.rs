//! The token behind the root of a tree has the distribution that its parameters ask for, whatever the tree proposes.

use treespec_checkpoint::TargetCheckpoint;
use treespec_engine::{Backend, CpuOptions, HeadRequest, RowChoices, StepBatch, TreeRows};
use treespec_sampling::{LogitBias, SamplingParams, TokenCounts, TokenMask, TokenRules};
use treespec_tests::{DENSE_CASES, case_path};
use treespec_tree::TokenTree;

use crate::harness::Target;

const DRAWS: u64 = 20_000;
/// Cells of fewer expected draws are counted together.
const LEAST_EXPECTED: f64 = 5.0;

/// A scene: what is known before the draw.
struct Scene {
    rules: TokenRules,
    grammar: Option<TokenMask>,
}

/// Rules under a name.
type Case = (&'static str, fn(&mut Scene));

const CASES: [Case; 7] = [
    ("temperature alone", |_| {}),
    ("top-k", |scene| scene.rules.params.top_k = Some(9)),
    ("top-p", |scene| scene.rules.params.top_p = 0.8),
    ("min-p", |scene| scene.rules.params.min_p = 0.1),
    ("bias and bans", |scene| {
        scene.rules.bias = LogitBias::new([(7, 3.0), (200, 1.5)]).unwrap();
        scene.rules.banned = vec![8, 9, 10, 300];
    }),
    ("penalties", |scene| {
        scene.rules.params.repetition_penalty = 1.4;
        scene.rules.params.presence_penalty = 0.7;
        scene.rules.params.frequency_penalty = -0.3;
        scene.rules.counts = TokenCounts::from_prompt(&PROMPT);
    }),
    ("grammar", |scene| {
        scene.grammar = Some(TokenMask::from_tokens(600, (0..600).step_by(3)));
    }),
];

const PROMPT: [u32; 6] = [12, 7, 99, 7, 31, 45];

/// Probabilities of all tokens, computed in f64 and without the code under test.
fn probabilities(logits: &[f32], scene: &Scene) -> Vec<f64> {
    let params = &scene.rules.params;
    let mut scores: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for &(token, bias) in scene.rules.bias.entries() {
        scores[token as usize] += f64::from(bias);
    }
    for &token in &scene.rules.banned {
        scores[token as usize] = f64::NEG_INFINITY;
    }
    if scene.rules.counts_tokens() {
        // The prompt, and the root as the first token of the answer.
        let root = PROMPT[5] as usize;
        for (token, score) in scores.iter_mut().enumerate() {
            let in_prompt = PROMPT.contains(&(token as u32));
            if !in_prompt && token != root {
                continue;
            }
            let penalty = f64::from(params.repetition_penalty);
            *score = if *score > 0.0 {
                *score / penalty
            } else {
                *score * penalty
            };
            if token == root {
                *score -= f64::from(params.frequency_penalty) + f64::from(params.presence_penalty);
            }
        }
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let best = scores[order[0]];
    let weight = |token: usize| ((scores[token] - best) / f64::from(params.temperature)).exp();
    let kept = order.len().min(params.top_k.unwrap_or(u32::MAX) as usize);
    let total: f64 = order[..kept].iter().map(|&token| weight(token)).sum();
    let mut nucleus = 0.0;
    let mut probabilities = vec![0.0; scores.len()];
    for &token in &order[..kept] {
        if nucleus >= f64::from(params.top_p) * total || weight(token) < f64::from(params.min_p) {
            break;
        }
        nucleus += weight(token);
        probabilities[token] = weight(token);
    }
    if let Some(grammar) = &scene.grammar {
        for (token, probability) in probabilities.iter_mut().enumerate() {
            if !grammar.contains(token as u32) {
                *probability = 0.0;
            }
        }
    }
    let total: f64 = probabilities.iter().sum();
    probabilities.iter().map(|p| p / total).collect()
}

/// The value that a chi-square statistic exceeds once in a thousand times (Wilson and Hilferty's approximation).
fn critical(freedom: f64) -> f64 {
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + 3.0902 * spread.sqrt()).powi(3)
}

fn chi_square(counts: &[u64], probabilities: &[f64]) -> (f64, f64) {
    let (mut statistic, mut cells) = (0.0, 0.0);
    let mut rest = (0.0, 0.0);
    let mut add = |count: f64, expected: f64| {
        statistic += (count - expected).powi(2) / expected;
        cells += 1.0;
    };
    for (&count, p) in counts.iter().zip(probabilities) {
        let (count, expected) = (count as f64, p * DRAWS as f64);
        if expected >= LEAST_EXPECTED {
            add(count, expected);
        } else {
            assert!(*p > 0.0 || count == 0.0, "an impossible token was drawn");
            rest = (rest.0 + count, rest.1 + expected);
        }
    }
    if rest.1 > 0.5 {
        add(rest.0, rest.1);
    }
    (statistic, cells - 1.0)
}

fn check(temperature: f32) {
    let checkpoint = TargetCheckpoint::open(&case_path(DENSE_CASES[0], "model")).unwrap();
    let mut target = Target::open(&checkpoint, None, CpuOptions::f32(1));
    let table = target.table(PROMPT.len() + 32);
    let committed = PROMPT.len() - 1;
    target.rows(
        &table,
        0,
        &PROMPT[..committed],
        treespec_engine::RowShape::Chain,
    );
    let vocabulary = target.backend.spec().vocab_size;
    let root = TokenTree::root_only(PROMPT[committed]);
    let everything = HeadRequest {
        top_k: vocabulary,
        ..HeadRequest::ARGMAX
    };
    let dense = step(&mut target, &table, &root, None, everything)
        .head
        .remove(0);
    let mut logits = vec![0.0; vocabulary];
    for scored in &dense.top {
        logits[scored.token as usize] = scored.score;
    }
    // A draft of a likely and of an unlikely token.
    let mut tree = root;
    for rank in [0, 30] {
        tree.push(0, dense.top[rank].token, 0.0).unwrap();
    }
    for (name, prepare) in CASES {
        let mut scene = Scene {
            rules: TokenRules::new(SamplingParams {
                temperature,
                ..SamplingParams::default()
            }),
            grammar: None,
        };
        prepare(&mut scene);
        let expected = probabilities(&logits, &scene);
        let grammar = scene.grammar.clone();
        let masks = grammar.map_or(Vec::new(), |mask| vec![mask; tree.len()]);
        let mut counts = vec![0; vocabulary];
        for seed in 0..DRAWS {
            scene.rules.params.seed = Some(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let choices = RowChoices {
                processors: scene.rules.processors(),
                grammar: &masks,
                counted_rows: 0,
            };
            let verified = step(
                &mut target,
                &table,
                &tree,
                Some(choices),
                HeadRequest::ARGMAX,
            );
            let acceptance = verified.acceptance;
            let token = match acceptance.path.get(1) {
                Some(&child) => tree.tokens()[child],
                None => acceptance.bonus,
            };
            counts[token as usize] += 1;
        }
        let (statistic, freedom) = chi_square(&counts, &expected);
        let limit = critical(freedom);
        // Where one token is left, it is always chosen.
        let right = if freedom < 1.0 {
            statistic == 0.0
        } else {
            statistic < limit
        };
        let what = format!("{name} at {temperature}: {statistic:.1} of {limit:.1}");
        assert!(right, "{what} with {freedom} degrees of freedom");
    }
}

fn step(
    target: &mut Target,
    table: &treespec_engine::BlockTable,
    tree: &TokenTree,
    sampling: Option<RowChoices<'_>>,
    head: HeadRequest,
) -> treespec_engine::VerifiedTree {
    let trees = vec![TreeRows {
        table,
        committed: PROMPT.len() - 1,
        tree,
        head,
        sampling,
        features: false,
    }];
    let rows = Vec::new();
    let batch = StepBatch { rows, trees };
    target.backend.step(&batch).unwrap().trees.remove(0)
}

#[test]
fn at_0_3() {
    check(0.3);
}

#[test]
fn at_0_7() {
    check(0.7);
}

#[test]
fn at_1() {
    check(1.0);
}

#[test]
fn at_1_5() {
    check(1.5);
}
