//! A loaded target and what its sequences share.

use std::sync::Arc;

use treespec_engine::DraftShape;
use treespec_rpc::proto::verify::v1 as pb;

use crate::config::TopkPlacement;
use crate::drafting::Links;
use crate::forward::ForwardQueue;
use crate::kv_reservation::KvAdmission;
use crate::request::Limits;

/// A loaded target and everything that sequences share.
pub(crate) struct Engine {
    pub(crate) queue: ForwardQueue,
    pub(crate) kv: Arc<KvAdmission>,
    /// `None` when the service was started without a drafter's checkpoint.
    pub(crate) links: Option<Arc<Links>>,
    pub(crate) vocab_size: usize,
    pub(crate) context_length: usize,
    pub(crate) prefill_chunk: usize,
    pub(crate) default_budget: usize,
    pub(crate) topk_placement: TopkPlacement,
    pub(crate) feature_window: usize,
    pub(crate) info: pb::GetModelInfoResponse,
}

impl Engine {
    /// Slots of a drafted block, 0 without a drafter.
    pub(crate) fn block_size(&self) -> usize {
        self.info.block_size as usize
    }

    /// Nodes below the root that a draft of `shape` can have.
    pub(crate) fn most_nodes(&self, shape: DraftShape) -> usize {
        match shape {
            DraftShape::Chain => shape.depths(self.block_size()),
            DraftShape::Tree { budget } => budget,
        }
    }

    /// What requests are checked against.
    pub(crate) fn limits(&self) -> Limits<'_> {
        Limits {
            vocab_size: self.vocab_size,
            context_length: self.context_length,
            eos_token_ids: &self.info.eos_token_ids,
            max_budget: self.info.max_budget as usize,
            can_speculate: self.links.is_some(),
        }
    }
}
