//! The ragged batch: rows of several sequences that go through the target in one forward.

use treespec_sampling::{Processors, TokenMask};
use treespec_tree::{AncestorSets, TokenTree};

use crate::{BlockTable, EngineError};

/// What one row wants from the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadRequest {
    /// How many of the best tokens to return.
    pub top_k: usize,
    /// Whether to compute the log-normaliser (needed for log-probabilities, not for the argmax).
    pub normaliser: bool,
    /// A token whose logit to return besides.
    pub gather: Option<u32>,
    /// Whether to return the rank of the chosen token.
    pub rank: bool,
    /// Top tokens, normaliser, chosen token and rank are those of the distribution that the token is drawn from
    /// ([`treespec_sampling::distribution`]), not of the logits as they are. `gather` is not concerned.
    pub processed: bool,
}

impl HeadRequest {
    /// Only the best token: all that greedy acceptance needs.
    pub const ARGMAX: Self = Self {
        top_k: 1,
        normaliser: false,
        gather: None,
        rank: false,
        processed: false,
    };
}

/// How the rows of a sequence choose the tokens behind them. Row `i` chooses the token of position `position(i) + 1`.
#[derive(Debug, Clone, Copy)]
pub struct RowChoices<'a> {
    /// What holds for all rows. Path and grammar are not read: the path of a row are its ancestors and itself.
    pub processors: Processors<'a>,
    /// What can come behind each row; empty where anything can.
    pub grammar: &'a [TokenMask],
    /// Leading rows that the counts of the processors have already.
    pub counted_rows: usize,
}

impl<'a> From<Processors<'a>> for RowChoices<'a> {
    fn from(processors: Processors<'a>) -> Self {
        Self {
            processors,
            grammar: &[],
            counted_rows: 0,
        }
    }
}

impl RowChoices<'_> {
    /// True when every row takes its most probable token.
    pub fn is_argmax(&self) -> bool {
        self.grammar.is_empty() && self.processors.is_argmax()
    }

    /// [`EngineError::InvalidBatch`] unless there is a mask for every row, or none.
    pub(crate) fn validate(&self, rows: usize) -> Result<(), EngineError> {
        if self.grammar.is_empty() || self.grammar.len() == rows {
            return Ok(());
        }
        Err(EngineError::InvalidBatch(format!(
            "{} grammar masks for {rows} rows",
            self.grammar.len()
        )))
    }
}

/// How the rows of a sequence see each other. Every row sees all committed rows and itself.
#[derive(Debug, Clone, Copy)]
pub enum RowShape<'a> {
    /// Row `i` sees rows `0..i`: prefill and plain decoding.
    Chain,
    /// Row `i` is node `i` of a tree and sees its ancestors; its position is the root's plus its depth.
    Tree {
        /// Depth of every row, 0 for the root.
        depths: &'a [u32],
        /// Ancestors of every row, itself included.
        ancestors: &'a AncestorSets,
    },
}

/// New rows of one sequence. Row `i` is written to KV slot `committed + i`.
#[derive(Debug, Clone)]
pub struct SequenceRows<'a> {
    /// KV blocks with room for `committed + tokens.len()` rows.
    pub table: &'a BlockTable,
    /// Rows already in the cache; also the position of the first new row.
    pub committed: usize,
    /// Token ids of the rows.
    pub tokens: &'a [u32],
    /// Mutual visibility.
    pub shape: RowShape<'a>,
    /// One entry per row; `None` skips the head for that row.
    pub head: &'a [Option<HeadRequest>],
    /// How the rows that ask for a token of the head choose the one behind them, see [`crate::HeadRow::chosen`]; `None`, and
    /// rules that take the best, choose nothing.
    pub sampling: Option<RowChoices<'a>>,
    /// Whether to return the drafter's context features of every row.
    pub features: bool,
}

/// A batch for one forward.
#[derive(Debug, Clone, Default)]
pub struct RowBatch<'a> {
    /// Every sequence at most once.
    pub sequences: Vec<SequenceRows<'a>>,
}

