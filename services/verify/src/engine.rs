//! A loaded target and what its sequences share.

use std::sync::Arc;

use tokio::sync::oneshot;
use treespec_checkpoint::CouplingProfile;
use treespec_engine::DraftShape;
use treespec_rpc::proto::verify::v1 as pb;

use crate::Config;
use crate::LoadedTarget;
use crate::config::TopkPlacement;
use crate::drafting::{DrafterIdentity, Links};
use crate::forward::ForwardQueue;
use crate::grammars::Grammars;
use crate::kv_reservation::KvAdmission;
use crate::request::Limits;

/// Where the drafts of a verifier's sequences come from.
pub(crate) enum DraftSource {
    /// Nowhere: the service was started without a drafter's checkpoint.
    None,
    /// The draft service that a request's lease names.
    Remote(Arc<Links>),
    /// The model itself.
    Hosted,
}

/// A loaded target and everything that sequences share.
pub(crate) struct Engine {
    pub(crate) queue: ForwardQueue,
    pub(crate) kv: Arc<KvAdmission>,
    pub(crate) drafts: DraftSource,
    pub(crate) vocab_size: usize,
    pub(crate) context_length: usize,
    pub(crate) prefill_chunk: usize,
    pub(crate) default_budget: usize,
    pub(crate) topk_placement: TopkPlacement,
    pub(crate) feature_window: usize,
    /// What was fitted to the drafter for sampled answers.
    pub(crate) coupling: Option<CouplingProfile>,
    pub(crate) grammars: Arc<Grammars>,
    pub(crate) info: pb::GetModelInfoResponse,
}

impl Engine {
    /// Starts the thread that owns the model. The receiver resolves when the thread ends, see [`ForwardQueue::start`].
    ///
    /// # Errors
    /// The operating system's, when there is no thread to be had.
    pub(crate) fn start(
        loaded: LoadedTarget,
        config: &Config,
    ) -> std::io::Result<(Self, oneshot::Receiver<String>)> {
        let instance_id = format!("{:016x}", rand::random::<u64>());
        let spec = loaded.model.spec().clone();
        let block_size = loaded
            .drafter
            .as_ref()
            .map_or(0, |drafter| drafter.block_size);
        let hosts_drafter = loaded.model.hosts_drafter();
        let drafts = match loaded.drafter {
            _ if hosts_drafter => DraftSource::Hosted,
            Some(fingerprint) => DraftSource::Remote(Links::new(DrafterIdentity {
                verifier_instance: instance_id.clone(),
                fingerprint,
            })),
            None => DraftSource::None,
        };
        let (queue, ended) = ForwardQueue::start(loaded.model)?;
        let info = pb::GetModelInfoResponse {
            architecture: spec.architecture.to_owned(),
            vocab_size: spec.vocab_size as u32,
            hidden_size: spec.hidden_size as u32,
            num_layers: spec.num_layers as u32,
            context_length: spec.context_length as u32,
            eos_token_ids: loaded.eos_token_ids.clone(),
            tokenizer_hash: loaded.tokenizer.fingerprint().to_owned(),
            numerics_profile: spec.numerics_profile,
            instance_id,
            max_budget: config.max_budget as u32,
            block_size,
            default_budget: config.default_budget() as u32,
            hosts_drafter,
        };
        let engine = Self {
            queue,
            kv: KvAdmission::new(spec.num_blocks, config.max_waiting),
            drafts,
            vocab_size: spec.vocab_size,
            context_length: spec.context_length,
            prefill_chunk: config.prefill_chunk(),
            default_budget: config.default_budget(),
            topk_placement: config.topk_placement,
            feature_window: config.feature_window,
            coupling: loaded.coupling,
            grammars: Grammars::new(loaded.tokenizer, spec.vocab_size, loaded.eos_token_ids),
            info,
        };
        Ok((engine, ended))
    }

    /// Slots of a drafted block, 0 without a drafter.
    pub(crate) fn block_size(&self) -> usize {
        self.info.block_size as usize
    }

    /// Nodes below the root that a draft of `shape` can have.
    pub(crate) fn most_nodes(&self, shape: DraftShape) -> usize {
        shape.most_nodes(self.block_size())
    }

    /// What requests are checked against.
    pub(crate) fn limits(&self) -> Limits<'_> {
        Limits {
            vocab_size: self.vocab_size,
            context_length: self.context_length,
            eos_token_ids: &self.info.eos_token_ids,
            max_budget: self.info.max_budget as usize,
            can_speculate: !matches!(self.drafts, DraftSource::None),
        }
    }
}
