//! One bidirectional stream to a drafter, shared by all sequences that draft there.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;
use treespec_rpc::convert::failure_from_proto;
use treespec_rpc::handshake::{Fingerprint, PROTOCOL_VERSION, compare, compare_versions};
use treespec_rpc::proto::draft::v1 as pb;
use treespec_rpc::proto::draft::v1::draft_service_client::DraftServiceClient;
use treespec_rpc::proto::draft::v1::link_request::Message as Request;
use treespec_rpc::proto::draft::v1::link_response::Message as Response;
use treespec_rpc::{ServiceError, transport};

use super::DrafterIdentity;

/// Longest wait for connection and handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Requests that may wait for the wire; a drafter that reads none for so long is lost.
const OUTGOING: usize = 1_024;
/// Shortest deadline of a proposal: a machine under load is not a lost drafter.
const MIN_DEADLINE: Duration = Duration::from_secs(2);
/// A proposal later than this many usual round trips is given up.
const DEADLINE_ROUND_TRIPS: u32 = 20;

type Routes = Mutex<HashMap<u64, mpsc::UnboundedSender<Event>>>;

/// What a drafter says about one sequence.
pub(super) enum Event {
    Opened { epoch: u32 },
    Proposal(Box<pb::Proposal>),
    Failed(ServiceError),
}

/// A link after a successful handshake.
pub(crate) struct Link {
    requests: mpsc::Sender<pb::LinkRequest>,
    routes: Arc<Routes>,
    alive: Arc<AtomicBool>,
    client: DraftServiceClient<Channel>,
    identity: DrafterIdentity,
    context_window: usize,
    /// Smoothed round trip of a proposal in microseconds, 0 before the first.
    round_trip_micros: AtomicU64,
}

impl Link {
    /// Connects and shakes hands.
    ///
    /// # Errors
    /// [`ServiceError::Unavailable`] when nobody answers in time, [`ServiceError::FailedPrecondition`] when the
    /// drafter was made for something else.
    pub(super) async fn connect(
        endpoint: &str,
        identity: &DrafterIdentity,
    ) -> Result<Self, ServiceError> {
        timeout(HANDSHAKE_TIMEOUT, Self::shake_hands(endpoint, identity))
            .await
            .map_err(|_| ServiceError::unavailable(format!("{endpoint} does not answer")))?
    }

