//! Growing a tree of legal tokens from a draft. Knows nothing of grammars: what may follow a path is asked for.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::Duration;

use treespec_sampling::TokenMask;
use treespec_tree::{Candidate, MAX_BUDGET, TokenTree};

/// What [`Continuation::likely`] is taken to be worth next to a token that is the only legal one (0): ahead of nearly
/// everything that a drafter proposes, and behind another path that is as good up to here but certain.
pub const LIKELY_LOG_PROB: f64 = -0.05;

/// How far a tree may grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeLimits {
    /// Most nodes below the root; [`MAX_BUDGET`] at most counts.
    pub nodes: usize,
    /// Most nodes on a path below the root.
    pub depth: usize,
    /// How long the tree may grow. A draft that takes longer costs more than it saves, and the masks of some grammars take a
    /// tenth of a second each. Checked by [`Grammar::constrain`](crate::Grammar::constrain).
    pub time: Duration,
}

/// A tree in which every token may follow its parent.
#[derive(Debug, Clone, PartialEq)]
pub struct ConstrainedTree {
    /// The tree, in pop order like every other.
    pub tree: TokenTree,
    /// What may follow each node, root first; as many as the tree has nodes.
    pub masks: Vec<TokenMask>,
}

/// What may follow a path of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Continuation {
    /// All tokens that may; not empty.
    pub mask: TokenMask,
    /// One of them that is expected although others are legal too. Where only one is, it need not be named.
    pub likely: Option<u32>,
}

/// The rules that a tree follows.
pub trait Continuations {
    /// What may follow the tokens of `path`, the root's left out; `None` where nothing can, so that the path leads
    /// nowhere. Asked at most once per path, and never beyond a token that ends the answer.
    fn after(&mut self, path: &[u32]) -> Option<Continuation>;

    /// Whether the token ends the answer.
    fn is_end(&self, token: u32) -> bool;

    /// The mask of a node that ends the answer. Nothing follows it, so it only has to be harmless.
    fn after_end(&self) -> TokenMask;
}

/// The legal tree with the greatest sum of path probabilities, as [`treespec_tree::best_first`] grows it, over the
/// candidates of `draft`: the tokens that it has at each depth, wherever it has them. A node whose mask holds one token
/// has that child at log-probability 0, drafted or not, and the likely child of a node is added to its candidates.
///
/// Nodes come in pop order, and ties go to the lower rank path, a prefix before its extensions: with fewer nodes allowed
/// the tree is a prefix. `None` when nothing may follow the root.
pub fn grow(
    draft: &TokenTree,
    limits: TreeLimits,
    rules: &mut impl Continuations,
) -> Option<ConstrainedTree> {
    let depths = distinct_candidates(draft);
    let nodes = limits.nodes.min(MAX_BUDGET);
    let mut tree = TokenTree::root_only(draft.tokens()[0]);
    let Continuation { mask, likely } = rules.after(&[])?;
    let mut grown = vec![Grown {
        children: legal_children(&mask, likely, depths.first()),
        ..Grown::default()
    }];
    let mut masks = vec![mask];
    let mut frontier = BinaryHeap::new();
    if limits.depth > 0 {
        frontier.extend(Open::child(&grown, 0, 0, 0.0));
    }

    while tree.budget() < nodes {
        let Some(best) = frontier.pop() else {
            break;
        };
        let parent_log_prob = tree.log_probs()[best.parent];
        frontier.extend(Open::child(
            &grown,
            best.parent,
            best.rank() + 1,
            parent_log_prob,
        ));
        let mut path = grown[best.parent].path.clone();
        path.push(best.token);
        let ends = rules.is_end(best.token);
        let continuation = if ends {
            Some(Continuation {
                mask: rules.after_end(),
                likely: None,
            })
        } else {
            rules.after(&path)
        };
        let Some(Continuation { mask, likely }) = continuation else {
            continue;
        };
        let Ok(node) = tree.push(best.parent, best.token, best.log_prob) else {
            continue;
        };
        let depth = path.len();
        let children = if ends || depth >= limits.depth {
            Vec::new()
        } else {
            legal_children(&mask, likely, depths.get(depth))
        };
        masks.push(mask);
        grown.push(Grown {
            path,
            ranks: best.ranks.0,
            children,
        });
        frontier.extend(Open::child(&grown, node, 0, best.log_prob));
    }
    Some(ConstrainedTree { tree, masks })
}

