use crate::{AncestorSets, MAX_BUDGET, TreeError};

/// A tree of candidate tokens. Node 0 is the root: the decided token that has not been run through the target yet.
///
/// Parents precede their children, siblings carry distinct tokens, and there are at most [`MAX_BUDGET`] nodes below
/// the root. Node order is the builder's pop order, so every prefix of the nodes is a tree too.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenTree {
    tokens: Vec<u32>,
    /// Entry 0 is unused: the root has no parent.
    parents: Vec<usize>,
    depths: Vec<u32>,
    log_probs: Vec<f64>,
}

impl TokenTree {
    /// The tree that drafts nothing.
    pub fn root_only(token: u32) -> Self {
        Self::with_capacity(token, 0)
    }

    /// The tree that drafts nothing, with room for `budget` more nodes.
    pub(crate) fn with_capacity(token: u32, budget: usize) -> Self {
        let nodes = budget.min(MAX_BUDGET) + 1;
        let mut tree = Self {
            tokens: Vec::with_capacity(nodes),
            parents: Vec::with_capacity(nodes),
            depths: Vec::with_capacity(nodes),
            log_probs: Vec::with_capacity(nodes),
        };
        tree.append(0, token, 0, 0.0);
        tree
    }

    /// Builds a tree from parallel arrays; `parents[0]` is -1. All log-probabilities are 0.
    ///
    /// # Errors
    /// [`TreeError`] names the first node that breaks an invariant of the tree.
    pub fn from_parents(tokens: &[u32], parents: &[i32]) -> Result<Self, TreeError> {
        if tokens.len() != parents.len() {
            return Err(TreeError::LengthMismatch {
                tokens: tokens.len(),
                parents: parents.len(),
            });
        }
        let (Some(&root), Some(&root_parent)) = (tokens.first(), parents.first()) else {
            return Err(TreeError::Empty);
        };
        if root_parent != -1 {
            return Err(TreeError::RootHasParent {
                parent: root_parent,
            });
        }
        let mut tree = Self::with_capacity(root, tokens.len() - 1);
        for (node, (&token, &parent)) in tokens.iter().zip(parents).enumerate().skip(1) {
            let earlier = usize::try_from(parent).map_err(|_| TreeError::ParentNotEarlier {
                node,
                parent: parent.into(),
            })?;
            tree.push(earlier, token, 0.0)?;
        }
        Ok(tree)
    }

    /// Adds a child of `parent` and returns its index. `log_prob` is that of the whole path from the root.
    ///
    /// # Errors
    /// [`TreeError`] when `parent` does not exist, already has a child `token`, or the tree is full.
    pub fn push(&mut self, parent: usize, token: u32, log_prob: f64) -> Result<usize, TreeError> {
        let node = self.len();
        if node > MAX_BUDGET {
            return Err(TreeError::TooLarge);
        }
        if parent >= node {
            return Err(TreeError::ParentNotEarlier {
                node,
                parent: i64::try_from(parent).unwrap_or(i64::MAX),
            });
        }
        if let Some(sibling) = self.child(parent, token) {
            return Err(TreeError::DuplicateSibling {
                node,
                sibling,
                parent,
                token,
            });
        }
        self.append(parent, token, self.depths[parent] + 1, log_prob);
        Ok(node)
    }

    fn append(&mut self, parent: usize, token: u32, depth: u32, log_prob: f64) {
        self.tokens.push(token);
        self.parents.push(parent);
        self.depths.push(depth);
        self.log_probs.push(log_prob);
    }

    /// Number of nodes, root included; at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a tree always has its root")]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Number of nodes below the root.
    pub fn budget(&self) -> usize {
        self.len() - 1
    }

    /// Token of every node.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Parent of `node`; `None` for the root and for nodes that do not exist.
    pub fn parent(&self, node: usize) -> Option<usize> {
        if node == 0 {
            return None;
        }
        self.parents.get(node).copied()
    }

    /// Distance of `node` from the root.
    ///
    /// # Panics
    /// When `node` does not exist, like a slice index.
    pub fn depth(&self, node: usize) -> u32 {
        self.depths[node]
    }

    /// Distance of every node from the root.
    pub fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// Cumulative draft log-probability of every node, 0 for the root.
    pub fn log_probs(&self) -> &[f64] {
        &self.log_probs
    }

    /// The child of `node` that carries `token`.
    pub fn child(&self, node: usize, token: u32) -> Option<usize> {
        self.children(node)
            .find(|&child| self.tokens[child] == token)
    }

