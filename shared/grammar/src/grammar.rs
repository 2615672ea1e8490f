use std::fmt;

use treespec_sampling::TokenMask;
use treespec_tree::TokenTree;

use crate::GrammarError;
use crate::growth::{self, ConstrainedTree, TreeLimits};
use crate::position::Position;
use crate::walk::Walk;

/// Where an answer is in its grammar: the state after the tokens decided so far.
///
/// After [`GrammarError::Failed`] the state is lost, and every later call gives that error, too. A clone shares nothing
/// with its original.
pub struct Grammar {
    position: Position,
    finished: bool,
}

impl Grammar {
    pub(crate) fn new(position: Position) -> Self {
        Self {
            position,
            finished: false,
        }
    }

    /// The tokens that may come next. Where the answer may end, all end-of-sequence ids are in it, and where it must or
    /// has, nothing else is. Where the text is forced, only the longest token of it is.
    ///
    /// # Errors
    /// [`GrammarError::DeadEnd`] when nothing can follow, [`GrammarError::Failed`] when the grammar takes too much time
    /// or memory.
    pub fn mask(&mut self) -> Result<TokenMask, GrammarError> {
        if self.finished {
            return Ok(self.position.ends().clone());
        }
        self.position.mask()
    }

    /// The next token has been decided. An end-of-sequence id ends the answer. A piece of forced text is taken although no
    /// mask has it.
    ///
    /// # Errors
    /// [`GrammarError::Refused`] and [`GrammarError::Finished`] for a token that may not come next; the state is as it
    /// was. [`GrammarError::Failed`] when the grammar takes too much time or memory.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.finished {
            return Err(GrammarError::Finished { token });
        }
        if !self.position.ends().contains(token) {
            return self.position.advance(token);
        }
        if !self.position.may_end()? {
            return Err(GrammarError::Refused { token });
        }
        self.finished = true;
        Ok(())
    }

    /// Whether an end-of-sequence id has been accepted.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// The part of `draft` that the grammar allows, grown by what it forces: see [`grow`](crate::grow). The root of
    /// `draft` is the last decided token, which has been accepted; the state stays as it is.
    ///
    /// A token is left out when nothing can follow it, as if it were not legal.
    ///
    /// # Errors
    /// As for [`Grammar::mask`], for what follows the root.
    pub fn constrain(
        &self,
        draft: &TokenTree,
        limits: TreeLimits,
    ) -> Result<ConstrainedTree, GrammarError> {
        if self.finished {
            return Ok(ConstrainedTree {
                tree: TokenTree::root_only(draft.tokens()[0]),
                masks: vec![self.position.ends().clone()],
            });
        }
        let mut walk = Walk::from(&self.position);
        growth::grow(draft, limits, &mut walk).ok_or_else(|| walk.into_error())
    }
}

impl Clone for Grammar {
    fn clone(&self) -> Self {
        Self {
            position: self.position.independent(),
            finished: self.finished,
        }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Grammar")
            .field("finished", &self.finished)
            .finish_non_exhaustive()
    }
}
