use std::cell::Cell;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::{MAX_BUDGET, TokenTree};

/// One token that the drafter proposes at some depth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Token id.
    pub token: u32,
    /// Natural log-probability under the drafter's distribution over the whole vocabulary.
    pub log_prob: f32,
}

/// Candidates `[depth][rank]`, best first, ties to the lower token id. Entry 0 holds the children of the root.
///
/// A depth ends at its first log-probability that is not finite, and the first depth that is empty ends the draft.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DepthCandidates(pub Vec<Vec<Candidate>>);

impl DepthCandidates {
    /// The candidate at `depth` (0 below the root) and `rank`, if both exist.
    fn get(&self, depth: usize, rank: usize) -> Option<Candidate> {
        let candidate = *self.0.get(depth)?.get(rank)?;
        candidate.log_prob.is_finite().then_some(candidate)
    }
}

/// The chain of each depth's best candidate (plain DFlash), at most [`MAX_BUDGET`] long.
pub fn chain(root: u32, depths: &DepthCandidates) -> TokenTree {
    let mut tree = TokenTree::with_capacity(root, depths.0.len());
    let mut log_prob = 0.0;
    for depth in 0..depths.0.len() {
        let Some(candidate) = depths.get(depth, 0) else {
            break;
        };
        log_prob += f64::from(candidate.log_prob);
        if tree.push(depth, candidate.token, log_prob).is_err() {
            break;
        }
    }
    tree
}

/// The tree of at most `budget` nodes below `root` with the greatest sum of path probabilities when depths are
/// independent: best-first search over prefix-closed paths (DDTree, arXiv 2604.12989; `build_ddtree_tree`,
/// liranringel/ddtree).
///
/// Nodes come in pop order, so the tree of a smaller budget is a prefix of the tree of a larger one. Log-probabilities
/// are widened to f64 and added in the order of the reference. Ties go to the lexicographically lower rank path, a
/// prefix before its extensions. A budget above [`MAX_BUDGET`] counts as that.
pub fn best_first(root: u32, depths: &DepthCandidates, budget: usize) -> TokenTree {
    let budget = budget.min(MAX_BUDGET);
    let mut tree = TokenTree::with_capacity(root, budget);
    let paths = RankPaths::new(budget);
    let mut frontier = BinaryHeap::with_capacity(2 * budget + 1);
    frontier.extend(Open::first_child(&paths, depths, 0, 0, 0.0));

    while tree.budget() < budget {
        let Some(best) = frontier.pop() else {
            break;
        };
        frontier.extend(best.next_sibling(depths));
        // A drafter that lists a token twice at one depth gets it once: the better entry came first.
        let Ok(node) = tree.push(best.parent, best.candidate.token, best.log_prob) else {
            continue;
        };
        paths.record(node, best.step());
        frontier.extend(Open::first_child(
            &paths,
            depths,
            node,
            best.depth + 1,
            best.log_prob,
        ));
    }
    tree
}

/// The last step of a node's rank path: below which node, at which depth, which rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Step {
    parent: usize,
    depth: usize,
    rank: usize,
}

/// The last step of every node's rank path. Paths are compared by climbing and never stored whole; cells let the
/// heap's entries share the table while the builder extends it.
struct RankPaths(Vec<Cell<Step>>);

impl RankPaths {
    fn new(budget: usize) -> Self {
        Self(vec![Cell::new(Step::default()); budget + 1])
    }

    fn record(&self, node: usize, step: Step) {
        self.0[node].set(step);
    }

    fn parent_step(&self, step: Step) -> Step {
        self.0[step.parent].get()
    }

    fn lift(&self, mut step: Step, depth: usize) -> Step {
        while step.depth > depth {
            step = self.parent_step(step);
        }
        step
    }

    /// Lexicographic order of the rank paths that end in `a` and `b`, a prefix before its extensions.
    fn compare(&self, a: Step, b: Step) -> Ordering {
        let shared_depth = a.depth.min(b.depth);
        let (mut above_a, mut above_b) = (self.lift(a, shared_depth), self.lift(b, shared_depth));
        if above_a == above_b {
            return a.depth.cmp(&b.depth);
        }
        while above_a.parent != above_b.parent {
            above_a = self.parent_step(above_a);
            above_b = self.parent_step(above_b);
        }
        above_a.rank.cmp(&above_b.rank)
    }
}

/// A node that may be added next: its parent is in the tree and its better siblings are.
struct Open<'a> {
    paths: &'a RankPaths,
    candidate: Candidate,
    log_prob: f64,
    parent: usize,
    depth: usize,
    rank: usize,
}

