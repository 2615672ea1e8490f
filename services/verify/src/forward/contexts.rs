//! The hosted drafter's contexts, one per sequence that drafts. Whatever happens to one costs its sequence drafts,
//! nothing else.

use std::collections::HashMap;

use tokio::sync::mpsc;
use treespec_engine::{ContextId, Drafter, EngineError};

use super::Work;

/// How often a sequence opens a context before it goes on without one.
const MAX_OPENINGS: u32 = 5;

/// Names a sequence's context for as long as the process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ContextKey(pub(super) u64);

/// A sequence's context. The engine thread frees it when the last holder drops this; work in flight holds a clone.
pub(crate) struct DrafterContext {
    key: ContextKey,
    work: mpsc::UnboundedSender<Work>,
}

impl DrafterContext {
    pub(super) fn new(key: ContextKey, work: mpsc::UnboundedSender<Work>) -> Self {
        Self { key, work }
    }

    pub(super) fn key(&self) -> ContextKey {
        self.key
    }
}

impl Drop for DrafterContext {
    fn drop(&mut self) {
        // A thread that has ended holds no contexts any more.
        let _ = self.work.send(Work::CloseContext(self.key));
    }
}

/// The engine thread's side.
#[derive(Debug, Default)]
pub(super) struct Contexts {
    slots: HashMap<ContextKey, Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    /// `None` before the first features and after a failure.
    open: Option<ContextId>,
    openings: u32,
    /// One line per sequence is enough.
    complained: bool,
}

impl Slot {
    /// Notes a failure. Only one that ends everything is passed on.
    fn fail(&mut self, drafter: &mut dyn Drafter, error: EngineError) -> Result<(), EngineError> {
        if error.is_fatal() {
            return Err(error);
        }
        if !self.complained {
            self.complained = true;
            // More sequences than contexts is load, not a fault.
            if matches!(error, EngineError::OutOfContexts(_)) {
                tracing::debug!(%error, "decoding a sequence plainly");
            } else {
                tracing::warn!(%error, "the hosted drafter fails a sequence, decoding it plainly");
            }
        }
        if let Some(id) = self.open.take() {
            drafter.close(id);
        }
        Ok(())
    }
}

impl Contexts {
    /// Hands features `[n, hidden]` of the positions from `start` to the context, which is opened if need be: an
    /// empty one may begin anywhere. A failure leaves the sequence without a context for now.
    ///
    /// # Errors
    /// Only what ends the whole drafter.
    pub(super) fn append(
        &mut self,
        drafter: &mut dyn Drafter,
        key: ContextKey,
        start: usize,
        features: &[f32],
    ) -> Result<(), EngineError> {
        let slot = self.slots.entry(key).or_default();
        let id = match slot.open {
            Some(id) => id,
            None if slot.openings >= MAX_OPENINGS => return Ok(()),
            None => match drafter.open() {
                Ok(id) => {
                    slot.openings += 1;
                    *slot.open.insert(id)
                }
                Err(error) => return slot.fail(drafter, error),
            },
        };
        match drafter.append_context(id, start as u32, features) {
            Ok(()) => Ok(()),
            Err(error) => slot.fail(drafter, error),
        }
    }

    /// The context, when it reaches exactly to `committed`.
    pub(super) fn ready(
        &mut self,
        drafter: &mut dyn Drafter,
        key: ContextKey,
        committed: usize,
    ) -> Result<Option<ContextId>, EngineError> {
        let Some(slot) = self.slots.get_mut(&key) else {
            return Ok(None);
        };
        let Some(id) = slot.open else { return Ok(None) };
        let error = match drafter.context(id) {
            Ok(held) if held.end as usize == committed => return Ok(Some(id)),
            Ok(held) => EngineError::ContextGap {
                start: committed as u32,
                expected: held.end,
            },
            Err(error) => error,
        };
        slot.fail(drafter, error).map(|()| None)
    }

    /// The drafter failed to draft for the context.
    ///
    /// # Errors
    /// Only what ends the whole drafter.
    pub(super) fn fail(
        &mut self,
        drafter: &mut dyn Drafter,
        key: ContextKey,
        error: EngineError,
    ) -> Result<(), EngineError> {
        self.slots.entry(key).or_default().fail(drafter, error)
    }

    /// Whether features that are computed for the context now are of any use.
    pub(super) fn wants_features(&self, key: ContextKey) -> bool {
        self.slots
            .get(&key)
            .is_none_or(|slot| slot.open.is_some() || slot.openings < MAX_OPENINGS)
    }

    /// Frees a context. One that was never opened is ignored.
    pub(super) fn close(&mut self, drafter: &mut dyn Drafter, key: ContextKey) {
        if let Some(id) = self.slots.remove(&key).and_then(|slot| slot.open) {
            drafter.close(id);
        }
    }
}
