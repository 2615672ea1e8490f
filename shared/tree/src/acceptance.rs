use crate::TokenTree;

/// What one verification of a tree commits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acceptance {
    /// Accepted nodes, the root first.
    pub path: Vec<usize>,
    /// The target's own token after the path: the next root.
    pub bonus: u32,
}

impl Acceptance {
    /// Number of accepted drafted tokens: the path without its root.
    pub fn accepted(&self) -> usize {
        self.path.len().saturating_sub(1)
    }
}

/// Walks from the root as long as the token that the target chooses after a node is drafted as one of its children.
///
/// `target_choice(node)` is the target's token after the path to `node`. It must not depend on the tree: then the
/// committed tokens are exactly those of plain decoding (sample-and-match, DDTree `follow_verified_tree`,
/// liranringel/ddtree).
pub fn walk(tree: &TokenTree, target_choice: impl Fn(usize) -> u32) -> Acceptance {
    let mut node = 0;
    let mut path = vec![node];
    loop {
        let token = target_choice(node);
        let Some(child) = tree.child(node, token) else {
            return Acceptance { path, bonus: token };
        };
        path.push(child);
        node = child;
    }
}
