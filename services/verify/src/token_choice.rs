//! How one sequence chooses its tokens, as its state moves on: what was counted for the penalties, and where its grammar
//! stands.

use std::sync::Arc;

use treespec_grammar::{ConstrainedTree, Grammar, GrammarError, GrammarKind, TreeLimits};
use treespec_rpc::ServiceError;
use treespec_rpc::convert::constraint_error;
use treespec_sampling::{Coupling, EarlyBans, Ranking, TokenCounts, TokenMask, TokenRules};
use treespec_tree::TokenTree;

use crate::forward::Choices;

/// The rules of a sequence with what they depend on.
pub(crate) struct TokenChoice {
    /// Shared with the work in flight.
    rules: Arc<TokenRules>,
    ranking: Ranking,
    /// What the answer must follow, behind the last decided token. `None` for free answers.
    grammar: Option<(GrammarKind, Grammar)>,
}

impl TokenChoice {
    /// At the end of `tokens`, the first `prompt_length` of which are the prompt.
    pub(crate) fn new(
        mut rules: TokenRules,
        ranking: Ranking,
        grammar: Option<(GrammarKind, Grammar)>,
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
            grammar,
        };
        choice.pass_early_bans(tokens.len());
        choice
    }

    /// True when the answer must follow a grammar: then trees go through [`Self::constrain`].
    pub(crate) fn is_constrained(&self) -> bool {
        self.grammar.is_some()
    }

    /// For a chunk of `rows` rows of the tokens that were counted at the start, the last of which chooses if any.
    ///
    /// # Errors
    /// As [`Self::constrain`].
    pub(crate) async fn of_prompt(
        &mut self,
        rows: usize,
        chooses: bool,
    ) -> Result<Choices, ServiceError> {
        let mut grammar = Vec::new();
        if chooses && self.grammar.is_some() {
            grammar.resize(rows.saturating_sub(1), TokenMask::default());
            grammar.push(self.with_grammar(|grammar| grammar.mask()).await?);
        }
        Ok(Choices {
            grammar,
            counted_rows: rows,
            ..Choices::of(Arc::clone(&self.rules))
        })
    }

    /// For a tree that nothing constrains.
    pub(crate) fn of_tree(&self) -> Choices {
        Choices::of(Arc::clone(&self.rules))
    }

    /// The legal part of a draft, grown by what the grammar forces, with the choices of its nodes. The draft's root is the
    /// last accepted token.
    ///
    /// # Errors
    /// INVALID_ARGUMENT when the grammar cannot be followed with this vocabulary, or not with the effort that a request may
    /// cause.
    pub(crate) async fn constrain(
        &mut self,
        draft: TokenTree,
        limits: TreeLimits,
    ) -> Result<(TokenTree, Choices), ServiceError> {
        if self.grammar.is_none() {
            return Ok((draft, self.of_tree()));
        }
        let constrain = move |grammar: &mut Grammar| grammar.constrain(&draft, limits);
        let ConstrainedTree { tree, masks } = self.with_grammar(constrain).await?;
        let choices = Choices {
            grammar: masks,
            ..self.of_tree()
        };
        Ok((tree, choices))
    }

    /// Follows tokens that were decided.
    ///
    /// # Errors
    /// As [`Self::constrain`]; INTERNAL for a token that does not follow the grammar.
    pub(crate) fn accept(&mut self, tokens: &[u32]) -> Result<(), ServiceError> {
        let Some((kind, grammar)) = &mut self.grammar else {
            return Ok(());
        };
        let accepted = tokens.iter().try_for_each(|&token| grammar.accept(token));
        accepted.map_err(|error| constraint_error(*kind, &error))
    }

    /// Masks take their time: other sequences must not wait for them.
    async fn with_grammar<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Grammar) -> Result<T, GrammarError> + Send + 'static,
    ) -> Result<T, ServiceError> {
        let lost = || ServiceError::internal("the grammar of the sequence is lost");
        let (kind, mut grammar) = self.grammar.take().ok_or_else(lost)?;
        let work = move || {
            let done = work(&mut grammar);
            (grammar, done)
        };
        let (grammar, done) = tokio::task::spawn_blocking(work)
            .await
            .map_err(|_| lost())?;
        self.grammar = Some((kind, grammar));
        done.map_err(|error| constraint_error(kind, &error))
    }

    /// The rules alone.
    pub(crate) fn rules(&self) -> Arc<TokenRules> {
        Arc::clone(&self.rules)
    }

    /// What a drafter is told of the draw; nothing when there is none.
    pub(crate) fn coupling(&self) -> Option<Coupling> {
        Coupling::of(&self.rules.params, self.ranking)
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
