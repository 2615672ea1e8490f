//! Visiting the nodes of a tree with one moving position.

use treespec_sampling::TokenMask;

use crate::GrammarError;
use crate::growth::{Continuation, Continuations};
use crate::position::Position;

/// The states below one position. The position itself stays where it is.
pub(crate) struct Walk<'a> {
    root: &'a Position,
    here: Position,
    /// Tokens from the root to `here`.
    path: Vec<u32>,
    /// Why nothing follows the last path asked for.
    error: Option<GrammarError>,
}

impl<'a> From<&'a Position> for Walk<'a> {
    fn from(root: &'a Position) -> Self {
        Self {
            root,
            here: root.clone(),
            path: Vec::new(),
            error: None,
        }
    }
}

impl Walk<'_> {
    /// Why nothing followed the path that was asked for last.
    pub(crate) fn into_error(self) -> GrammarError {
        self.error.unwrap_or(GrammarError::DeadEnd)
    }

    fn go_to(&mut self, path: &[u32]) -> Result<(), GrammarError> {
        let shared = self
            .path
            .iter()
            .zip(path)
            .take_while(|(ours, theirs)| ours == theirs)
            .count();
        let surplus = self.path.len() - shared;
        if surplus > 0 {
            if self.here.go_back(surplus) {
                self.path.truncate(shared);
            } else {
                self.here = self.root.clone();
                self.path.clear();
            }
        }
        for &token in &path[self.path.len()..] {
            self.here.advance(token)?;
            self.path.push(token);
        }
        Ok(())
    }
}

impl Continuations for Walk<'_> {
    fn after(&mut self, path: &[u32]) -> Option<Continuation> {
        let mask = self.go_to(path).and_then(|()| self.here.mask());
        match mask {
            Ok(mask) => {
                let likely = self.here.likely(&mask);
                Some(Continuation { mask, likely })
            }
            Err(error) => {
                self.error = Some(error);
                None
            }
        }
    }

    fn is_end(&self, token: u32) -> bool {
        self.here.is_end(token)
    }

    fn after_end(&self) -> TokenMask {
        self.here.ends().clone()
    }
}
