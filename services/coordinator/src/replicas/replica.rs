use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::{Notify, watch};
use tonic::transport::Channel;
use treespec_rpc::{
    ServiceError,
    proto::verify::v1::{GetModelInfoResponse, verify_service_client::VerifyServiceClient},
    transport::verify_client,
};

/// What is known of a replica now.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum State {
    /// Not reached, or it says that it does not serve.
    Away {
        /// Why, for the log and for clients that find no replica.
        reason: String,
    },
    /// It serves a model that is not the coordinator's.
    Misfit(ServiceError),
    /// It takes sequences.
    Serving(Arc<GetModelInfoResponse>),
    /// It served when last seen, then lost a sequence. It takes none until its health was seen again, which is a
    /// matter of milliseconds unless it is gone.
    Suspect {
        /// The model it served.
        model: Arc<GetModelInfoResponse>,
        /// How the sequence was lost.
        reason: String,
    },
}

/// One verify endpoint.
#[derive(Debug)]
pub(super) struct Replica {
    endpoint: String,
    channel: Channel,
    state: Mutex<State>,
    in_flight: AtomicUsize,
    changes: watch::Sender<()>,
    /// Wakes the follower: a sequence was lost, the last known state may be wrong.
    pub(super) recheck: Notify,
}

impl Replica {
    pub(super) fn new(endpoint: String, channel: Channel, changes: watch::Sender<()>) -> Self {
        Self {
            endpoint,
            channel,
            state: Mutex::new(State::Away {
                reason: "not reached yet".to_owned(),
            }),
            in_flight: AtomicUsize::new(0),
            changes,
            recheck: Notify::new(),
        }
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(super) fn state(&self) -> State {
        // The state is replaced as a whole, so a panic elsewhere leaves it sound.
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The model, when it takes sequences.
    pub(super) fn serving(&self) -> Option<Arc<GetModelInfoResponse>> {
        match self.state() {
            State::Serving(model) => Some(model),
            State::Away { .. } | State::Misfit(_) | State::Suspect { .. } => None,
        }
    }

    /// The model, as long as there is hope that it takes sequences.
    pub(super) fn model(&self) -> Option<Arc<GetModelInfoResponse>> {
        match self.state() {
            State::Serving(model) | State::Suspect { model, .. } => Some(model),
            State::Away { .. } | State::Misfit(_) => None,
        }
    }

    /// Takes on a new state, logs it and tells who waits for it. Nothing happens when it is the old one.
    pub(super) fn set_state(&self, state: State) {
        {
            let mut current = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if *current == state {
                return;
            }
            *current = state.clone();
        }
        let endpoint = &self.endpoint;
        match state {
            State::Serving(model) => tracing::info!(
                endpoint,
                instance = model.instance_id,
                numerics_profile = model.numerics_profile,
                "verify replica is serving"
            ),
            State::Away { reason } => tracing::warn!(endpoint, reason, "verify replica is away"),
            State::Misfit(error) => {
                tracing::error!(endpoint, %error, "verify replica does not fit and is not used");
            }
            State::Suspect { reason, .. } => {
                tracing::warn!(endpoint, reason, "verify replica lost a sequence");
            }
        }
        self.changes.send_replace(());
    }
}

/// A sequence's place on a replica.
#[derive(Debug)]
pub(crate) struct ReplicaLease {
    replica: Arc<Replica>,
    model: Arc<GetModelInfoResponse>,
}

impl ReplicaLease {
    pub(super) fn new(replica: Arc<Replica>, model: Arc<GetModelInfoResponse>) -> Self {
        replica.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { replica, model }
    }

    pub(crate) fn endpoint(&self) -> &str {
        self.replica.endpoint()
    }

    pub(crate) fn model(&self) -> &GetModelInfoResponse {
        &self.model
    }

    pub(crate) fn client(&self) -> VerifyServiceClient<Channel> {
        verify_client(self.replica.channel())
    }

    /// Takes the replica out of use until its health was seen again.
    pub(crate) fn report_lost(&self, reason: &str) {
        // Whatever was found out since is newer than this sequence.
        if let Some(model) = self.replica.serving() {
            self.replica.set_state(State::Suspect {
                model,
                reason: reason.to_owned(),
            });
            self.replica.recheck.notify_one();
        }
    }
}

impl Drop for ReplicaLease {
    fn drop(&mut self) {
        self.replica.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}
