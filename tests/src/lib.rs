//! Reference cases of `tests/fixtures` (see the README there), read once and typed.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Cases whose architecture this build runs.
pub const DENSE_CASES: [&str; 2] = ["01_llama_gqa_tied", "03_qwen3_headdim"];

/// Largest difference of a log-probability to the f32 reference.
pub const TOLERANCE: f32 = 1e-3;

/// A path below `tests/fixtures`.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(path)
}

/// A path below `tests/fixtures/cases/<case>`.
pub fn case_path(case: &str, file: &str) -> PathBuf {
    fixture("cases").join(case).join(file)
}

/// A JSON file of a case.
///
/// # Panics
/// When it is missing or has another form.
pub fn case_json<T: DeserializeOwned>(case: &str, file: &str) -> T {
    read_json(&case_path(case, file))
}

/// Any JSON file.
///
/// # Panics
/// When it is missing or has another form.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> T {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Best tokens of one distribution, natural log-probabilities.
#[derive(Debug, Clone, Deserialize)]
pub struct TopTokens {
    /// Token ids, best first.
    pub ids: Vec<u32>,
    /// One per id.
    pub logprobs: Vec<f32>,
}

impl TopTokens {
    /// Asserts that `got` gives every token here the same log-probability, as a map: neighbours may swap ranks.
    ///
    /// # Panics
    /// When it does not.
    pub fn assert_close(&self, got: &[(u32, f32)], what: &str) {
        for (id, expected) in self.ids.iter().zip(&self.logprobs) {
            // A token that only just fell out of a list of equal length must be near its end.
            let last = got.last().map_or(f32::NEG_INFINITY, |last| last.1);
            let value = got.iter().find(|(g, _)| g == id).map_or(last, |g| g.1);
            assert!(
                (value - expected).abs() <= TOLERANCE,
                "{what}: token {id} has {value}, expected {expected}"
            );
        }
        assert_eq!(got[0].0, self.ids[0], "{what}: best token");
    }
}

/// `expected.json`
#[derive(Debug, Deserialize)]
pub struct Expected {
    /// Prompts with their greedy continuation.
    pub prompts: Vec<ExpectedPrompt>,
}

/// One prompt of `expected.json`.
#[derive(Debug, Deserialize)]
pub struct ExpectedPrompt {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// 48 greedy tokens.
    pub greedy: Vec<u32>,
    /// The distribution that produced each.
    pub top5: Vec<TopTokens>,
    /// `None` first.
    pub prompt_logprobs: Vec<Option<f32>>,
}

/// `tree_forward.json`
#[derive(Debug, Deserialize)]
pub struct TreeForward {
    /// Committed tokens.
    pub prompt: Vec<u32>,
    /// Node 0 is the root.
    pub tokens: Vec<u32>,
    /// -1 for the root.
    pub parents: Vec<i32>,
    /// Distribution after each node.
    pub nodes: Vec<TopTokens>,
}

/// `drafter*_expected*.json`
#[derive(Debug, Deserialize)]
pub struct DrafterExpected {
    /// Where the drafter came from.
    pub meta: DrafterMeta,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// The target's greedy tokens after the prompt.
    pub greedy_continuation: Vec<u32>,
    /// Rounds by mode: `chain`, `ddtree_8`, ...
    pub runs: std::collections::BTreeMap<String, Run>,
    /// Drafts at some starts.
    pub positions: Vec<DraftPosition>,
}

/// Which drafter a file is about.
#[derive(Debug, Deserialize)]
pub struct DrafterMeta {
    /// Folder below the case.
    pub drafter: String,
}

/// A whole generation.
#[derive(Debug, Deserialize)]
pub struct Run {
    /// In order.
    pub rounds: Vec<Round>,
}

/// One verified draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Round {
    /// Committed length before the round.
    pub start: usize,
    /// Drafted tokens accepted.
    pub accepted: u32,
}

/// The draft of one block.
#[derive(Debug, Deserialize)]
pub struct DraftPosition {
    /// Committed length.
    pub start: usize,
    /// Decided token at `start`.
    pub root_token: u32,
    /// Top 40 of each slot.
    pub slots: Vec<TopTokens>,
    /// Argmax of each slot.
    pub chain_tokens: Vec<u32>,
    /// Trees by budget.
    pub trees: std::collections::BTreeMap<String, DraftTree>,
}

/// A best-first tree in pop order.
#[derive(Debug, Deserialize)]
pub struct DraftTree {
    /// Node 0 is the root.
    pub tokens: Vec<u32>,
    /// -1 for the root.
    pub parents: Vec<i32>,
    /// Cumulative log-probability.
    pub cum_logprobs: Vec<f64>,
    /// Accepted nodes below the root.
    pub accepted_nodes: Vec<usize>,
    /// Bonus token.
    pub next_token: u32,
}
