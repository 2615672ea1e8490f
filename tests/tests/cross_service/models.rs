//! The fixtures as clusters.

use treespec_rpc::proto::verify::v1::TokenLogprob;
use treespec_testkit::{Cluster, ClusterBuilder, TopkPlacement};
use treespec_tests::{DENSE_CASES, case_path};

pub(crate) const LLAMA: &str = DENSE_CASES[0];
pub(crate) const QWEN3: &str = DENSE_CASES[1];

/// Accepts nothing.
pub(crate) const RANDOM: &str = "drafter";
/// Accepts some.
pub(crate) const FIT: &str = "drafter_fit";

/// Where the drafter runs, and who runs the top-k pass for its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// A draft service, which runs the pass too.
    Draft,
    /// A draft service; the verifier runs the pass.
    DraftWithoutTopk,
    /// The verifier.
    Local,
}

impl Placement {
    /// Services for a case and one of its drafters, placed so.
    pub(crate) fn cluster(self, case: &str, drafter: &str) -> ClusterBuilder {
        let cluster = cluster(case, drafter);
        match self {
            Self::Draft => cluster.placement(TopkPlacement::Draft),
            Self::DraftWithoutTopk => cluster.placement(TopkPlacement::Verify),
            Self::Local => cluster.local_drafter(),
        }
    }
}

/// Services for a case and one of its drafters.
pub(crate) fn cluster(case: &str, drafter: &str) -> ClusterBuilder {
    Cluster::builder(case_path(case, "model")).drafter(case_path(case, drafter))
}

/// Services for a case, without drafts.
pub(crate) fn plain_cluster(case: &str) -> ClusterBuilder {
    Cluster::builder(case_path(case, "model"))
}

/// The alternatives of a token as the fixtures' comparison wants them.
pub(crate) fn top(token: &TokenLogprob) -> Vec<(u32, f32)> {
    token
        .top
        .iter()
        .map(|candidate| (candidate.token_id, candidate.logprob))
        .collect()
}
