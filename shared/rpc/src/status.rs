//! The one place where an error becomes a gRPC status, and a peer's status an error again.
//!
//! Every status carries a `google.rpc.ErrorInfo` whose reason names the kind and whose metadata holds the values of
//! the message, so a service can pass a peer's error on without losing its kind.

use std::{collections::HashMap, time::Duration};

use tonic::{
    Code, Status, TimeoutExpired,
    metadata::{MetadataMap, MetadataValue},
};
use tonic_types::{ErrorDetails, ErrorInfo, StatusExt};

/// Domain of every `google.rpc.ErrorInfo` that treespec sends.
pub const ERROR_DOMAIN: &str = "treespec";

/// Trailer that tells gRPC clients with a retry policy how long to wait (gRFC A6), in milliseconds.
pub const RETRY_PUSHBACK: &str = "grpc-retry-pushback-ms";

const NOT_IMPLEMENTED: &str = " is not implemented by this service";

const EXISTS_ALREADY: &str = " exists already";

/// Longest error text taken over from a peer, in bytes.
const MAX_PEER_MESSAGE: usize = 4096;

/// What can go wrong with a call. Deliberately few kinds: one per gRPC code that a service may answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceError {
    /// A field of the request is wrong, whatever the state of the service.
    #[error("{field}: {description}")]
    InvalidArgument {
        /// Path of the field in the request, such as `sampling.temperature`.
        field: String,
        /// What is wrong with it, with the value.
        description: String,
    },
    /// Something the request names does not exist.
    #[error("{resource} {name} not found")]
    NotFound {
        /// Kind of thing, such as `sequence`.
        resource: String,
        /// Its name.
        name: String,
    },
    /// The request would make something that is there already.
    #[error("{resource} {name} exists already")]
    AlreadyExists {
        /// Kind of thing, such as `request`.
        resource: String,
        /// Its name.
        name: String,
    },
    /// The request is sound but does not fit the state or the configuration of the service.
    #[error("{subject}: {description}")]
    FailedPrecondition {
        /// What does not fit, such as `fingerprint.vocab_size`.
        subject: String,
        /// How it does not fit, with the values of both sides.
        description: String,
    },
    /// Admission was refused.
    #[error("out of {what}")]
    ResourceExhausted {
        /// What ran out and how much there is, such as `drafter contexts (all 64 in use)`.
        what: String,
        /// When a retry is worth it.
        retry_after: Option<Duration>,
    },
    /// The service or one it depends on cannot answer now.
    #[error("{description}")]
    Unavailable {
        /// What is missing.
        description: String,
        /// When a retry is worth it.
        retry_after: Option<Duration>,
    },
    /// The caller's deadline passed.
    #[error("the deadline of the request has passed")]
    DeadlineExceeded,
    /// The caller gave up.
    #[error("the request was cancelled")]
    Cancelled,
    /// The service does not do this.
    #[error("{what}{NOT_IMPLEMENTED}")]
    Unimplemented {
        /// What was asked for.
        what: String,
    },
    /// The work was stopped because other work conflicts with it.
    #[error("{description}")]
    Aborted {
        /// What it conflicts with.
        description: String,
    },
    /// A fault of the service itself.
    #[error("{description}")]
    Internal {
        /// What failed.
        description: String,
    },
}

impl ServiceError {
    /// A wrong field of the request.
    pub fn invalid(field: impl Into<String>, description: impl Into<String>) -> Self {
        Self::InvalidArgument {
            field: field.into(),
            description: description.into(),
        }
    }

    /// A request that does not fit the service's state.
    pub fn precondition(subject: impl Into<String>, description: impl Into<String>) -> Self {
        Self::FailedPrecondition {
            subject: subject.into(),
            description: description.into(),
        }
    }

    /// A dependency that cannot answer now, without advice on when to retry.
    pub fn unavailable(description: impl Into<String>) -> Self {
        Self::Unavailable {
            description: description.into(),
            retry_after: None,
        }
    }

    /// A fault of the service itself.
    pub fn internal(description: impl Into<String>) -> Self {
        Self::Internal {
            description: description.into(),
        }
    }

    /// The gRPC code of the error.
    pub fn code(&self) -> Code {
        self.kind().0
    }

