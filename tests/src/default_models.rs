//! Greedy answers of the default models (`eval32_f32.json`).

use std::collections::BTreeMap;

use serde::Deserialize;

/// `eval32_f32.json`
#[derive(Debug, Deserialize)]
pub struct DefaultModelsReference {
    /// One per prompt.
    pub prompts: Vec<ReferenceAnswer>,
}

/// A prompt and its answer, at most 512 tokens together.
#[derive(Debug, Deserialize)]
pub struct ReferenceAnswer {
    /// One user message through the chat template.
    pub prompt: String,
    /// Its length in tokens.
    pub prompt_tokens: u32,
    /// The answer. Starts with the token from prefill; a final end-of-sequence token is part of it.
    pub token_ids: Vec<u32>,
    /// Drafted tokens accepted per round, by `chain` or a tree's budget. Each round also yields one more token.
    pub rounds: BTreeMap<String, Vec<u32>>,
}

impl ReferenceAnswer {
    /// The answer to a request for at most `tokens`.
    pub fn tokens(&self, tokens: usize) -> &[u32] {
        &self.token_ids[..tokens.min(self.token_ids.len())]
    }

    /// The rounds that bring `tokens` tokens, the first of which comes from prefill; the last may overrun.
    ///
    /// # Panics
    /// When the file has no rounds for `mode`.
    pub fn rounds(&self, mode: &str, tokens: usize) -> Vec<u32> {
        let mut generated = 1;
        self.rounds[mode]
            .iter()
            .take_while(|&&accepted| {
                let needed = generated < tokens;
                generated += accepted as usize + 1;
                needed
            })
            .copied()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_end_where_the_tokens_do() {
        let answer = ReferenceAnswer {
            prompt: String::new(),
            prompt_tokens: 1,
            token_ids: vec![1, 2, 3],
            rounds: BTreeMap::from([("8".to_owned(), vec![1, 2, 3])]),
        };
        // One token from prefill, then 2, 3 and 4.
        let rounds = [1, 2, 3, 4, 6, 7, 20].map(|tokens| answer.rounds("8", tokens).len());
        assert_eq!(rounds, [0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(answer.tokens(2), [1, 2]);
        assert_eq!(answer.tokens(9), [1, 2, 3]);
    }
}
