//! The reference answers that `bench parity` and `bench engine` compare with.

use std::{collections::HashMap, fs, path::Path};

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::{answer::Answer, mode::Mode};

/// What is compared with a reference answer, wherever it was generated.
#[derive(Debug, Clone, Copy)]
pub(super) struct Generated<'a> {
    /// Length of the prompt.
    pub(super) prompt_tokens: u32,
    /// The answer.
    pub(super) token_ids: &'a [u32],
    /// Accepted counts.
    pub(super) rounds: &'a [u32],
}

impl<'a> From<&'a Answer> for Generated<'a> {
    fn from(answer: &'a Answer) -> Self {
        Self {
            prompt_tokens: answer.usage.prompt_tokens,
            token_ids: &answer.token_ids,
            rounds: &answer.stats.rounds,
        }
    }
}

/// The first place where a list differs from the reference's; a missing value is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Difference {
    /// Index, counted from 0.
    pub(super) position: usize,
    /// What there is.
    pub(super) got: Option<u32>,
    /// What the reference has.
    pub(super) expected: Option<u32>,
}

impl Difference {
    /// `None` when the lists are equal.
    fn first(got: &[u32], expected: &[u32]) -> Option<Self> {
        (0..got.len().max(expected.len()))
            .map(|position| Self {
                position,
                got: got.get(position).copied(),
                expected: expected.get(position).copied(),
            })
            .find(|difference| difference.got != difference.expected)
    }

    /// Both values in words.
    pub(super) fn values(&self) -> String {
        let shown = |value: Option<u32>| value.map_or("nothing".to_owned(), |id| id.to_string());
        format!("{}, expected {}", shown(self.got), shown(self.expected))
    }
}

/// Prompt and answer together in the reference file.
const REFERENCE_LENGTH: u32 = 512;

#[derive(Debug, Deserialize)]
struct Reference {
    prompts: Vec<ReferencePrompt>,
}

/// One prompt with its reference answer: the part of the file that is compared.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct ReferencePrompt {
    /// One user message.
    pub(super) prompt: String,
    prompt_tokens: u32,
    /// The answer; a final end-of-sequence token is part of it.
    token_ids: Vec<u32>,
    /// Smallest distance of the two best logits on the path: a flip below 1e-3 may be rounding.
    min_top1_top2_gap: f64,
    /// Accepted counts by mode: `chain`, or a tree's budget.
    rounds: HashMap<String, Vec<u32>>,
}

/// How an answer compares with the reference; a difference is told in words.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Comparison {
    /// The token ids.
    pub(super) ids: Result<(), String>,
    /// The accepted counts; `None` when the file has none for the mode.
    pub(super) rounds: Option<RoundsComparison>,
}

/// How the accepted counts compare.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RoundsComparison {
    /// How many steps the reference took.
    pub(super) expected_steps: usize,
    /// The first difference.
    pub(super) outcome: Result<(), String>,
}

/// Reads the prompts of a reference file.
///
/// # Errors
/// When the file can't be read or is of another form.
pub(super) fn read(path: &Path) -> Result<Vec<ReferencePrompt>> {
    let name = path.display();
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    let reference: Reference =
        serde_json::from_str(&text).with_context(|| format!("{name} is not a reference file"))?;
    Ok(reference.prompts)
}

impl ReferencePrompt {
    /// The longest answer that the reference covers, or `limit` if that is less.
    pub(super) fn max_tokens(&self, limit: Option<u32>) -> u32 {
        let room = REFERENCE_LENGTH.saturating_sub(self.prompt_tokens);
        limit.map_or(room, |limit| limit.min(room))
    }

    /// The answer.
    pub(super) fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// Compares the answer of at most `max_tokens` tokens in `mode`.
    pub(super) fn compare(
        &self,
        mode: Mode,
        max_tokens: u32,
        generated: Generated<'_>,
    ) -> Comparison {
        let ids = self.expected_ids(max_tokens);
        let rounds = self.expected_rounds(mode, ids.len());
        Comparison {
            ids: self.compare_ids(ids, generated),
            rounds: rounds.map(|expected| RoundsComparison {
                expected_steps: expected.accepted.len(),
                outcome: expected.compare(generated.rounds),
            }),
        }
    }

