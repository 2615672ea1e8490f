//! The links of this verifier, one per drafter, opened when a request first needs them and again after a loss.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use treespec_rpc::handshake::Fingerprint;

use super::link::Link;

/// Wait after the first failure; doubled up to [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(250);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// What this verifier tells every drafter.
#[derive(Debug, Clone)]
pub(crate) struct DrafterIdentity {
    /// Random per process start.
    pub(crate) verifier_instance: String,
    pub(crate) fingerprint: Fingerprint,
}

/// All links by endpoint.
pub(crate) struct Links {
    identity: DrafterIdentity,
    slots: Mutex<HashMap<String, Arc<Slot>>>,
    next_sequence_id: AtomicU64,
}

/// One drafter.
#[derive(Default)]
struct Slot {
    current: Mutex<Option<Arc<Link>>>,
    /// Held while somebody connects, so that nobody else does.
    connecting: tokio::sync::Mutex<Backoff>,
}

#[derive(Default)]
struct Backoff {
    failures: u32,
    retry_at: Option<Instant>,
}

impl Backoff {
    fn add_failure(&mut self) {
        let wait = MIN_BACKOFF * 2u32.saturating_pow(self.failures.min(16));
        self.failures += 1;
        self.retry_at = Some(Instant::now() + wait.min(MAX_BACKOFF));
    }
}

impl Links {
    pub(crate) fn new(identity: DrafterIdentity) -> Arc<Self> {
        Arc::new(Self {
            identity,
            slots: Mutex::default(),
            next_sequence_id: AtomicU64::new(1),
        })
    }

    /// Width of a feature row.
    pub(crate) fn hidden_size(&self) -> usize {
        self.identity.fingerprint.hidden_size as usize
    }

    /// An id that no sequence of this process had before.
    pub(super) fn next_sequence_id(&self) -> u64 {
        self.next_sequence_id.fetch_add(1, Ordering::Relaxed)
    }

    /// The link to `endpoint` if it is up.
    pub(super) fn connected(&self, endpoint: &str) -> Option<Arc<Link>> {
        self.slot(endpoint).live()
    }

    /// The link to `endpoint`, connecting if need be. `None` when it fails or failed a moment ago.
    pub(super) async fn connect(&self, endpoint: &str) -> Option<Arc<Link>> {
        let slot = self.slot(endpoint);
        if let Some(link) = slot.live() {
            return Some(link);
        }
        let mut backoff = slot.connecting.lock().await;
        if let Some(link) = slot.live() {
            return Some(link);
        }
        if backoff.retry_at.is_some_and(|at| Instant::now() < at) {
            return None;
        }
        match Link::connect(endpoint, &self.identity).await {
            Ok(link) => {
                tracing::info!(endpoint, "linked to a drafter");
                let link = Arc::new(link);
                *lock(&slot.current) = Some(Arc::clone(&link));
                Some(link)
            }
            Err(error) => {
                tracing::warn!(endpoint, %error, "cannot link to the drafter");
                backoff.add_failure();
                None
            }
        }
    }

    /// A sequence was opened at `endpoint`: its failures are forgotten. A handshake alone does not prove that much.
    pub(super) async fn trust(&self, endpoint: &str) {
        *self.slot(endpoint).connecting.lock().await = Backoff::default();
    }

    /// `link` shook hands but opens no sequence: nobody uses it until the backoff is over.
    pub(super) async fn distrust(&self, endpoint: &str, link: &Arc<Link>) {
        let slot = self.slot(endpoint);
        let mut backoff = slot.connecting.lock().await;
        let mut current = lock(&slot.current);
        if current
            .as_ref()
            .is_some_and(|known| Arc::ptr_eq(known, link))
        {
            *current = None;
            backoff.add_failure();
        }
    }

    /// Starts to connect without waiting for it.
    pub(super) fn connect_in_background(self: &Arc<Self>, endpoint: &str) {
        let slot = self.slot(endpoint);
        if slot.live().is_some() || slot.connecting.try_lock().is_err() {
            return;
        }
        let (links, endpoint) = (Arc::clone(self), endpoint.to_owned());
        tokio::spawn(async move { links.connect(&endpoint).await });
    }

    fn slot(&self, endpoint: &str) -> Arc<Slot> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(slots.entry(endpoint.to_owned()).or_default())
    }
}

impl Slot {
    fn live(&self) -> Option<Arc<Link>> {
        lock(&self.current)
            .as_ref()
            .filter(|link| link.is_alive())
            .cloned()
    }
}

fn lock(current: &Mutex<Option<Arc<Link>>>) -> MutexGuard<'_, Option<Arc<Link>>> {
    // The value is only ever replaced whole.
    current.lock().unwrap_or_else(PoisonError::into_inner)
}
