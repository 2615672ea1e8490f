//! A state of the library's matcher, under our rules for the end of an answer.

use std::sync::Arc;

use llguidance::Matcher;
use treespec_sampling::TokenMask;

use crate::vocabulary::Vocabulary;
use crate::{GrammarError, library};

/// The state after some tokens, none of which ended the answer.
///
/// Clones share the lexer's tables, which are only ever added to, and take turns in using them.
#[derive(Clone)]
pub(crate) struct Position {
    vocabulary: Arc<Vocabulary>,
    matcher: Matcher,
    rolls_back: bool,
}

impl Position {
    /// `rolls_back`: whether the grammar has nothing that the library cannot undo.
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, matcher: Matcher, rolls_back: bool) -> Self {
        Self {
            vocabulary,
            matcher,
            rolls_back,
        }
    }

    /// A copy that shares no tables with this one, so that the two never wait for each other.
    pub(crate) fn independent(&self) -> Self {
        let matcher = library::guarded(|| self.matcher.deep_clone());
        Self {
            vocabulary: self.vocabulary.clone(),
            // Only tables that a failure has left unusable cannot be copied: then the copy fails like its original.
            matcher: matcher.unwrap_or_else(|_| self.matcher.clone()),
            rolls_back: self.rolls_back,
        }
    }

    /// The tokens that end an answer.
    pub(crate) fn ends(&self) -> &TokenMask {
        self.vocabulary.ends()
    }

    pub(crate) fn is_end(&self, token: u32) -> bool {
        self.ends().contains(token)
    }

    pub(crate) fn likely(&self, mask: &TokenMask) -> Option<u32> {
        self.vocabulary.likely(mask)
    }

    /// What may follow; never empty. Where the text is forced it is only the longest token of it: the others would spell the
    /// same in pieces that the model was not trained on, and cost a step each.
    pub(crate) fn mask(&mut self) -> Result<TokenMask, GrammarError> {
        let set = self
            .matcher
            .compute_mask_or_eos()
            .map_err(|error| library::failed(&error))?;
        let may_end = self.vocabulary.allows_end(&set) && self.may_end()?;
        let mask = self.vocabulary.mask(&set, may_end);
        match mask.is_empty() {
            true => Err(GrammarError::DeadEnd),
            false => Ok(self.forced(&mask).unwrap_or(mask)),
        }
    }

    /// The mask of the one token that spells what must come, unless some legal token goes on beyond it: the choice of
    /// that one is a choice of what follows.
    fn forced(&self, mask: &TokenMask) -> Option<TokenMask> {
        let longest = self.vocabulary.likely(mask)?;
        // Forcing changes the matcher.
        let mut ahead = self.matcher.clone();
        let forced = library::guarded(|| ahead.compute_ff_bytes()).ok()?;
        forced
            .starts_with(self.vocabulary.bytes(longest))
            .then(|| self.vocabulary.only(longest))
    }

    /// Whether the answer may end here.
    pub(crate) fn may_end(&mut self) -> Result<bool, GrammarError> {
        if self.matcher.stop_reason().is_ok() && self.matcher.is_stopped() {
            return Ok(true);
        }
        let accepting = self.matcher.is_accepting();
        if accepting.map_err(|error| library::failed(&error))? {
            return Ok(true);
        }
        // A Lark grammar may name an end-of-sequence token, or have a rule that lasts until there is one. It ends the
        // answer all the same, so it is legal only where the grammar wants nothing behind it.
        let mut ended = self.matcher.clone();
        let consumed = ended.consume_token(self.vocabulary.end_token());
        Ok(consumed.is_ok() && (ended.is_stopped() || ended.is_accepting().unwrap_or(false)))
    }

    /// Goes on by a token that does not end the answer.
    pub(crate) fn advance(&mut self, token: u32) -> Result<(), GrammarError> {
        if !self.vocabulary.has_text(token) {
            return Err(GrammarError::Refused { token });
        }
        match self.matcher.try_consume_tokens(&[token]) {
            Ok(0) => Err(GrammarError::Refused { token }),
            Ok(_) => Ok(()),
            Err(error) => Err(library::failed(&error)),
        }
    }

    /// Undoes the last `tokens` tokens. False when that is not possible; then the state is lost.
    pub(crate) fn go_back(&mut self, tokens: usize) -> bool {
        self.rolls_back && self.matcher.rollback(tokens).is_ok()
    }
}
