//! From the head rows of a block to the draft, on whichever side the top-k pass ran.

use treespec_tree::{Candidate, DepthCandidates, TokenTree};

use crate::HeadRow;

/// Shape of a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftShape {
    /// The argmax of every slot (DFlash).
    Chain,
    /// Best-first tree (DDTree).
    Tree {
        /// Nodes below the root.
        budget: usize,
    },
}

impl DraftShape {
    /// How many candidates a depth can need: siblings of one parent never exceed the budget
    /// (`topk = min(budget, V)` in the reference builder).
    pub fn candidates_per_depth(&self, vocab_size: usize) -> usize {
        match *self {
            Self::Chain => 1,
            Self::Tree { budget } => budget.clamp(1, vocab_size),
        }
    }
}

/// Builds the draft below `root` from the head rows of slots `1..block_size`, which need their normaliser.
pub fn build_draft(root: u32, rows: &[HeadRow], shape: DraftShape) -> TokenTree {
    let depths = DepthCandidates(rows.iter().map(candidates).collect());
    match shape {
        DraftShape::Chain => treespec_tree::chain(root, &depths),
        DraftShape::Tree { budget } => treespec_tree::best_first(root, &depths, budget),
    }
}

fn candidates(row: &HeadRow) -> Vec<Candidate> {
    row.top
        .iter()
        .map(|scored| Candidate {
            token: scored.token,
            log_prob: scored.score - row.log_normaliser,
        })
        .collect()
}