impl SequenceRows<'_> {
    /// Absolute position of row `row`.
    pub fn position(&self, row: usize) -> usize {
        self.committed
            + match self.shape {
                RowShape::Chain => row,
                RowShape::Tree { depths, .. } => depths[row] as usize,
            }
    }

    /// How a row that asks for the head chooses a token; `None` when the best is all that is asked for.
    pub fn sampled(&self) -> Option<RowChoices<'_>> {
        drawn(self.sampling)
    }

    /// Tokens of the rows from `first` on that `row` sees, itself last.
    pub(crate) fn path(&self, row: usize, first: usize) -> Vec<u32> {
        match self.shape {
            RowShape::Chain => self.tokens.get(first..=row).unwrap_or_default().to_vec(),
            RowShape::Tree { ancestors, .. } => ancestors
                .iter(row)
                .filter(|&node| node >= first)
                .map(|node| self.tokens[node])
                .collect(),
        }
    }

    /// Checks everything that a forward relies on, so that no backend has to.
    ///
    /// # Errors
    /// [`EngineError::UnknownToken`], [`EngineError::ContextOverflow`] or [`EngineError::InvalidBatch`].
    pub fn validate(&self, vocab_size: usize, context_length: usize) -> Result<(), EngineError> {
        let rows = self.tokens.len();
        let invalid = |what: String| Err(EngineError::InvalidBatch(what));
        if rows == 0 {
            return invalid("a sequence without rows".into());
        }
        if self.head.len() != rows {
            return invalid(format!("{} head requests for {rows} rows", self.head.len()));
        }
        if let RowShape::Tree { depths, ancestors } = self.shape
            && (depths.len() != rows || ancestors.len() != rows)
        {
            return invalid(format!("a tree of {} nodes for {rows} rows", depths.len()));
        }
        self.sampling
            .map_or(Ok(()), |choices| choices.validate(rows))?;
        let gathered = self.head.iter().flatten().filter_map(|h| h.gather);
        check_tokens(self.tokens.iter().copied().chain(gathered), vocab_size)?;
        check_room(self.table, self.committed, rows)?;
        let position = (0..rows).map(|r| self.position(r)).max().unwrap_or(0);
        check_position(position, context_length)
    }
}

/// How tokens are chosen, unless simply the best one is taken.
pub(crate) fn drawn(sampling: Option<RowChoices<'_>>) -> Option<RowChoices<'_>> {
    sampling.filter(|choices| !choices.is_argmax())
}

/// [`EngineError::UnknownToken`] for the first token outside the vocabulary.
pub(crate) fn check_tokens(
    mut tokens: impl Iterator<Item = u32>,
    vocab_size: usize,
) -> Result<(), EngineError> {
    match tokens.find(|&token| token as usize >= vocab_size) {
        Some(token) => Err(EngineError::UnknownToken { token, vocab_size }),
        None => Ok(()),
    }
}

/// [`EngineError::InvalidBatch`] when the table has no room for `rows` more rows.
pub(crate) fn check_room(
    table: &BlockTable,
    committed: usize,
    rows: usize,
) -> Result<(), EngineError> {
    if committed
        .checked_add(rows)
        .is_some_and(|all| all <= table.capacity())
    {
        return Ok(());
    }
    Err(EngineError::InvalidBatch(format!(
        "{} KV slots for {committed} rows and {rows} more",
        table.capacity()
    )))
}

/// [`EngineError::ContextOverflow`] for a position that the model does not have.
pub(crate) fn check_position(position: usize, context_length: usize) -> Result<(), EngineError> {
    if position < context_length {
        return Ok(());
    }
    Err(EngineError::ContextOverflow {
        position,
        context_length,
    })
}

impl<'a> RowShape<'a> {
    /// The shape of a tree whose ancestor sets were computed before.
    pub fn tree(tree: &'a TokenTree, ancestors: &'a AncestorSets) -> Self {
        Self::Tree {
            depths: tree.depths(),
            ancestors,
        }
    }
}
