//! From the head rows of a block to the draft, on whichever side the top-k pass ran.

use treespec_tree::{Candidate, DepthCandidates, TokenTree};

use crate::HeadRow;
use crate::coupling::{CoupledRanking, RANKED_CANDIDATES};

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
    /// How many slots of a block can matter: a tree is never deeper than its budget, so the top-k pass can leave the
    /// others out.
    pub fn depths(&self, block_size: usize) -> usize {
        let drafted = block_size.saturating_sub(1);
        match *self {
            Self::Chain => drafted,
            Self::Tree { budget } => drafted.min(budget),
        }
    }

    /// Nodes below the root that a draft can have.
    pub fn most_nodes(&self, block_size: usize) -> usize {
        match *self {
            Self::Chain => self.depths(block_size),
            Self::Tree { budget } => budget,
        }
    }

    /// How many candidates a depth can need: siblings of one parent never exceed the budget
    /// (`topk = min(budget, V)` in the reference builder).
    pub fn candidates_per_depth(&self, vocab_size: usize) -> usize {
        match *self {
            Self::Chain => 1,
            Self::Tree { budget } => budget.clamp(1, vocab_size),
        }
    }

    /// Likewise when noise can change the order of the candidates.
    pub fn coupled_candidates_per_depth(&self, vocab_size: usize) -> usize {
        let kept = self.candidates_per_depth(vocab_size);
        kept.max(RANKED_CANDIDATES.min(vocab_size))
    }
}

/// Builds the draft below `root` from the head rows of slots `1..block_size`, which need their normaliser. Candidates are
/// ranked by the drafter's probability, or as `ranking` says.
pub fn build_draft(
    root: u32,
    rows: &[HeadRow],
    shape: DraftShape,
    ranking: Option<&CoupledRanking<'_>>,
) -> TokenTree {
    let ranked = |(depth, row): (usize, &HeadRow)| match ranking {
        Some(ranking) => ranking.candidates(row, depth),
        None => candidates(row),
    };
    let depths = DepthCandidates(rows.iter().enumerate().map(ranked).collect());
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

#[cfg(test)]
mod tests {
    use super::*;
    use treespec_sampling::ScoredToken;

    #[test]
    fn leaving_out_slots_and_candidates_beyond_the_budget_does_not_change_the_tree() {
        let row = |slot: u32| HeadRow {
            log_normaliser: 1.0,
            top: (0..40)
                .map(|rank| ScoredToken {
                    token: slot * 100 + rank,
                    // Flat and nearly equal: trees as wide and as deep as they get.
                    score: -0.001 * (rank * (slot % 3 + 1)) as f32,
                })
                .collect(),
            gathered: None,
            chosen: None,
            rank: None,
        };
        let rows: Vec<HeadRow> = (0..15).map(row).collect();
        for budget in 1..=20 {
            let shape = DraftShape::Tree { budget };
            let needed: Vec<HeadRow> = rows[..shape.depths(16)]
                .iter()
                .map(|row| HeadRow {
                    top: row.top[..shape.candidates_per_depth(40)].to_vec(),
                    ..row.clone()
                })
                .collect();
            assert_eq!(
                build_draft(7, &needed, shape, None),
                build_draft(7, &rows, shape, None)
            );
        }
    }
}
