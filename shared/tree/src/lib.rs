//! Token trees for speculative decoding: the tree itself, the builders that turn a drafter's per-depth candidates
//! into one, the ancestor sets that mask its verification, and the acceptance walk.
//!
//! Pure: no I/O, no tensors, no async.

mod acceptance;
mod ancestors;
mod builder;
mod error;
mod token_tree;

pub use acceptance::{Acceptance, walk};
pub use ancestors::AncestorSets;
pub use builder::{Candidate, DepthCandidates, best_first, chain};
pub use error::TreeError;
pub use token_tree::TokenTree;

/// Most nodes a tree may have below its root: with the root, one 256-bit ancestor set per node.
pub const MAX_BUDGET: usize = 255;