    /// Children of `node` in node order.
    pub fn children(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        // A scan: with at most 255 nodes it beats keeping child lists through every truncation.
        let later = node.saturating_add(1).min(self.len());
        self.parents[later..]
            .iter()
            .enumerate()
            .filter(move |&(_, &parent)| parent == node)
            .map(move |(offset, _)| later + offset)
    }

    /// Nodes from the root down to `node`, both included. Empty when `node` does not exist.
    pub fn path(&self, node: usize) -> Vec<usize> {
        if node >= self.len() {
            return Vec::new();
        }
        let mut path = Vec::with_capacity(self.depths[node] as usize + 1);
        path.push(node);
        path.extend(std::iter::successors(self.parent(node), |&at| {
            self.parent(at)
        }));
        path.reverse();
        path
    }

    /// Keeps the first `budget` nodes below the root.
    pub fn truncate(&mut self, budget: usize) {
        let nodes = budget.saturating_add(1);
        self.tokens.truncate(nodes);
        self.parents.truncate(nodes);
        self.depths.truncate(nodes);
        self.log_probs.truncate(nodes);
    }

    /// True when every node is the only child of the node before it. The root alone is a chain.
    pub fn is_chain(&self) -> bool {
        (1..self.len()).all(|node| self.parents[node] == node - 1)
    }

    /// Depth of the deepest node.
    pub fn max_depth(&self) -> u32 {
        self.depths.iter().copied().max().unwrap_or(0)
    }

    /// Drops the nodes deeper than `max_depth`. The others keep their order.
    pub fn truncate_depth(&mut self, max_depth: u32) {
        // A kept node's parent is shallower, so it is kept as well.
        let mut new_index = vec![0; self.len()];
        let mut kept = 0;
        for node in 0..self.len() {
            if self.depths[node] > max_depth {
                continue;
            }
            new_index[node] = kept;
            self.tokens[kept] = self.tokens[node];
            self.parents[kept] = new_index[self.parents[node]];
            self.depths[kept] = self.depths[node];
            self.log_probs[kept] = self.log_probs[node];
            kept += 1;
        }
        self.truncate(kept - 1);
    }

    /// Which nodes each node sees when the tree is verified: its ancestors and itself.
    pub fn ancestors(&self) -> AncestorSets {
        AncestorSets::of(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_arrays_are_refused() {
        let cases: [(&[u32], &[i32], &str); 6] = [
            (&[], &[], "empty"),
            (&[1, 2], &[-1], "2 tokens but 1 parents"),
            (&[1], &[0], "its parent is 0"),
            (&[1, 2], &[-1, 1], "node 1 has parent 1"),
            (&[1, 2], &[-1, -1], "node 1 has parent -1"),
            (&[1, 2, 2], &[-1, 0, 0], "repeats token 2"),
        ];
        for (tokens, parents, mention) in cases {
            let error = TokenTree::from_parents(tokens, parents).unwrap_err();
            assert!(error.to_string().contains(mention), "{error}");
        }
    }

    #[test]
    fn a_full_tree_takes_no_more() {
        let mut tree = TokenTree::root_only(0);
        for node in 0..MAX_BUDGET {
            tree.push(node, 1, 0.0).unwrap();
        }
        assert_eq!(tree.budget(), MAX_BUDGET);
        assert_eq!(tree.push(0, 2, 0.0), Err(TreeError::TooLarge));
        assert!(tree.is_chain());
        assert_eq!(tree.max_depth() as usize, MAX_BUDGET);
    }

    #[test]
    fn a_missing_parent_is_refused() {
        let mut tree = TokenTree::root_only(0);
        assert!(matches!(
            tree.push(usize::MAX, 1, 0.0),
            Err(TreeError::ParentNotEarlier { node: 1, .. })
        ));
    }

    #[test]
    fn the_same_token_may_follow_different_parents() {
        let tree = TokenTree::from_parents(&[5, 6, 5, 6], &[-1, 0, 1, 2]).unwrap();
        assert_eq!(tree.child(0, 6), Some(1));
        assert_eq!(tree.child(2, 6), Some(3));
        assert_eq!(tree.child(3, 6), None);
        assert_eq!(tree.path(3), [0, 1, 2, 3]);
        assert_eq!(tree.path(4), []);
        assert_eq!(tree.children(9).count(), 0);
    }
}