impl<'a> Open<'a> {
    fn first_child(
        paths: &'a RankPaths,
        depths: &DepthCandidates,
        parent: usize,
        depth: usize,
        parent_log_prob: f64,
    ) -> Option<Self> {
        let candidate = depths.get(depth, 0)?;
        Some(Self {
            paths,
            candidate,
            log_prob: parent_log_prob + f64::from(candidate.log_prob),
            parent,
            depth,
            rank: 0,
        })
    }

    fn next_sibling(&self, depths: &DepthCandidates) -> Option<Self> {
        let rank = self.rank + 1;
        let candidate = depths.get(self.depth, rank)?;
        Some(Self {
            candidate,
            // Left to right as in the reference: another order gives other last bits.
            log_prob: self.log_prob - f64::from(self.candidate.log_prob)
                + f64::from(candidate.log_prob),
            rank,
            ..*self
        })
    }

    fn step(&self) -> Step {
        Step {
            parent: self.parent,
            depth: self.depth,
            rank: self.rank,
        }
    }
}

/// Greater is better: the heap pops the most probable, then the lowest rank path.
impl Ord for Open<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.log_prob
            .total_cmp(&other.log_prob)
            .then_with(|| self.paths.compare(other.step(), self.step()))
    }
}

impl PartialOrd for Open<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Open<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Open<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    fn depths(raw: &[&[(u32, f32)]]) -> DepthCandidates {
        DepthCandidates(
            raw.iter()
                .map(|ranks| {
                    ranks
                        .iter()
                        .map(|&(token, log_prob)| Candidate { token, log_prob })
                        .collect()
                })
                .collect(),
        )
    }

    #[test]
    fn nothing_to_draft_is_the_root() {
        for empty in [
            depths(&[]),
            depths(&[&[], &[(1, -0.5)]]),
            depths(&[&[(1, f32::NAN), (2, -0.5)]]),
            depths(&[&[(1, f32::NEG_INFINITY)]]),
        ] {
            assert_eq!(best_first(9, &empty, 8), TokenTree::root_only(9));
            assert_eq!(chain(9, &empty), TokenTree::root_only(9));
        }
    }

    #[test]
    fn a_zero_budget_is_the_root() {
        let depths = depths(&[&[(1, -0.5)]]);
        assert_eq!(best_first(9, &depths, 0), TokenTree::root_only(9));
    }

    #[test]
    fn a_depth_ends_at_its_first_log_prob_that_is_no_number() {
        let depths = depths(&[
            &[(1, -0.1), (2, f32::NEG_INFINITY), (3, -0.2)],
            &[(4, -0.1), (5, f32::NAN)],
        ]);
        assert_eq!(best_first(9, &depths, 100).tokens(), [9, 1, 4]);
    }

    #[test]
    fn a_budget_beyond_the_candidates_takes_them_all() {
        let depths = depths(&[&[(1, -0.1), (2, -3.0)], &[(3, -0.2), (4, -4.0)]]);
        assert_eq!(best_first(9, &depths, usize::MAX).budget(), 6);
    }

    #[test]
    fn a_token_listed_twice_is_one_child() {
        let depths = depths(&[&[(1, -0.1), (1, -0.2), (2, -3.0)]]);
        let tree = best_first(9, &depths, 3);
        assert_eq!(tree.tokens(), [9, 1, 2]);
    }

    #[test]
    fn equal_log_probs_go_by_rank_path() {
        // All four two-step paths weigh the same, and so do both single steps.
        let depths = depths(&[&[(1, -1.0), (2, -1.0)], &[(3, -1.0), (4, -1.0)]]);
        let tree = best_first(9, &depths, 6);
        assert_eq!(tree.tokens(), [9, 1, 2, 3, 4, 3, 4]);
        assert_eq!(tree.path(4), [0, 1, 4]);
        assert_eq!(tree.path(5), [0, 2, 5]);
    }

    #[test]
    fn a_certain_extension_comes_before_an_equal_sibling() {
        // Log-probability 0: the child weighs as much as its parent, and (0, 0) is before (1).
        let depths = depths(&[&[(1, -1.0), (2, -1.0)], &[(3, 0.0)]]);
        assert_eq!(best_first(9, &depths, 4).tokens(), [9, 1, 3, 2, 3]);
    }

    #[test]
    fn sums_follow_the_order_of_the_reference() {
        let (first, second, below) = (-0.1f32, -0.3f32, -0.7f32);
        let depths = depths(&[&[(1, first), (2, second)], &[(3, below)]]);
        let tree = best_first(9, &depths, 4);
        let sibling = f64::from(first) - f64::from(first) + f64::from(second);
        assert_eq!(
            tree.log_probs(),
            [
                0.0,
                f64::from(first),
                sibling,
                f64::from(first) + f64::from(below),
                sibling + f64::from(below),
            ]
        );
    }
}