/// The distinct tokens that `draft` has at each depth, best first; those with equal log-probabilities in node order,
/// which is the drafter's own. What is no finite log-probability is left out.
fn distinct_candidates(draft: &TokenTree) -> Vec<Vec<Candidate>> {
    let mut depths: Vec<Vec<Candidate>> = vec![Vec::new(); draft.max_depth() as usize];
    for node in 1..draft.len() {
        let (Some(parent), depth) = (draft.parent(node), draft.depth(node) as usize) else {
            continue;
        };
        let token = draft.tokens()[node];
        let log_prob = (draft.log_probs()[node] - draft.log_probs()[parent]) as f32;
        let candidates = &mut depths[depth - 1];
        let known = candidates.iter().any(|candidate| candidate.token == token);
        if log_prob.is_finite() && !known {
            // A drafter elsewhere may send anything; above 0 a path would be better than what it starts with.
            candidates.push(Candidate {
                token,
                log_prob: log_prob.min(0.0),
            });
        }
    }
    for candidates in &mut depths {
        candidates.sort_by(|a, b| b.log_prob.total_cmp(&a.log_prob));
    }
    depths
}

/// Children of a node in rank order, with the log-probability of each step.
fn legal_children(
    mask: &TokenMask,
    likely: Option<u32>,
    candidates: Option<&Vec<Candidate>>,
) -> Vec<(u32, f64)> {
    if let Some(only) = only_token(mask) {
        return vec![(only, 0.0)];
    }
    let drafted = candidates
        .into_iter()
        .flatten()
        .filter(|candidate| mask.contains(candidate.token) && Some(candidate.token) != likely)
        .map(|candidate| (candidate.token, f64::from(candidate.log_prob)));
    let mut children: Vec<_> = likely
        .filter(|&token| mask.contains(token))
        .map(|token| (token, LIKELY_LOG_PROB))
        .into_iter()
        .chain(drafted)
        .collect();
    children.sort_by(|a, b| b.1.total_cmp(&a.1));
    children
}

/// The token of a set of one.
fn only_token(mask: &TokenMask) -> Option<u32> {
    let mut used = mask
        .words()
        .iter()
        .enumerate()
        .filter(|&(_, &word)| word != 0);
    let (index, word) = used.next()?;
    let is_only = word.is_power_of_two() && used.next().is_none();
    is_only.then(|| index as u32 * 32 + word.trailing_zeros())
}

/// What the search keeps of a node of the tree.
#[derive(Debug, Default)]
struct Grown {
    /// Tokens from below the root to the node.
    path: Vec<u32>,
    /// Ranks of the same steps.
    ranks: Vec<usize>,
    /// Its legal children.
    children: Vec<(u32, f64)>,
}

/// A node that may be added next: its parent is in the tree, and its better siblings have been tried.
struct Open {
    log_prob: f64,
    /// Lower is better, and a prefix is lower than its extensions.
    ranks: Reverse<Vec<usize>>,
    parent: usize,
    token: u32,
}

impl Open {
    fn child(grown: &[Grown], parent: usize, rank: usize, parent_log_prob: f64) -> Option<Self> {
        let above = &grown[parent];
        let &(token, log_prob) = above.children.get(rank)?;
        let mut ranks = above.ranks.clone();
        ranks.push(rank);
        Some(Self {
            log_prob: parent_log_prob + log_prob,
            ranks: Reverse(ranks),
            parent,
            token,
        })
    }

    fn rank(&self) -> usize {
        self.ranks.0.last().copied().unwrap_or_default()
    }
}

/// Greater is better: the heap pops the most probable, then the lowest rank path.
impl Ord for Open {
    fn cmp(&self, other: &Self) -> Ordering {
        self.log_prob
            .total_cmp(&other.log_prob)
            .then_with(|| self.ranks.cmp(&other.ranks))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Open {}

#[cfg(test)]
#[path = "growth_tests.rs"]
mod tests;