    /// The first difference of an answer of at most `max_tokens` tokens.
    pub(super) fn first_difference(
        &self,
        max_tokens: u32,
        token_ids: &[u32],
    ) -> Option<Difference> {
        Difference::first(token_ids, self.expected_ids(max_tokens))
    }

    /// Whether a prompt of `tokens` tokens is the reference's.
    pub(super) fn compare_prompt(&self, tokens: u32) -> Result<(), String> {
        if tokens == self.prompt_tokens {
            return Ok(());
        }
        Err(format!(
            "the prompt has {tokens} tokens, the reference {}: tokenizer or chat template differ",
            self.prompt_tokens
        ))
    }

    fn compare_ids(&self, expected: &[u32], generated: Generated<'_>) -> Result<(), String> {
        self.compare_prompt(generated.prompt_tokens)?;
        let Some(difference) = Difference::first(generated.token_ids, expected) else {
            return Ok(());
        };
        Err(format!(
            "token {} (step {}) is {}; smallest top-1/top-2 gap of the reference {:.1e}",
            difference.position,
            rounds_for(generated.rounds, difference.position + 1),
            difference.values(),
            self.min_top1_top2_gap
        ))
    }

    /// The ids that a generation of at most `max_tokens` must give.
    fn expected_ids(&self, max_tokens: u32) -> &[u32] {
        &self.token_ids[..self.token_ids.len().min(max_tokens as usize)]
    }

    /// The accepted counts that `tokens` generated tokens take in `mode`; `None` when the file has none for it.
    fn expected_rounds(&self, mode: Mode, tokens: usize) -> Option<ExpectedRounds<'_>> {
        let key = match mode {
            Mode::Chain => "chain".to_owned(),
            Mode::Tree(Some(budget)) => budget.to_string(),
            Mode::Auto | Mode::Ar | Mode::Tree(None) => return None,
        };
        let rounds = self.rounds.get(&key)?;
        let accepted = &rounds[..rounds_for(rounds, tokens)];
        let made = 1 + accepted
            .iter()
            .map(|&count| count as usize + 1)
            .sum::<usize>();
        Some(ExpectedRounds {
            accepted,
            last_is_minimum: made > self.token_ids.len(),
        })
    }
}

/// Accepted counts of the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ExpectedRounds<'a> {
    accepted: &'a [u32],
    /// The reference could not count further than its answer goes, so the last round may accept more.
    last_is_minimum: bool,
}

impl ExpectedRounds<'_> {
    fn compare(self, got: &[u32]) -> Result<(), String> {
        if self.last_is_minimum
            && let (Some((&expected_last, expected)), Some((&got_last, before))) =
                (self.accepted.split_last(), got.split_last())
            && expected == before
            && got_last >= expected_last
        {
            return Ok(());
        }
        Difference::first(got, self.accepted).map_or(Ok(()), |difference| {
            Err(format!(
                "step {} accepted {}",
                difference.position + 1,
                difference.values()
            ))
        })
    }
}

