//! Trees, chains and acceptance of the recorded reference runs (tests/fixtures/README.md), built here from the
//! recorded per-slot log-probabilities.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::PathBuf;

use serde_json::Value;
use treespec_tree::{Candidate, DepthCandidates, TokenTree, best_first, chain, walk};

/// Cumulative log-probabilities are recorded with eight significant digits.
const TOLERANCE: f64 = 1e-5;

fn load(case: &str, file: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/cases")
        .join(case)
        .join(file);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

fn list<T>(value: &Value, item: impl Fn(&Value) -> Option<T>) -> Vec<T> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| item(entry).unwrap())
        .collect()
}

fn token(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn index(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

fn depth_candidates(slots: &Value) -> DepthCandidates {
    DepthCandidates(list(slots, |slot| {
        let tokens = list(&slot["ids"], token);
        let log_probs = list(&slot["logprobs"], Value::as_f64);
        Some(
            tokens
                .into_iter()
                .zip(log_probs)
                .map(|(token, log_prob)| Candidate {
                    token,
                    log_prob: log_prob as f32,
                })
                .collect(),
        )
    }))
}

/// What greedy decoding of the target emits after the path to `node`; `None` off the greedy path.
fn greedy_after(tree: &TokenTree, continuation: &[u32], root: usize, node: usize) -> Option<u32> {
    let path = tree.path(node);
    let on_greedy_path = path
        .iter()
        .enumerate()
        .all(|(depth, &at)| continuation[root + depth] == tree.tokens()[at]);
    on_greedy_path.then(|| continuation[root + path.len()])
}

fn check_tree(position: &Value, budget: &str, continuation: &[u32], root: usize) {
    let expected = &position["trees"][budget];
    let root_token = token(&position["root_token"]).unwrap();
    let tree = best_first(
        root_token,
        &depth_candidates(&position["slots"]),
        budget.parse().unwrap(),
    );

    let parents: Vec<i64> = (0..tree.len())
        .map(|node| tree.parent(node).map_or(-1, |parent| parent as i64))
        .collect();
    assert_eq!(tree.tokens(), list(&expected["tokens"], token));
    assert_eq!(parents, list(&expected["parents"], Value::as_i64));
    assert_eq!(tree.depths(), list(&expected["depths"], token));
    let log_probs = list(&expected["cum_logprobs"], Value::as_f64);
    assert_eq!(tree.log_probs().len(), log_probs.len());
    for (ours, reference) in tree.log_probs().iter().zip(log_probs) {
        assert!((ours - reference).abs() < TOLERANCE, "{ours} {reference}");
    }

    let acceptance = walk(&tree, |node| {
        greedy_after(&tree, continuation, root, node).expect("the walk stays on the greedy path")
    });
    assert_eq!(
        acceptance.path[1..],
        list(&expected["accepted_nodes"], index)
    );
    assert_eq!(acceptance.accepted(), index(&expected["accepted"]).unwrap());
    assert_eq!(acceptance.bonus, token(&expected["next_token"]).unwrap());
}

fn check_chain(position: &Value, continuation: &[u32], root: usize) {
    let root_token = token(&position["root_token"]).unwrap();
    let tree = chain(root_token, &depth_candidates(&position["slots"]));
    assert!(tree.is_chain());
    assert_eq!(tree.tokens()[1..], list(&position["chain_tokens"], token));
    let acceptance = walk(&tree, |node| {
        greedy_after(&tree, continuation, root, node).expect("the walk stays on the greedy path")
    });
    assert_eq!(
        acceptance.accepted(),
        index(&position["chain_accepted"]).unwrap()
    );
}

fn check_file(case: &str, file: &str) {
    let reference = load(case, file);
    let prompt_len = reference["prompt"].as_array().unwrap().len();
    let continuation = list(&reference["greedy_continuation"], token);
    let positions = reference["positions"].as_array().unwrap();
    assert!(!positions.is_empty());
    for position in positions {
        let root = index(&position["start"]).unwrap() - prompt_len;
        for budget in ["8", "16", "33"] {
            check_tree(position, budget, &continuation, root);
        }
        check_chain(position, &continuation, root);
    }
}

#[test]
fn llama_random_drafter() {
    check_file("01_llama_gqa_tied", "drafter_expected.json");
}

#[test]
fn llama_fitted_drafter() {
    check_file("01_llama_gqa_tied", "drafter_fit_expected.json");
    check_file("01_llama_gqa_tied", "drafter_fit_expected_2.json");
}

#[test]
fn qwen3_random_drafter() {
    check_file("03_qwen3_headdim", "drafter_expected.json");
}

#[test]
fn qwen3_fitted_drafter() {
    check_file("03_qwen3_headdim", "drafter_fit_expected.json");
    check_file("03_qwen3_headdim", "drafter_fit_expected_2.json");
}
