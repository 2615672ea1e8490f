use thiserror::Error;

use crate::MAX_BUDGET;

/// Why a node list is not a token tree.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TreeError {
    /// A tree has at least its root.
    #[error("the tree is empty: node 0 must be the root")]
    Empty,
    /// The two arrays describe different numbers of nodes.
    #[error("the tree has {tokens} tokens but {parents} parents")]
    LengthMismatch {
        /// Length of the token array.
        tokens: usize,
        /// Length of the parent array.
        parents: usize,
    },
    /// Node 0 has a parent.
    #[error("node 0 must be the root with parent -1, its parent is {parent}")]
    RootHasParent {
        /// The parent given for node 0.
        parent: i32,
    },
    /// A node names a parent that is not before it.
    #[error("node {node} has parent {parent}: parents must be earlier nodes, 0..{node}")]
    ParentNotEarlier {
        /// The node at fault.
        node: usize,
        /// The parent it names.
        parent: i64,
    },
    /// Two children of one node carry the same token.
    #[error("node {node} repeats token {token} of its sibling {sibling} below node {parent}")]
    DuplicateSibling {
        /// The node at fault.
        node: usize,
        /// The node that already carries the token.
        sibling: usize,
        /// Their parent.
        parent: usize,
        /// The token of both.
        token: u32,
    },
    /// More nodes than [`MAX_BUDGET`] below the root.
    #[error("the tree has more than {MAX_BUDGET} nodes below its root")]
    TooLarge,
}
