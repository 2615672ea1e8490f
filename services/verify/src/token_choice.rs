//! How one sequence chooses its tokens, as its state moves on: what was counted for the penalties, and where its grammar
//! stands.

use std::sync::Arc;

use treespec_sampling::{Coupling, EarlyBans, Ranking, TokenCounts, TokenRules};

use crate::forward::Choices;

/// The rules of a sequence with what they depend on.
pub(crate) struct TokenChoice {
    /// Shared with the work in flight.
    rules: Arc<TokenRules>,
    ranking: Ranking,
}

impl TokenChoice {
    /// At the end of `tokens`, the first `prompt_length` of which are the prompt.
    pub(crate) fn new(
        mut rules: TokenRules,
        ranking: Ranking,
        tokens: &[u32],
        prompt_length: usize,
    ) -> Self {
        if rules.counts_tokens() {
            let (prompt, generated) = tokens.split_at(prompt_length.min(tokens.len()));
            rules.counts = TokenCounts::from_prompt(prompt);
            generated.iter().for_each(|&token| rules.counts.push(token));
        }
        let mut choice = Self {
            rules: Arc::new(rules),
            ranking,
        };
        choice.pass_early_bans(tokens.len());
        choice
    }

    /// For a chunk of `rows` rows of the tokens that were counted at the start.
    pub(crate) fn of_prompt(&self, rows: usize) -> Choices {
        Choices {
            counted_rows: rows,
            ..Choices::of(Arc::clone(&self.rules))
        }
    }

    /// For a tree that nothing constrains.
    pub(crate) fn of_tree(&self) -> Choices {
        Choices::of(Arc::clone(&self.rules))
    }

    /// The rules alone.
    pub(crate) fn rules(&self) -> Arc<TokenRules> {
        Arc::clone(&self.rules)
    }

    /// What a drafter is told of the draw; nothing when there is none.
    pub(crate) fn coupling(&self) -> Option<Coupling> {
        let params = &self.rules.params;
        (!params.is_greedy() && self.ranking != Ranking::Plain).then(|| Coupling {
            seed: params.seed.unwrap_or(0),
            temperature: params.temperature,
            ranking: self.ranking,
        })
    }

    /// Counts tokens that were committed. `committed` is the length with them.
    pub(crate) fn count(&mut self, tokens: impl Iterator<Item = u32>, committed: usize) {
        if self.rules.counts_tokens() {
            let counts = &mut Arc::make_mut(&mut self.rules).counts;
            tokens.for_each(|token| counts.push(token));
        }
        self.pass_early_bans(committed);
    }

    /// Drops bans that no later position has: a rule that has no effect still costs a pass over the logits.
    fn pass_early_bans(&mut self, committed: usize) {
        let early = &self.rules.early;
        // The next position that chooses is the one behind the root's, which is at `committed`.
        if !early.tokens.is_empty() && committed as u64 + 1 > u64::from(early.until) {
            Arc::make_mut(&mut self.rules).early = EarlyBans::none();
        }
    }
}