/// How many rounds make `tokens` tokens, the first of which comes from the prefill.
fn rounds_for(rounds: &[u32], tokens: usize) -> usize {
    let mut made = 1;
    rounds
        .iter()
        .take_while(|&&accepted| {
            let needed = made < tokens;
            made += accepted as usize + 1;
            needed
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: Mode = Mode::Tree(Some(8));

    fn prompt() -> ReferencePrompt {
        ReferencePrompt {
            prompt: "p".into(),
            prompt_tokens: 4,
            token_ids: vec![10, 11, 12, 13, 14, 2],
            min_top1_top2_gap: 0.01,
            rounds: HashMap::from([("8".to_owned(), vec![1, 2, 3])]),
        }
    }

    fn generated<'a>(token_ids: &'a [u32], rounds: &'a [u32]) -> Generated<'a> {
        Generated {
            prompt_tokens: 4,
            token_ids,
            rounds,
        }
    }

    #[test]
    fn rounds_are_cut_where_the_tokens_end() {
        // 1 token from prefill, then 2, 3 and 4 tokens.
        assert_eq!(
            [1, 2, 3, 4, 6, 7, 10, 11].map(|tokens| rounds_for(&[1, 2, 3], tokens)),
            [0, 1, 1, 2, 2, 3, 3, 3]
        );
        let expected = |mode, tokens| {
            prompt()
                .expected_rounds(mode, tokens)
                .map(|rounds| rounds.accepted.to_vec())
        };
        assert_eq!(expected(TREE, 4), Some(vec![1, 2]));
        assert_eq!(expected(Mode::Ar, 4), None);
        assert_eq!(expected(Mode::Tree(Some(9)), 4), None);
    }

    #[test]
    fn the_limit_never_leaves_the_reference() {
        assert_eq!(prompt().max_tokens(None), 508);
        assert_eq!(prompt().max_tokens(Some(3)), 3);
        assert_eq!(prompt().expected_ids(3), [10, 11, 12]);
        assert_eq!(prompt().expected_ids(508).len(), 6);
    }

    #[test]
    fn answers_are_compared_up_to_the_limit() {
        let whole = generated(&[10, 11, 12, 13, 14, 2], &[1, 2]);
        let same = RoundsComparison {
            expected_steps: 2,
            outcome: Ok(()),
        };
        assert_eq!(
            prompt().compare(TREE, 508, whole),
            Comparison {
                ids: Ok(()),
                rounds: Some(same)
            }
        );
        assert_eq!(
            prompt().compare(Mode::Ar, 508, whole),
            Comparison {
                ids: Ok(()),
                rounds: None
            }
        );
        assert!(
            prompt()
                .compare(TREE, 3, generated(&[10, 11, 12], &[1]))
                .ids
                .is_ok()
        );

        let other = generated(&[10, 11, 12, 99, 14, 2], &[1, 2]);
        let told = prompt().compare(TREE, 508, other).ids.unwrap_err();
        assert!(
            told.starts_with("token 3 (step 2) is 99, expected 13"),
            "{told}"
        );
        let difference = prompt().first_difference(508, other.token_ids);
        assert_eq!(
            difference,
            Some(Difference {
                position: 3,
                got: Some(99),
                expected: Some(13)
            })
        );
        let short = generated(&[10, 11], &[1]);
        let told = prompt().compare(TREE, 508, short).ids.unwrap_err();
        assert!(told.contains("is nothing, expected 12"), "{told}");
    }

    #[test]
    fn another_prompt_is_a_difference() {
        let other = Generated {
            prompt_tokens: 5,
            ..generated(&[10], &[])
        };
        let told = prompt().compare(TREE, 1, other).ids.unwrap_err();
        assert!(told.contains("chat template"), "{told}");
    }

    #[test]
    fn missing_rounds_are_differences() {
        let expected = ExpectedRounds {
            accepted: &[1, 2],
            last_is_minimum: false,
        };
        assert_eq!(expected.compare(&[1, 2]), Ok(()));
        assert_eq!(
            expected.compare(&[1]),
            Err("step 2 accepted nothing, expected 2".to_owned())
        );
        assert_eq!(
            expected.compare(&[1, 3]),
            Err("step 2 accepted 3, expected 2".to_owned())
        );
    }

    #[test]
    fn the_round_that_reaches_the_end_of_the_reference_may_accept_more() {
        // 1 + 2 + 3 tokens are made of the 5 that the reference knows.
        let mut prompt = prompt();
        prompt.token_ids.pop();
        let expected = prompt.expected_rounds(TREE, 5).unwrap();
        assert!(expected.last_is_minimum);
        assert_eq!(expected.compare(&[1, 9]), Ok(()));
        assert!(expected.compare(&[1, 1]).is_err());
        assert!(expected.compare(&[2, 2]).is_err());
        assert!(expected.compare(&[1, 2, 0]).is_err());
    }
}
