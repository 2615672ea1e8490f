//! The verify replicas: who serves, which model, and who gets the next sequence.

mod health;
mod replica;

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, task::JoinSet, time::timeout};
use treespec_rpc::{
    ServiceError,
    proto::verify::v1::GetModelInfoResponse,
    transport::{TransportError, channel},
};

pub(crate) use replica::ReplicaLease;
use replica::{Replica, State};

/// A client that finds no replica comes back after about the time that a restart takes.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// All configured verify replicas, each followed by a task that ends with this.
pub(crate) struct Replicas {
    all: Vec<Arc<Replica>>,
    changes: watch::Sender<()>,
    /// How long a sequence that lost its replica waits for one.
    patience: Duration,
    _followers: JoinSet<()>,
}

/// What a sequence needs of its replica.
#[derive(Debug, Clone, Default)]
pub(crate) struct Requirement {
    /// Only replicas whose results are equal bit by bit, once tokens were committed on one.
    pub(crate) numerics_profile: Option<String>,
    /// The replica that was just lost: only when there is no other.
    pub(crate) avoid: Option<String>,
}

impl Replicas {
    /// Starts to follow the replicas. Only those with the tokenizer of `tokenizer_hash` are used.
    ///
    /// # Errors
    /// [`TransportError::InvalidEndpoint`] quotes the endpoint.
    pub(crate) fn follow(
        endpoints: &[String],
        tokenizer_hash: &str,
        patience: Duration,
    ) -> Result<Arc<Self>, TransportError> {
        let changes = watch::Sender::new(());
        let tokenizer_hash: Arc<str> = tokenizer_hash.into();
        let all = endpoints
            .iter()
            .map(|endpoint| {
                let channel = channel(endpoint)?;
                Ok(Arc::new(Replica::new(
                    endpoint.clone(),
                    channel,
                    changes.clone(),
                )))
            })
            .collect::<Result<Vec<_>, TransportError>>()?;
        let mut followers = JoinSet::new();
        for replica in &all {
            followers.spawn(health::follow(
                Arc::clone(replica),
                Arc::clone(&tokenizer_hash),
            ));
        }
        Ok(Arc::new(Self {
            all,
            changes,
            patience,
            _followers: followers,
        }))
    }

    /// Told of every change of any replica.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// The served model.
    ///
    /// # Errors
    /// UNAVAILABLE when no replica serves, FAILED_PRECONDITION when none fits this coordinator.
    pub(crate) fn model(&self) -> Result<Arc<GetModelInfoResponse>, ServiceError> {
        self.all
            .iter()
            .find_map(|replica| replica.model())
            .ok_or_else(|| self.absence(&Requirement::default()))
    }

    /// A place on the fitting replica with the fewest sequences; waits a while when there is none.
    ///
    /// # Errors
    /// As [`Replicas::model`].
    pub(crate) async fn acquire(
        &self,
        requirement: &Requirement,
    ) -> Result<ReplicaLease, ServiceError> {
        let mut changes = self.changes();
        let found = async {
            loop {
                if let Some(lease) = self.choose(requirement) {
                    return Some(lease);
                }
                changes.changed().await.ok()?;
            }
        };
        timeout(self.patience, found)
            .await
            .ok()
            .flatten()
            .ok_or_else(|| self.absence(requirement))
    }

    fn choose(&self, requirement: &Requirement) -> Option<ReplicaLease> {
        let fits = |model: &GetModelInfoResponse| {
            requirement
                .numerics_profile
                .as_ref()
                .is_none_or(|profile| *profile == model.numerics_profile)
        };
        self.all
            .iter()
            .filter_map(|replica| {
                let model = replica.serving().filter(|model| fits(model))?;
                Some((replica, model))
            })
            .min_by_key(|(replica, _)| {
                let avoided = requirement.avoid.as_deref() == Some(replica.endpoint());
                (avoided, replica.in_flight())
            })
            .map(|(replica, model)| ReplicaLease::new(Arc::clone(replica), model))
    }

    /// Why no replica can be had.
    fn absence(&self, requirement: &Requirement) -> ServiceError {
        let mut reasons = Vec::new();
        let mut misfit = None;
        for replica in &self.all {
            match replica.state() {
                State::Away { reason } | State::Suspect { reason, .. } => {
                    reasons.push(format!("{}: {reason}", replica.endpoint()));
                }
                State::Misfit(error) => {
                    reasons.push(format!("{}: {error}", replica.endpoint()));
                    misfit = Some(error);
                }
                State::Serving(model) => reasons.push(format!(
                    "{}: serves numerics profile {:?}, not {:?}",
                    replica.endpoint(),
                    model.numerics_profile,
                    requirement.numerics_profile.as_deref().unwrap_or_default()
                )),
            }
        }
        match misfit {
            // A retry would not help: nobody but the operator can.
            Some(error) if self.all.len() == 1 => error,
            _ => ServiceError::Unavailable {
                description: format!("no verify replica is available ({})", reasons.join("; ")),
                retry_after: Some(RETRY_AFTER),
            },
        }
    }
}