    async fn shake_hands(endpoint: &str, identity: &DrafterIdentity) -> Result<Self, ServiceError> {
        let channel = transport::channel(endpoint)
            .map_err(|error| ServiceError::invalid("drafter.endpoint", error.to_string()))?;
        let mut client = transport::draft_client(channel);
        let (requests, outgoing) = mpsc::channel(OUTGOING);
        let hello = pb::Hello {
            protocol_version: PROTOCOL_VERSION,
            verifier_instance: identity.verifier_instance.clone(),
            fingerprint: Some((&identity.fingerprint).into()),
        };
        send(&requests, Request::Hello(hello)).await?;
        let mut responses = client
            .link(ReceiverStream::new(outgoing))
            .await
            .map_err(|status| ServiceError::from_status(&status))?
            .into_inner();
        let first = responses
            .message()
            .await
            .map_err(|status| ServiceError::from_status(&status))?;
        let Some(Response::Welcome(welcome)) = first.and_then(|response| response.message) else {
            return Err(ServiceError::precondition(
                "link",
                "the drafter's first message is no Welcome",
            ));
        };
        compare_versions(PROTOCOL_VERSION, welcome.protocol_version)?;
        let theirs = Fingerprint::from_proto(welcome.fingerprint, "welcome.fingerprint")?;
        compare(&identity.fingerprint, &theirs)?;
        let link = Self {
            requests,
            routes: Arc::default(),
            alive: Arc::new(AtomicBool::new(true)),
            client,
            identity: identity.clone(),
            context_window: welcome.context_window as usize,
            round_trip_micros: AtomicU64::new(0),
        };
        tokio::spawn(dispatch(
            responses,
            Arc::clone(&link.routes),
            Arc::clone(&link.alive),
        ));
        Ok(link)
    }

    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire) && !self.requests.is_closed()
    }

    /// Context rows that the drafter keeps per sequence.
    pub(super) fn context_window(&self) -> usize {
        self.context_window
    }

    pub(super) fn identity(&self) -> &DrafterIdentity {
        &self.identity
    }

    pub(super) fn client(&self) -> DraftServiceClient<Channel> {
        self.client.clone()
    }

    /// Events of `sequence_id` from now on. The channel closes when the link ends.
    pub(super) fn subscribe(&self, sequence_id: u64) -> mpsc::UnboundedReceiver<Event> {
        let (sender, events) = mpsc::unbounded_channel();
        lock(&self.routes).insert(sequence_id, sender);
        if !self.is_alive() {
            // The dispatcher may have cleared the routes just before.
            lock(&self.routes).clear();
        }
        events
    }

    /// Forgets a sequence on both sides.
    pub(super) fn close(&self, sequence_id: u64) {
        lock(&self.routes).remove(&sequence_id);
        let close = pb::LinkRequest {
            message: Some(Request::Close(pb::Close { sequence_id })),
        };
        // A link too full for this is about to be given up, and its end closes every sequence.
        let _ = self.requests.try_send(close);
    }

    pub(super) async fn send(&self, message: Request) -> Result<(), ServiceError> {
        send(&self.requests, message).await
    }

    /// How long a proposal may take before its step goes on without it.
    pub(super) fn proposal_deadline(&self) -> Duration {
        let usual = Duration::from_micros(self.round_trip_micros.load(Ordering::Relaxed));
        MIN_DEADLINE.max(usual * DEADLINE_ROUND_TRIPS)
    }

    pub(super) fn observe_round_trip(&self, round_trip: Duration) {
        let new = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
        let old = self.round_trip_micros.load(Ordering::Relaxed);
        // Racing updates may lose one observation, which an average can bear.
        let smoothed = if old == 0 {
            new
        } else {
            old - old / 8 + new / 8
        };
        self.round_trip_micros.store(smoothed, Ordering::Relaxed);
    }
}

async fn send(
    requests: &mpsc::Sender<pb::LinkRequest>,
    message: Request,
) -> Result<(), ServiceError> {
    let request = pb::LinkRequest {
        message: Some(message),
    };
    timeout(MIN_DEADLINE, requests.send(request))
        .await
        .map_err(|_| ServiceError::unavailable("the drafter reads no more"))?
        .map_err(|_| ServiceError::unavailable("the link to the drafter has ended"))
}

/// Hands every response to its sequence until the link ends.
async fn dispatch(
    mut responses: Streaming<pb::LinkResponse>,
    routes: Arc<Routes>,
    alive: Arc<AtomicBool>,
) {
    loop {
        match responses.message().await {
            Ok(Some(response)) => {
                if let Some((sequence_id, event)) = response.message.and_then(event_of)
                    && let Some(route) = lock(&routes).get(&sequence_id)
                {
                    // A sequence that ended meanwhile needs no event.
                    let _ = route.send(event);
                }
            }
            Ok(None) => break,
            Err(status) => {
                tracing::warn!(code = ?status.code(), message = status.message(), "link to a drafter broke");
                break;
            }
        }
    }
    alive.store(false, Ordering::Release);
    lock(&routes).clear();
}

fn event_of(response: Response) -> Option<(u64, Event)> {
    match response {
        Response::Welcome(_) => None,
        Response::Opened(opened) => Some((
            opened.sequence_id,
            Event::Opened {
                epoch: opened.epoch,
            },
        )),
        Response::Proposal(proposal) => {
            Some((proposal.sequence_id, Event::Proposal(Box::new(proposal))))
        }
        Response::Failure(failure) => Some((
            failure.sequence_id,
            Event::Failed(failure_from_proto(&failure)),
        )),
    }
}

fn lock(routes: &Routes) -> MutexGuard<'_, HashMap<u64, mpsc::UnboundedSender<Event>>> {
    // A map is consistent after every call, whoever panicked while holding it.
    routes.lock().unwrap_or_else(PoisonError::into_inner)
}
