use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use treespec_rpc::ServiceError;

/// The ids of the requests that run or wait now.
#[derive(Debug, Clone, Default)]
pub(crate) struct InFlight(Arc<Mutex<HashSet<String>>>);

/// A request id that nobody else has while this lives.
#[derive(Debug)]
pub(crate) struct RequestId {
    id: String,
    in_flight: InFlight,
}

impl InFlight {
    /// Takes the client's id, or mints one when it is empty.
    ///
    /// # Errors
    /// [`ServiceError::AlreadyExists`] when a request of that id is in flight.
    pub(crate) fn claim(&self, requested: String) -> Result<RequestId, ServiceError> {
        let id = if requested.is_empty() {
            mint()
        } else {
            requested
        };
        if !self.lock().insert(id.clone()) {
            return Err(ServiceError::AlreadyExists {
                resource: "request_id".to_owned(),
                name: id,
            });
        }
        Ok(RequestId {
            id,
            in_flight: self.clone(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        // Inserting and removing leave the set whole even if an allocation panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RequestId {
    pub(crate) fn as_str(&self) -> &str {
        &self.id
    }
}

impl Drop for RequestId {
    fn drop(&mut self) {
        self.in_flight.lock().remove(&self.id);
    }
}

/// A version 4 UUID (RFC 9562, section 5.4).
fn mint() -> String {
    const VERSION: u128 = 0xf << 76;
    const VARIANT: u128 = 0x3 << 62;
    let bits = (rand::random::<u128>() & !VERSION & !VARIANT) | 0x4 << 76 | 0x2 << 62;
    let hex = format!("{bits:032x}");
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_taken_until_its_request_ends() {
        let in_flight = InFlight::default();
        let first = in_flight.claim("r1".to_owned()).unwrap();
        assert_eq!(first.as_str(), "r1");
        let error = in_flight.claim("r1".to_owned()).unwrap_err();
        assert!(matches!(&error, ServiceError::AlreadyExists { name, .. } if name == "r1"));
        drop(first);
        assert!(in_flight.claim("r1".to_owned()).is_ok());
    }

    #[test]
    fn minted_ids_are_version_4_uuids() {
        let in_flight = InFlight::default();
        let (a, b) = (
            in_flight.claim(String::new()).unwrap(),
            in_flight.claim(String::new()).unwrap(),
        );
        assert_ne!(a.as_str(), b.as_str());
        let parts: Vec<_> = a.as_str().split('-').collect();
        assert_eq!(
            parts.iter().map(|part| part.len()).collect::<Vec<_>>(),
            [8, 4, 4, 4, 12]
        );
        assert!(parts[2].starts_with('4'));
        assert!(parts[3].starts_with(['8', '9', 'a', 'b']));
    }
}
