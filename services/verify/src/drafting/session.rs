//! One sequence on a link: open, prime, then context and proposals in lockstep with the commits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::time::{Instant as Deadline, timeout, timeout_at};
use treespec_engine::DraftShape;
use treespec_rpc::ServiceError;
use treespec_rpc::convert::{
    block_hidden_from_proto, coupling_to_proto, features_to_proto, tree_from_proto,
};
use treespec_rpc::proto::draft::v1 as pb;
use treespec_rpc::proto::draft::v1::link_request::Message as Request;
use treespec_rpc::proto::draft::v1::proposal::Draft as Body;

use super::feature_history::FeatureHistory;
use super::link::{Event, Link};
use super::{Draft, DraftBody, DraftCost, DraftWish};

/// Longest wait for a drafter to open or to take the prompt's features.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of features per message of a prime, well below the transport's limit.
const PRIME_MESSAGE_BYTES: usize = 1 << 20;
/// A session is opened anew under a new sequence id, so its epoch never changes.
const EPOCH: u32 = 1;

/// A sequence that the drafter knows.
pub(super) struct Session {
    link: Arc<Link>,
    sequence_id: u64,
    events: mpsc::UnboundedReceiver<Event>,
    /// `ctx_end` of a proposal that did not come in time.
    overdue: Option<u32>,
    stale_drafts: u32,
}

