//! What transformers, z-lab/dflash and ddtree give for a case.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::TOLERANCE;
use crate::tokenizer::TokenizerCases;

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
    /// Absent where the case is about weights only.
    #[serde(default)]
    pub tokenizer_cases: TokenizerCases,
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
    /// The target's greedy tokens after the prompt: `48 + block_size + 1`.
    pub greedy_continuation: Vec<u32>,
    /// Rounds by mode: `chain`, `ddtree_8`, ...
    pub runs: BTreeMap<String, Run>,
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
    pub trees: BTreeMap<String, DraftTree>,
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
