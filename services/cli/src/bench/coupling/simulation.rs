//! What drafts of some shape and ranking would have saved on recorded answers: the steps that the target would have made.

use treespec_checkpoint::CouplingProfile;
use treespec_engine::{CoupledRanking, DraftShape, build_draft};
use treespec_sampling::Coupling;
use treespec_tree::walk;

use super::traces::Trace;

/// Tokens and steps of some answers, each without its first token, which belongs to the prompt's forward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Steps {
    pub(crate) tokens: usize,
    pub(crate) steps: usize,
}

impl Steps {
    pub(crate) fn tokens_per_step(self) -> f64 {
        self.tokens as f64 / self.steps.max(1) as f64
    }
}

/// Decodes the answers again with drafts of `shape`. The seed of `coupling` is each answer's own.
pub(crate) fn simulate(
    traces: &[Trace],
    shape: DraftShape,
    coupling: Coupling,
    profile: Option<&CouplingProfile>,
) -> Steps {
    let mut total = Steps::default();
    for trace in traces {
        let coupling = Coupling {
            seed: trace.seed,
            ..coupling
        };
        let mut at = 0;
        while let Some(rows) = trace.blocks.get(at) {
            let root_position = (trace.start + at) as u32;
            let ranking = CoupledRanking::new(coupling, profile, root_position);
            let rows = &rows[..shape.depths(rows.len() + 1)];
            let tree = build_draft(trace.tokens[at], rows, shape, ranking.as_ref());
            let chosen = |node: usize| {
                let next = at + 1 + tree.depths()[node] as usize;
                // Behind the answer's end nothing is accepted.
                trace.tokens.get(next).copied().unwrap_or(u32::MAX)
            };
            let path = walk(&tree, chosen).path.len();
            let left = trace.tokens.len() - 1 - at;
            total.tokens += path.min(left);
            total.steps += 1;
            at += path;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use treespec_engine::{HeadRow, ScoredToken};
    use treespec_sampling::Ranking;

    use super::*;

    /// Proposes `first + depth` with certainty.
    fn block(first: u32) -> Vec<HeadRow> {
        let row = |depth: u32| HeadRow {
            log_normaliser: 0.0,
            top: vec![ScoredToken {
                token: first + depth,
                score: 0.0,
            }],
            gathered: None,
            chosen: None,
            rank: None,
        };
        (0..3).map(row).collect()
    }

    #[test]
    fn steps_are_those_of_the_accepted_drafts() {
        let trace = Trace {
            seed: 1,
            start: 10,
            tokens: vec![5, 6, 7, 8, 50, 51],
            // Right for three tokens; wrong; wrong; wrong; right to the end and beyond.
            blocks: vec![block(6), block(90), block(90), block(90), block(51)],
        };
        let coupling = Coupling {
            seed: 0,
            temperature: 1.0,
            ranking: Ranking::Plain,
        };
        let steps = simulate(&[trace], DraftShape::Chain, coupling, None);
        // 6, 7, 8 and 50 by the first step, 51 by the second.
        assert_eq!(
            steps,
            Steps {
                tokens: 5,
                steps: 2
            }
        );
    }
}
