//! Every mapping between messages and domain types. Reading a message validates it; errors name the field.

mod constraint;
mod coupling;
mod failure;
mod features;
mod output;
mod sampling;
mod speculation;
mod step_tree;
mod tree;

pub use constraint::{ConstraintCompany, constraint_error, constraint_from_proto};
pub use coupling::{coupling_from_proto, coupling_to_proto};
pub use failure::{failure_from_proto, failure_to_proto};
pub use features::{
    FeatureSpan, block_hidden_from_proto, block_hidden_to_proto, features_from_proto,
    features_to_proto,
};
pub use output::OutputOptions;
pub use sampling::{check_tokens, sampling_from_proto, sampling_to_proto};
pub use speculation::{Speculation, ranking_from_proto, ranking_to_proto};
pub use step_tree::{step_tree_from_proto, step_tree_to_proto};
pub use tree::{tree_from_proto, tree_to_proto};
