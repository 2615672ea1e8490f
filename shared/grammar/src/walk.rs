//! Visiting the nodes of a tree with one moving position.

use std::time::{Duration, Instant};

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
    /// Why nothing followed a path, the last one that said so.
    error: Option<GrammarError>,
    /// When the tree has grown for long enough.
    end: Instant,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(root: &'a Position, time: Duration) -> Self {
        Self {
            root,
            here: root.clone(),
            path: Vec::new(),
            error: None,
            end: Instant::now() + time,
        }
    }
}

impl Walk<'_> {
    /// Why nothing followed a path; a failure that left the tables unusable before a dead end.
    pub(crate) fn into_error(self) -> Option<GrammarError> {
        self.error
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
        // What follows the root must be known; a longer tree is not worth any effort.
        if !path.is_empty() && Instant::now() > self.end {
            return None;
        }
        let mask = self.go_to(path).and_then(|()| self.here.mask());
        match mask {
            Ok(mask) => {
                let likely = self.here.likely(&mask);
                Some(Continuation { mask, likely })
            }
            Err(error) => {
                if !matches!(self.error, Some(GrammarError::Failed { .. })) {
                    self.error = Some(error);
                }
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
