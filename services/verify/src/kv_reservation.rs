//! Admission by KV blocks: a sequence starts when all rows that it can ever need are free, so that none has to stop
//! in the middle for lack of room.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use treespec_engine::{BLOCK_TOKENS, BlockPool, BlockTable};
use treespec_rpc::ServiceError;

/// The KV blocks of a backend.
pub(crate) struct KvAdmission {
    blocks: Mutex<BlockPool>,
    /// One permit per free block, handed out in order of arrival.
    permits: Arc<Semaphore>,
    total_blocks: usize,
    waiting: AtomicUsize,
    max_waiting: usize,
}

/// Blocks of one sequence, freed when the last holder drops it. Work in flight holds a clone, so the blocks of a
/// cancelled request are not handed out while a forward still writes to them.
pub(crate) struct KvReservation {
    table: BlockTable,
    admission: Arc<KvAdmission>,
    _permit: OwnedSemaphorePermit,
}

impl KvAdmission {
    pub(crate) fn new(total_blocks: usize, max_waiting: usize) -> Arc<Self> {
        Arc::new(Self {
            blocks: Mutex::new(BlockPool::new(total_blocks)),
            permits: Arc::new(Semaphore::new(total_blocks)),
            total_blocks,
            waiting: AtomicUsize::new(0),
            max_waiting,
        })
    }

    /// Waits for room for `tokens` rows.
    ///
    /// # Errors
    /// [`ServiceError::InvalidArgument`] when the cache is too small for the request even when empty,
    /// [`ServiceError::ResourceExhausted`] when too many wait already.
    pub(crate) async fn reserve(
        self: &Arc<Self>,
        tokens: usize,
    ) -> Result<Arc<KvReservation>, ServiceError> {
        let wanted = tokens.div_ceil(BLOCK_TOKENS);
        let too_large = || {
            ServiceError::invalid(
                "max_tokens",
                format!(
                    "prompt, answer and tree need {tokens} KV rows, but the cache has {}; lower max_tokens or raise --kv-tokens",
                    self.total_blocks * BLOCK_TOKENS
                ),
            )
        };
        let count = u32::try_from(wanted).map_err(|_| too_large())?;
        if wanted > self.total_blocks {
            return Err(too_large());
        }
        let permit = match Arc::clone(&self.permits).try_acquire_many_owned(count) {
            Ok(permit) => permit,
            Err(_) => {
                let _waiting = Waiting::enter(self)?;
                Arc::clone(&self.permits)
                    .acquire_many_owned(count)
                    .await
                    .map_err(|_| ServiceError::unavailable("the service is shutting down"))?
            }
        };
        let mut table = BlockTable::default();
        self.pool()
            .grow(&mut table, tokens)
            .map_err(|error| ServiceError::internal(error.to_string()))?;
        Ok(Arc::new(KvReservation {
            table,
            admission: Arc::clone(self),
            _permit: permit,
        }))
    }

    fn pool(&self) -> MutexGuard<'_, BlockPool> {
        // The pool is consistent after every call, whoever panicked while holding it.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KvReservation {
    pub(crate) fn table(&self) -> &BlockTable {
        &self.table
    }
}

impl Drop for KvReservation {
    fn drop(&mut self) {
        // The permit is dropped after this body, so no one is admitted before the blocks are back.
        self.admission.pool().release(&mut self.table);
    }
}

/// Counts a waiting sequence for as long as it waits, cancelled or not.
struct Waiting<'a>(&'a KvAdmission);

impl<'a> Waiting<'a> {
    fn enter(admission: &'a KvAdmission) -> Result<Self, ServiceError> {
        let before = admission.waiting.fetch_add(1, Ordering::Relaxed);
        let waiting = Self(admission);
        if before >= admission.max_waiting {
            return Err(ServiceError::ResourceExhausted {
                what: format!("KV blocks ({before} sequences wait already)"),
                retry_after: Some(std::time::Duration::from_secs(1)),
            });
        }
        Ok(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_sequence_waits_for_room_and_gets_it() {
        let admission = KvAdmission::new(4, 1);
        let first = admission.reserve(40).await.unwrap();
        assert_eq!(first.table().capacity(), 48);
        let second = tokio::spawn({
            let admission = Arc::clone(&admission);
            async move { admission.reserve(32).await.map(|r| r.table().capacity()) }
        });
        tokio::task::yield_now().await;
        let refused = admission.reserve(32).await.err().unwrap();
        assert!(matches!(refused, ServiceError::ResourceExhausted { .. }));
        drop(first);
        assert_eq!(second.await.unwrap().unwrap(), 32);
        assert_eq!(admission.reserve(64).await.unwrap().table().capacity(), 64);
    }

    #[tokio::test]
    async fn what_never_fits_is_refused_at_once() {
        let admission = KvAdmission::new(4, 1);
        for tokens in [65, usize::MAX] {
            let error = admission.reserve(tokens).await.err().unwrap().to_string();
            assert!(error.contains("64"), "{error}");
        }
    }
}
