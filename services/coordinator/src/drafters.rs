use std::sync::atomic::{AtomicUsize, Ordering};

use treespec_rpc::proto::verify::v1::DrafterLease;

/// The draft services that sequences are spread over, round robin.
///
/// Their health is not watched here: verify decodes plainly while a drafter is away, and says so in its statistics.
#[derive(Debug)]
pub(crate) struct Drafters {
    endpoints: Vec<String>,
    next: AtomicUsize,
}

impl Drafters {
    pub(crate) fn new(endpoints: Vec<String>) -> Self {
        Self {
            endpoints,
            next: AtomicUsize::new(0),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    /// A drafter for one sequence; `None` when none is configured.
    pub(crate) fn lease(&self) -> Option<DrafterLease> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let endpoint = self
            .endpoints
            .get(turn.checked_rem(self.endpoints.len())?)?;
        Some(DrafterLease {
            endpoint: endpoint.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_take_turns() {
        let drafters = Drafters::new(vec!["http://a:1".into(), "http://b:1".into()]);
        let leases: Vec<_> = (0..3).map(|_| drafters.lease().unwrap().endpoint).collect();
        assert_eq!(leases, ["http://a:1", "http://b:1", "http://a:1"]);
    }

    #[test]
    fn without_drafters_there_is_no_lease() {
        let drafters = Drafters::new(Vec::new());
        assert!(drafters.is_empty());
        assert_eq!(drafters.lease(), None);
    }
}
