use std::{sync::Arc, time::Duration};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use treespec_rpc::ServiceError;

/// A refused client comes back after about the time that a short answer takes.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Bounds the generations that run at a time and the requests that wait for their turn.
#[derive(Debug, Clone)]
pub(crate) struct Admission {
    running: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    max_in_flight: usize,
    max_waiting: usize,
}

/// A request's place: running at once, or in the queue. Dropping it gives the place to the next.
#[derive(Debug)]
pub(crate) enum Ticket {
    Running(#[expect(dead_code, reason = "held for its drop")] OwnedSemaphorePermit),
    Waiting {
        running: Arc<Semaphore>,
        #[expect(dead_code, reason = "held for its drop")]
        place: OwnedSemaphorePermit,
    },
}

impl Admission {
    pub(crate) fn new(max_in_flight: usize, max_waiting: usize) -> Self {
        Self {
            running: Arc::new(Semaphore::new(max_in_flight)),
            waiting: Arc::new(Semaphore::new(max_waiting)),
            max_in_flight,
            max_waiting,
        }
    }

    /// Takes a place, without waiting for the turn.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED when the queue is full.
    pub(crate) fn enter(&self) -> Result<Ticket, ServiceError> {
        if let Ok(permit) = Arc::clone(&self.running).try_acquire_owned() {
            return Ok(Ticket::Running(permit));
        }
        let place = Arc::clone(&self.waiting)
            .try_acquire_owned()
            .map_err(|_| self.full())?;
        Ok(Ticket::Waiting {
            running: Arc::clone(&self.running),
            place,
        })
    }

    fn full(&self) -> ServiceError {
        ServiceError::ResourceExhausted {
            what: format!(
                "request slots ({} running and {} waiting)",
                self.max_in_flight, self.max_waiting
            ),
            retry_after: Some(RETRY_AFTER),
        }
    }
}

impl Ticket {
    /// Waits for the turn, first come first served. Returns at once when it has already come.
    pub(crate) async fn turn(&mut self) -> Result<(), ServiceError> {
        if let Self::Waiting { running, .. } = self {
            let permit = Arc::clone(running)
                .acquire_owned()
                .await
                .map_err(|_| ServiceError::unavailable("the coordinator is shutting down"))?;
            *self = Self::Running(permit);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_queue_is_bounded_and_moves_up() {
        let admission = Admission::new(1, 1);
        let mut first = admission.enter().unwrap();
        first.turn().await.unwrap();
        let mut second = admission.enter().unwrap();
        let refused = admission.enter().unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        assert!(
            refused.to_string().contains("1 running and 1 waiting"),
            "{refused}"
        );

        let turn = tokio::spawn(async move {
            second.turn().await.unwrap();
            second
        });
        tokio::task::yield_now().await;
        assert!(!turn.is_finished());
        drop(first);
        let second = turn.await.unwrap();
        // The queue place is free again, the slot is not.
        let third = admission.enter().unwrap();
        assert!(matches!(third, Ticket::Waiting { .. }));
        assert!(admission.enter().is_err());
        drop(second);
    }

    #[tokio::test]
    async fn leaving_the_queue_frees_the_place() {
        let admission = Admission::new(1, 1);
        let _first = admission.enter().unwrap();
        let second = admission.enter().unwrap();
        assert!(admission.enter().is_err());
        drop(second);
        assert!(admission.enter().is_ok());
    }

    #[tokio::test]
    async fn without_a_queue_a_busy_service_refuses_at_once() {
        let admission = Admission::new(1, 0);
        let _first = admission.enter().unwrap();
        assert!(admission.enter().is_err());
    }
}
