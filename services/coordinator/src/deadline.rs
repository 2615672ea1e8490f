use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tonic::metadata::MetadataMap;
use treespec_rpc::ServiceError;

const TIMEOUT_HEADER: &str = "grpc-timeout";

/// The moment after which the client no longer waits; `None` when it waits for ever.
///
/// tonic applies `grpc-timeout` to the response head of a call only, so the service enforces it on the stream itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// Reads the `grpc-timeout` of a call that has just arrived.
    ///
    /// # Errors
    /// INVALID_ARGUMENT when the header is not the gRPC form of at most eight digits and a unit.
    pub(crate) fn from_metadata(metadata: &MetadataMap) -> Result<Self, ServiceError> {
        let Some(header) = metadata.get(TIMEOUT_HEADER) else {
            return Ok(Self(None));
        };
        let timeout = header
            .to_str()
            .ok()
            .and_then(parse_timeout)
            .ok_or_else(|| {
                ServiceError::invalid(
                    TIMEOUT_HEADER,
                    format!(
                        "{header:?} is not 1 to 8 digits and one of the units H, M, S, m, u, n"
                    ),
                )
            })?;
        // A timeout beyond the clock's range is no limit.
        Ok(Self(Instant::now().checked_add(timeout)))
    }

    /// Time left, for the calls made on behalf of this one. `None` when there is no limit.
    pub(crate) fn remaining(self) -> Option<Duration> {
        self.0
            .map(|at| at.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn has_passed(self) -> bool {
        self.0.is_some_and(|at| Instant::now() >= at)
    }

    /// Runs `work` until it is done or the deadline passes.
    ///
    /// # Errors
    /// DEADLINE_EXCEEDED; `work` is dropped.
    pub(crate) async fn enforce<T>(
        self,
        work: impl Future<Output = Result<T, ServiceError>>,
    ) -> Result<T, ServiceError> {
        match self.0 {
            None => work.await,
            Some(at) => timeout_at(at, work)
                .await
                .unwrap_or(Err(ServiceError::DeadlineExceeded)),
        }
    }
}

/// `TimeoutValue TimeoutUnit` of the gRPC-over-HTTP/2 specification.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if !(1..=8).contains(&digits.len()) || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deadline(header: &'static str) -> Result<Deadline, ServiceError> {
        let mut metadata = MetadataMap::new();
        metadata.insert(TIMEOUT_HEADER, header.parse().unwrap());
        Deadline::from_metadata(&metadata)
    }

    #[test]
    fn every_unit_is_understood() {
        let cases = [
            ("2H", Duration::from_secs(7200)),
            ("3M", Duration::from_secs(180)),
            ("1S", Duration::from_secs(1)),
            ("250m", Duration::from_millis(250)),
            ("7u", Duration::from_micros(7)),
            ("00000009n", Duration::from_nanos(9)),
            ("99999999H", Duration::from_secs(99_999_999 * 3600)),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_timeout(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "S",
            "10",
            "123456789S",
            "-1S",
            "1.5S",
            "1s",
            "1 S",
            "+1S",
            "1é",
        ] {
            assert_eq!(parse_timeout(text), None, "{text}");
        }
        let error = deadline("soon").unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
        assert!(error.to_string().starts_with("grpc-timeout: "), "{error}");
    }

    #[tokio::test]
    async fn work_ends_at_the_deadline() {
        let deadline = deadline("20m").unwrap();
        let remaining = deadline.remaining().unwrap();
        assert!(remaining <= Duration::from_millis(20), "{remaining:?}");
        let forever = std::future::pending::<Result<(), _>>();
        assert_eq!(
            deadline.enforce(forever).await,
            Err(ServiceError::DeadlineExceeded)
        );
        assert!(deadline.has_passed());
        assert_eq!(deadline.remaining(), Some(Duration::ZERO));
    }

    #[tokio::test]
    async fn no_header_is_no_limit() {
        let deadline = Deadline::from_metadata(&MetadataMap::new()).unwrap();
        assert_eq!(deadline.remaining(), None);
        assert!(!deadline.has_passed());
        assert_eq!(deadline.enforce(async { Ok(()) }).await, Ok(()));
    }
}
