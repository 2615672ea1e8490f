//! What `bench step` runs.

use anyhow::{Result, ensure};
use treespec_tree::{Candidate, DepthCandidates, MAX_BUDGET, TokenTree, best_first};

/// Depths of a block drafter with 16 slots.
const DEPTHS: usize = 15;
/// Spreads the tokens over the embedding, so that no forward finds its rows in the cache by luck.
const TOKEN_STRIDE: usize = 7919;

/// The `index`-th token of a benchmark's prompts and trees.
pub(super) fn token(index: usize, vocabulary: usize) -> u32 {
    (index * TOKEN_STRIDE % vocabulary) as u32
}

/// What one step runs.
#[derive(Debug)]
pub(super) enum Work {
    /// A tree to verify.
    Tree(TokenTree),
    /// More rows than a tree has: a chunk of a prompt.
    Prompt(Vec<u32>),
}

impl Work {
    /// `rows` rows over a vocabulary of `vocabulary` tokens.
    ///
    /// # Errors
    /// A vocabulary that is too small for such a tree.
    pub(super) fn new(rows: usize, vocabulary: usize) -> Result<Self> {
        if rows > MAX_BUDGET + 1 {
            let tokens = (0..rows).map(|index| token(index, vocabulary));
            return Ok(Self::Prompt(tokens.collect()));
        }
        let tree = tree(rows, vocabulary);
        ensure!(
            tree.len() == rows,
            "--rows {rows}: the vocabulary of {vocabulary} tokens is too small for such a tree"
        );
        Ok(Self::Tree(tree))
    }

    /// Rows of the forward.
    pub(super) fn rows(&self) -> usize {
        match self {
            Self::Tree(tree) => tree.len(),
            Self::Prompt(tokens) => tokens.len(),
        }
    }

    /// Rows that run through the head: the target chooses at every node of a tree, but only after the last token of a
    /// prompt.
    pub(super) fn head_rows(&self) -> usize {
        match self {
            Self::Tree(tree) => tree.len(),
            Self::Prompt(_) => 1,
        }
    }
}

/// A best-first tree of at most `rows` nodes with its root, of the form that a drafter's log-probabilities give: deep along
/// the best candidates, wide near the root.
fn tree(rows: usize, vocabulary: usize) -> TokenTree {
    let depth = |depth: usize| {
        let candidate = |rank: usize| Candidate {
            token: token(1 + depth * rows + rank, vocabulary),
            log_prob: -0.4 - 0.9 * (rank as f32).sqrt(),
        };
        (0..rows.min(vocabulary)).map(candidate).collect()
    };
    let candidates = DepthCandidates((0..DEPTHS).map(depth).collect());
    best_first(0, &candidates, rows.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_have_the_rows_and_both_depth_and_width() {
        for rows in [1, 2, 8, 16, 33, 64, 128, 256] {
            assert_eq!(tree(rows, 151_936).len(), rows);
            assert!(matches!(Work::new(rows, 560), Ok(Work::Tree(_))));
        }
        let tree = tree(64, 560);
        assert!(tree.max_depth() >= 6, "{}", tree.max_depth());
        assert!(tree.children(0).count() >= 6);
        assert!(!tree.is_chain());
    }

    #[test]
    fn rows_beyond_a_tree_are_a_prompt() {
        let Ok(Work::Prompt(tokens)) = Work::new(512, 560) else {
            panic!("not a prompt")
        };
        assert_eq!(tokens.len(), 512);
        assert!(tokens.iter().all(|&token| token < 560));
        assert!(Work::new(64, 1).is_err());
    }
}