impl Session {
    pub(super) async fn open(link: Arc<Link>, sequence_id: u64) -> Result<Self, ServiceError> {
        let mut session = Self {
            events: link.subscribe(sequence_id),
            link,
            sequence_id,
            overdue: None,
            stale_drafts: 0,
        };
        let open = pb::Open {
            sequence_id,
            epoch: EPOCH,
        };
        session.link.send(Request::Open(open)).await?;
        match timeout(OPEN_TIMEOUT, session.next_event()).await {
            Ok(Ok(Event::Opened { epoch: EPOCH })) => Ok(session),
            Ok(Ok(_)) => Err(ServiceError::internal(
                "the drafter did not answer Open with Opened",
            )),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ServiceError::unavailable(
                "the drafter does not open the sequence",
            )),
        }
    }

    /// Sends the features of everything committed so far and waits until the drafter has them.
    pub(super) async fn prime(&mut self, history: &FeatureHistory) -> Result<(), ServiceError> {
        let width = history.hidden_size();
        let (first, rows) = history.last(self.link.context_window());
        let rows_per_message = (PRIME_MESSAGE_BYTES / (width * size_of::<f32>())).max(1);
        let mut start = first;
        let mut messages = Vec::new();
        for chunk in rows.chunks(rows_per_message * width) {
            let rows = features_to_proto(start, chunk, width)?;
            start = rows.ctx_end;
            messages.push(pb::PrimeRequest {
                verifier_instance: self.link.identity().verifier_instance.clone(),
                sequence_id: self.sequence_id,
                epoch: EPOCH,
                rows: Some(rows),
            });
        }
        let mut client = self.link.client();
        let primed = timeout(OPEN_TIMEOUT, client.prime(tokio_stream::iter(messages)))
            .await
            .map_err(|_| {
                ServiceError::unavailable("the drafter does not take the prompt's features")
            })?
            .map_err(|status| ServiceError::from_status(&status))?
            .into_inner();
        if primed.ctx_end != start {
            return Err(ServiceError::internal(format!(
                "the drafter was primed to position {}, not {start}",
                primed.ctx_end
            )));
        }
        Ok(())
    }

    /// Sends the features of newly committed rows.
    pub(super) async fn commit(&mut self, start: u32, rows: &[f32]) -> Result<(), ServiceError> {
        let width = self.link.identity().fingerprint.hidden_size as usize;
        let context = pb::Context {
            sequence_id: self.sequence_id,
            epoch: EPOCH,
            rows: Some(features_to_proto(start, rows, width)?),
        };
        self.link.send(Request::Context(context)).await
    }

    /// Asks for a draft and waits for it until the link's deadline. `Ok(None)` when it is late.
    pub(super) async fn propose(&mut self, wish: DraftWish) -> Result<Option<Draft>, ServiceError> {
        if !self.overdue_arrived()? {
            return Ok(None);
        }
        let started = Instant::now();
        let deadline = Deadline::now() + self.link.proposal_deadline();
        let (shape, budget) = match wish.shape {
            DraftShape::Chain => (pb::DraftShape::Chain, 0),
            DraftShape::Tree { budget } => (pb::DraftShape::Tree, budget as u32),
        };
        let propose = pb::Propose {
            sequence_id: self.sequence_id,
            epoch: EPOCH,
            ctx_end: wish.ctx_end,
            root_token_id: wish.root,
            shape: shape.into(),
            budget,
            placement: pb::TopkPlacement::from(wish.placement).into(),
            coupling: wish.coupling.and_then(coupling_to_proto),
        };
        self.link.send(Request::Propose(propose)).await?;
        let Ok(event) = timeout_at(deadline, self.next_event()).await else {
            self.overdue = Some(wish.ctx_end);
            return Ok(None);
        };
        let proposal = match event? {
            Event::Proposal(proposal) if proposal.ctx_end == wish.ctx_end => proposal,
            _ => {
                return Err(ServiceError::internal(
                    "the drafter answered something else than Propose",
                ));
            }
        };
        let round_trip = started.elapsed();
        self.link.observe_round_trip(round_trip);
        self.read(*proposal, wish, round_trip).map(Some)
    }

    /// Late proposals since the last call.
    pub(super) fn take_stale_drafts(&mut self) -> u32 {
        std::mem::take(&mut self.stale_drafts)
    }

    /// Drops a late proposal if it is there by now. False as long as the drafter still owes one: asking again would
    /// only queue behind it.
    fn overdue_arrived(&mut self) -> Result<bool, ServiceError> {
        let Some(ctx_end) = self.overdue else {
            return Ok(true);
        };
        match self.events.try_recv() {
            Ok(Event::Proposal(proposal)) if proposal.ctx_end == ctx_end => {
                self.overdue = None;
                self.stale_drafts += 1;
                Ok(true)
            }
            Ok(Event::Failed(error)) => Err(error),
            Ok(_) => Err(ServiceError::internal("the drafter answered out of turn")),
            Err(mpsc::error::TryRecvError::Empty) => Ok(false),
            Err(mpsc::error::TryRecvError::Disconnected) => Err(link_ended()),
        }
    }

    async fn next_event(&mut self) -> Result<Event, ServiceError> {
        match self.events.recv().await {
            Some(Event::Failed(error)) => Err(error),
            Some(event) => Ok(event),
            None => Err(link_ended()),
        }
    }

    fn read(
        &self,
        proposal: pb::Proposal,
        wish: DraftWish,
        round_trip: Duration,
    ) -> Result<Draft, ServiceError> {
        let fingerprint = &self.link.identity().fingerprint;
        let body = match proposal.draft {
            Some(Body::Tree(tree)) => {
                let tree = tree_from_proto(wish.root, &tree, fingerprint.vocab_size as usize)?;
                DraftBody::Tree(tree)
            }
            Some(Body::BlockHidden(hidden)) => DraftBody::Hidden(block_hidden_from_proto(
                &hidden,
                fingerprint.block_size as usize,
                fingerprint.hidden_size as usize,
            )?),
            None => return Err(ServiceError::internal("the proposal holds no draft")),
        };
        let timings = proposal.timings.unwrap_or_default();
        let [forward, head, tree] = [
            timings.forward_seconds,
            timings.head_seconds,
            timings.tree_seconds,
        ]
        // No part can have taken longer than the whole, whatever the peer says.
        .map(|seconds| {
            Duration::try_from_secs_f64(seconds)
                .unwrap_or_default()
                .min(round_trip)
        });
        Ok(Draft {
            body,
            cost: DraftCost {
                forward,
                head,
                tree,
                wire: round_trip.saturating_sub(forward + head + tree),
            },
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.link.close(self.sequence_id);
    }
}

fn link_ended() -> ServiceError {
    ServiceError::unavailable("the link to the drafter has ended")
}
