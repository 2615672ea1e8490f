use std::fmt;

use treespec_sampling::TokenMask;
use treespec_tree::TokenTree;

use crate::GrammarError;
use crate::growth::{self, ConstrainedTree, TreeLimits};
use crate::position::Position;
use crate::walk::Walk;

/// Where an answer is in its grammar: the state after the tokens decided so far.
///
/// The library keeps tables that grow with every state that it visits, up to a limit. Drafts are explored in tables of
/// their own, and whoever reaches the limit starts again with those of the decided tokens alone: how far an answer can go
/// depends on its tokens, not on what was drafted.
///
/// After [`GrammarError::Failed`] the state is lost, and every later call gives that error, too. A clone shares nothing
/// with its original.
pub struct Grammar {
    /// Before the first token, with nothing in its tables.
    origin: Position,
    /// The tokens since then.
    tokens: Vec<u32>,
    /// Behind them.
    position: Position,
    /// The same place, for drafts.
    scout: Option<Position>,
    finished: bool,
}

impl Grammar {
    pub(crate) fn new(origin: Position) -> Self {
        Self {
            position: origin.independent(),
            origin,
            tokens: Vec::new(),
            scout: None,
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
        self.with_fresh_tables(Position::mask)
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
        if !self.position.is_end(token) {
            self.with_fresh_tables(|position| position.advance(token))?;
            self.tokens.push(token);
            let follows = |scout: &mut Position| scout.advance(token).is_ok();
            self.scout = self
                .scout
                .take()
                .and_then(|mut scout| follows(&mut scout).then_some(scout));
            return Ok(());
        }
        if !self.with_fresh_tables(Position::may_end)? {
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
    /// A token is left out when nothing can follow it, as if it were not legal, and the tree ends early where its masks
    /// take too long.
    ///
    /// # Errors
    /// As for [`Grammar::mask`], for what follows the root.
    pub fn constrain(
        &mut self,
        draft: &TokenTree,
        limits: TreeLimits,
    ) -> Result<ConstrainedTree, GrammarError> {
        if self.finished {
            return Ok(ConstrainedTree {
                tree: TokenTree::root_only(draft.tokens()[0]),
                masks: vec![self.position.ends().clone()],
            });
        }
        let scout = match self.scout.take() {
            Some(scout) => scout,
            None => self.position.independent(),
        };
        match self.explore(scout, draft, limits) {
            Err(GrammarError::Failed { .. }) => {
                let fresh = self.fresh()?;
                self.explore(fresh, draft, limits)
            }
            other => other,
        }
    }

    /// Constrains from `scout`, and keeps it when it can still be used.
    fn explore(
        &mut self,
        scout: Position,
        draft: &TokenTree,
        limits: TreeLimits,
    ) -> Result<ConstrainedTree, GrammarError> {
        let mut walk = Walk::new(&scout, limits.time);
        let grown = growth::grow(draft, limits, &mut walk);
        let error = walk.into_error();
        if !matches!(error, Some(GrammarError::Failed { .. })) {
            self.scout = Some(scout);
        }
        grown.ok_or(error.unwrap_or(GrammarError::DeadEnd))
    }

    /// Does something at the position, a second time with fresh tables when the first reaches a limit.
    fn with_fresh_tables<T>(
        &mut self,
        work: impl Fn(&mut Position) -> Result<T, GrammarError>,
    ) -> Result<T, GrammarError> {
        match work(&mut self.position) {
            Err(GrammarError::Failed { .. }) => {
                self.position = self.fresh()?;
                work(&mut self.position)
            }
            other => other,
        }
    }

    /// The position with tables of the decided tokens alone.
    fn fresh(&self) -> Result<Position, GrammarError> {
        let mut position = self.origin.independent();
        for &token in &self.tokens {
            position.advance(token)?;
        }
        Ok(position)
    }
}

impl Clone for Grammar {
    fn clone(&self) -> Self {
        Self {
            origin: self.origin.independent(),
            tokens: self.tokens.clone(),
            position: self.position.independent(),
            scout: None,
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