    /// True when the same request may succeed elsewhere or later.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. } | Self::ResourceExhausted { .. }
        )
    }

    /// Code, and reason of the `ErrorInfo`.
    fn kind(&self) -> (Code, &'static str) {
        match self {
            Self::InvalidArgument { .. } => (Code::InvalidArgument, "INVALID_ARGUMENT"),
            Self::NotFound { .. } => (Code::NotFound, "NOT_FOUND"),
            Self::AlreadyExists { .. } => (Code::AlreadyExists, "ALREADY_EXISTS"),
            Self::FailedPrecondition { .. } => (Code::FailedPrecondition, "FAILED_PRECONDITION"),
            Self::ResourceExhausted { .. } => (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
            Self::Unavailable { .. } => (Code::Unavailable, "UNAVAILABLE"),
            Self::DeadlineExceeded => (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
            Self::Cancelled => (Code::Cancelled, "CANCELLED"),
            Self::Unimplemented { .. } => (Code::Unimplemented, "UNIMPLEMENTED"),
            Self::Aborted { .. } => (Code::Aborted, "ABORTED"),
            Self::Internal { .. } => (Code::Internal, "INTERNAL"),
        }
    }

    /// The values of the message, as `ErrorInfo.metadata` carries them.
    fn metadata(&self) -> HashMap<String, String> {
        let pairs: &[(&str, &String)] = match self {
            Self::InvalidArgument { field, description } => {
                &[("field", field), ("description", description)]
            }
            Self::NotFound { resource, name } | Self::AlreadyExists { resource, name } => {
                &[("resource", resource), ("name", name)]
            }
            Self::FailedPrecondition {
                subject,
                description,
            } => &[("subject", subject), ("description", description)],
            Self::ResourceExhausted { what, .. } | Self::Unimplemented { what } => {
                &[("what", what)]
            }
            Self::Unavailable { description, .. }
            | Self::Aborted { description }
            | Self::Internal { description } => &[("description", description)],
            Self::DeadlineExceeded | Self::Cancelled => &[],
        };
        pairs
            .iter()
            .map(|&(key, value)| (key.to_owned(), value.clone()))
            .collect()
    }

    /// The other details that belong to the kind (`google.rpc` error model).
    fn add_details(&self, details: &mut ErrorDetails) {
        match self {
            Self::InvalidArgument { field, description } => {
                details.add_bad_request_violation(field, description);
            }
            Self::NotFound { resource, name } | Self::AlreadyExists { resource, name } => {
                details.set_resource_info(resource, name, "", self.to_string());
            }
            Self::FailedPrecondition {
                subject,
                description,
            } => {
                details.add_precondition_failure_violation("STATE", subject, description);
            }
            Self::ResourceExhausted { what, .. } => {
                details.add_quota_failure_violation(what, self.to_string());
            }
            _ => {}
        }
        if let Some(delay) = self.retry_after() {
            details.set_retry_info(Some(delay));
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::ResourceExhausted { retry_after, .. } | Self::Unavailable { retry_after, .. } => {
                *retry_after
            }
            _ => None,
        }
    }

    /// Understands the status of a peer. Call it on the client side of a call only.
    ///
    /// A status made by treespec gives back the error it was made from. A foreign one keeps its code as far as there
    /// is a kind for it. A status that the local transport made is [`ServiceError::DeadlineExceeded`] when the call's
    /// own timeout expired, and else [`ServiceError::Unavailable`]: the connection broke, whatever code it chose.
    pub fn from_status(status: &Status) -> Self {
        if let Some(source) = std::error::Error::source(status) {
            return if causes(source).any(|cause| cause.is::<TimeoutExpired>()) {
                Self::DeadlineExceeded
            } else {
                Self::unavailable(with_causes(status.message(), source))
            };
        }
        let details = status.get_error_details();
        details
            .error_info()
            .filter(|info| info.domain == ERROR_DOMAIN)
            .and_then(|info| Self::from_error_info(info, &details))
            .unwrap_or_else(|| Self::from_code(status.code(), &details, status.message()))
    }

    /// A peer's error that came as code and message only, such as in a `SequenceFailure`. Gives back the error it was
    /// made from, except for advice on when to retry.
    pub fn from_code_and_message(code: i32, message: &str) -> Self {
        Self::from_code(Code::from_i32(code), &ErrorDetails::new(), message)
    }

    fn from_error_info(info: &ErrorInfo, details: &ErrorDetails) -> Option<Self> {
        let get = |key: &str| info.metadata.get(key).map(|value| bounded(value));
        let retry_after = details.retry_info().and_then(|retry| retry.retry_delay);
        Some(match info.reason.as_str() {
            "INVALID_ARGUMENT" => Self::invalid(get("field")?, get("description")?),
            "NOT_FOUND" => Self::NotFound {
                resource: get("resource")?,
                name: get("name")?,
            },
            "ALREADY_EXISTS" => Self::AlreadyExists {
                resource: get("resource")?,
                name: get("name")?,
            },
            "FAILED_PRECONDITION" => Self::precondition(get("subject")?, get("description")?),
            "RESOURCE_EXHAUSTED" => Self::ResourceExhausted {
                what: get("what")?,
                retry_after,
            },
            "UNAVAILABLE" => Self::Unavailable {
                description: get("description")?,
                retry_after,
            },
            "DEADLINE_EXCEEDED" => Self::DeadlineExceeded,
            "CANCELLED" => Self::Cancelled,
            "UNIMPLEMENTED" => Self::Unimplemented { what: get("what")? },
            "ABORTED" => Self::Aborted {
                description: get("description")?,
            },
            "INTERNAL" => Self::internal(get("description")?),
            _ => return None,
        })
    }

    fn from_code(code: Code, details: &ErrorDetails, message: &str) -> Self {
        let description = bounded(message);
        let retry_after = details.retry_info().and_then(|retry| retry.retry_delay);
        // The messages of this module are taken apart again, so that passing an error on does not nest them.
        let (subject, rest) = message.split_once(": ").unwrap_or(("request", message));
        match code {
            Code::InvalidArgument | Code::OutOfRange => {
                let violation = details
                    .bad_request()
                    .and_then(|request| request.field_violations.first());
                match violation {
                    Some(first) => {
                        Self::invalid(bounded(&first.field), bounded(&first.description))
                    }
                    None => Self::invalid(bounded(subject), bounded(rest)),
                }
            }
            Code::NotFound => {
                let what = message.strip_suffix(" not found").unwrap_or(message);
                let (resource, name) = what.rsplit_once(' ').unwrap_or(("resource", what));
                Self::NotFound {
                    resource: bounded(resource),
                    name: bounded(name),
                }
            }
            Code::AlreadyExists => {
                let what = message.strip_suffix(EXISTS_ALREADY).unwrap_or(message);
                let (resource, name) = what.split_once(' ').unwrap_or(("resource", what));
                Self::AlreadyExists {
                    resource: bounded(resource),
                    name: bounded(name),
                }
            }
            Code::FailedPrecondition => Self::precondition(bounded(subject), bounded(rest)),
            Code::ResourceExhausted => Self::ResourceExhausted {
                what: bounded(message.strip_prefix("out of ").unwrap_or(message)),
                retry_after,
            },
            Code::Unavailable => Self::Unavailable {
                description,
                retry_after,
            },
            Code::DeadlineExceeded => Self::DeadlineExceeded,
            Code::Cancelled => Self::Cancelled,
            Code::Unimplemented => Self::Unimplemented {
                what: bounded(message.strip_suffix(NOT_IMPLEMENTED).unwrap_or(message)),
            },
            Code::Aborted => Self::Aborted { description },
            Code::Internal => Self::internal(description),
            other => Self::internal(format!("{other:?}: {description}")),
        }
    }
}

impl From<ServiceError> for Status {
    fn from(error: ServiceError) -> Self {
        let (code, reason) = error.kind();
        let mut details = ErrorDetails::new();
        details.set_error_info(reason, ERROR_DOMAIN, error.metadata());
        error.add_details(&mut details);
        let mut metadata = MetadataMap::new();
        if let Some(delay) = error.retry_after() {
            let millis = i64::try_from(delay.as_millis()).unwrap_or(i64::MAX);
            metadata.insert(RETRY_PUSHBACK, MetadataValue::from(millis));
        }
        Status::with_error_details_and_metadata(code, error.to_string(), details, metadata)
    }
}

/// A peer decides how long its message is; what is passed on or logged is bounded.
fn bounded(message: &str) -> String {
    let mut end = message.len().min(MAX_PEER_MESSAGE);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message[..end].to_owned()
}

fn causes<'a>(
    source: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(source), |error| error.source())
}

/// tonic's own message is as vague as "transport error": the chain below it says which address refused.
fn with_causes(message: &str, source: &(dyn std::error::Error + 'static)) -> String {
    let mut text = message.to_owned();
    for cause in causes(source) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    bounded(&text)
}

#[cfg(test)]
mod tests;
