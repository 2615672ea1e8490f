//! What a request says about the choice of its tokens, in one piece that outlives steps.

use crate::{EarlyBans, LogitBias, Processors, SamplingParams, TokenCounts, TokenMask};

/// The owner of what [`Processors`] borrow, but for path and grammar, which belong to single rows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenRules {
    /// Temperature, filters, penalties and seed.
    pub params: SamplingParams,
    /// Additions to logits.
    pub bias: LogitBias,
    /// When there, all other ids are impossible.
    pub allowed: Option<TokenMask>,
    /// Impossible ids.
    pub banned: Vec<u32>,
    /// Ids that are impossible at the start of the answer.
    pub early: EarlyBans,
    /// The tokens so far. Kept only where [`TokenRules::counts_tokens`].
    pub counts: TokenCounts,
}

impl TokenRules {
    /// Parameters and nothing else.
    pub fn new(params: SamplingParams) -> Self {
        Self {
            params,
            ..Self::default()
        }
    }

    /// Everything but path and grammar.
    pub fn processors(&self) -> Processors<'_> {
        Processors {
            bias: &self.bias,
            allowed: self.allowed.as_ref(),
            banned: &self.banned,
            early: &self.early,
            counts: &self.counts,
            ..Processors::new(&self.params)
        }
    }

    /// Whether the choice depends on the tokens so far.
    pub fn counts_tokens(&self) -> bool {
        self.processors().has_penalties()
    }
}
