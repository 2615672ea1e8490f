//! Penalties for tokens that were already there.

use crate::SamplingParams;

/// How often a token has occurred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenCount {
    /// Token id.
    pub token: u32,
    /// Times it was generated.
    pub generated: u32,
    /// Whether the prompt has it.
    pub in_prompt: bool,
}

/// The tokens of a sequence so far: which the prompt has, and how often each was generated.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenCounts(Vec<TokenCount>);

impl TokenCounts {
    /// Nothing seen yet.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// A prompt and no generated token.
    pub fn from_prompt(prompt: &[u32]) -> Self {
        let mut tokens = prompt.to_vec();
        tokens.sort_unstable();
        tokens.dedup();
        Self(
            tokens
                .into_iter()
                .map(|token| TokenCount {
                    token,
                    generated: 0,
                    in_prompt: true,
                })
                .collect(),
        )
    }

    /// Counts one more generated token.
    pub fn push(&mut self, token: u32) {
        match self.0.binary_search_by_key(&token, |count| count.token) {
            Ok(index) => self.0[index].generated = self.0[index].generated.saturating_add(1),
            Err(index) => self.0.insert(
                index,
                TokenCount {
                    token,
                    generated: 1,
                    in_prompt: false,
                },
            ),
        }
    }

    /// One entry per token that occurred, ascending by token.
    pub fn entries(&self) -> &[TokenCount] {
        &self.0
    }

    fn get(&self, token: u32) -> Option<&TokenCount> {
        let index = self.0.binary_search_by_key(&token, |count| count.token);
        index.ok().map(|index| &self.0[index])
    }
}

/// Strengths of the three penalties, as in [`SamplingParams`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalties {
    /// Divides positive and multiplies negative logits of tokens of prompt and output.
    pub repetition: f32,
    /// Subtracted from tokens of the output.
    pub presence: f32,
    /// Subtracted per occurrence in the output.
    pub frequency: f32,
}

impl Penalties {
    /// Those of a request.
    pub fn new(params: &SamplingParams) -> Self {
        Self {
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
        }
    }

    /// True when no logit changes.
    pub fn is_neutral(&self) -> bool {
        self.repetition == 1.0 && self.presence == 0.0 && self.frequency == 0.0
    }

    /// The penalised logit of a token that occurred: repetition first, then frequency, then presence.
    pub fn apply(&self, logit: f32, generated: u32) -> f32 {
        let repeated = match logit > 0.0 {
            true => logit / self.repetition,
            false => logit * self.repetition,
        };
        match generated {
            0 => repeated,
            n => (repeated - self.frequency * n as f32) - self.presence,
        }
    }

    /// Calls `edit(token, generated)` once for each token of `counts` and of `path`, which was generated after them.
    pub(crate) fn visit(counts: &TokenCounts, path: &[u32], mut edit: impl FnMut(u32, u32)) {
        let on_path = |token: u32| path.iter().filter(|&&t| t == token).count() as u32;
        for count in counts.entries() {
            edit(
                count.token,
                count.generated.saturating_add(on_path(count.token)),
            );
        }
        for (index, &token) in path.iter().enumerate() {
            if counts.get(token).is_none() && !path[..index].contains(&token) {
                edit(token, on_path(token));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: Penalties = Penalties {
        repetition: 2.0,
        presence: 0.5,
        frequency: 0.25,
    };

    #[test]
    fn repetition_shrinks_positive_and_deepens_negative_logits() {
        assert_eq!(ALL.apply(4.0, 0), 2.0);
        assert_eq!(ALL.apply(-4.0, 0), -8.0);
        assert_eq!(ALL.apply(0.0, 0), 0.0);
    }

    #[test]
    fn presence_counts_once_and_frequency_per_occurrence() {
        assert_eq!(ALL.apply(4.0, 1), 2.0 - 0.25 - 0.5);
        assert_eq!(ALL.apply(4.0, 3), 2.0 - 0.75 - 0.5);
    }

    #[test]
    fn impossible_tokens_stay_impossible() {
        assert_eq!(ALL.apply(f32::NEG_INFINITY, 3), f32::NEG_INFINITY);
    }

    proptest! {
        #[test]
        fn a_path_counts_like_output(prompt in prop::collection::vec(0u32..12, 0..20),
                                     output in prop::collection::vec(0u32..12, 0..20), split in 0usize..20) {
            let split = split.min(output.len());
            let mut counts = TokenCounts::from_prompt(&prompt);
            output[..split].iter().for_each(|&token| counts.push(token));
            let mut got = Vec::new();
            Penalties::visit(&counts, &output[split..], |token, generated| got.push((token, generated)));
            got.sort_unstable();
            let expected: Vec<(u32, u32)> = (0..12)
                .filter(|token| prompt.contains(token) || output.contains(token))
                .map(|token| (token, output.iter().filter(|&&t| t == token).count() as u32))
                .collect();
            prop_assert_eq!(got, expected);
        }
    }
}
