use super::*;

const DELAY: Option<Duration> = Some(Duration::from_millis(1500));

fn every_kind() -> Vec<(ServiceError, Code)> {
    vec![
        (
            ServiceError::invalid("speculation.budget", "0 is outside 1..=255"),
            Code::InvalidArgument,
        ),
        (
            ServiceError::NotFound {
                resource: "sequence".into(),
                name: "17".into(),
            },
            Code::NotFound,
        ),
        (
            ServiceError::precondition("fingerprint.taps", "[1] here, [2] there"),
            Code::FailedPrecondition,
        ),
        (
            ServiceError::ResourceExhausted {
                what: "queue slots (256)".into(),
                retry_after: DELAY,
            },
            Code::ResourceExhausted,
        ),
        (
            ServiceError::ResourceExhausted {
                what: "contexts".into(),
                retry_after: None,
            },
            Code::ResourceExhausted,
        ),
        (
            ServiceError::Unavailable {
                description: "weights are loading".into(),
                retry_after: DELAY,
            },
            Code::Unavailable,
        ),
        (ServiceError::DeadlineExceeded, Code::DeadlineExceeded),
        (ServiceError::Cancelled, Code::Cancelled),
        (
            ServiceError::Unimplemented {
                what: "Embed".into(),
            },
            Code::Unimplemented,
        ),
        (
            ServiceError::Aborted {
                description: "request r1 is already running".into(),
            },
            Code::Aborted,
        ),
        (
            ServiceError::internal("the engine thread has stopped"),
            Code::Internal,
        ),
    ]
}

#[test]
fn every_kind_has_its_code_and_error_info_and_comes_back() {
    for (error, code) in every_kind() {
        let status = Status::from(error.clone());
        assert_eq!(status.code(), code, "{error:?}");
        assert_eq!(status.message(), error.to_string());
        let info = status.get_details_error_info().expect("ErrorInfo");
        assert_eq!(info.domain, ERROR_DOMAIN);
        assert!(
            info.reason
                .chars()
                .all(|c| c.is_ascii_uppercase() || c == '_')
        );
        assert_eq!(ServiceError::from_status(&status), error);
        // What comes over the wire is rebuilt from headers.
        let wire = status.into_http::<()>();
        let received = Status::from_header_map(wire.headers()).expect("status headers");
        assert_eq!(ServiceError::from_status(&received), error);
        // A SequenceFailure has no room for details.
        let spare = ServiceError::from_code_and_message(code.into(), &error.to_string());
        assert_eq!(spare.to_string(), error.to_string());
        assert_eq!(spare.code(), code);
    }
}

#[test]
fn kinds_carry_their_own_details() {
    let status = |error: ServiceError| Status::from(error);

    let bad = status(ServiceError::invalid("max_tokens", "0 is outside 1.."));
    let violations = bad.get_details_bad_request().unwrap().field_violations;
    assert_eq!(violations[0].field, "max_tokens");

    let missing = status(ServiceError::NotFound {
        resource: "model".into(),
        name: "m".into(),
    });
    let resource = missing.get_details_resource_info().unwrap();
    assert_eq!(
        (resource.resource_type, resource.resource_name),
        ("model".into(), "m".into())
    );

    let unmet = status(ServiceError::precondition("drafter", "no head"));
    let violations = unmet.get_details_precondition_failure().unwrap().violations;
    assert_eq!(violations[0].subject, "drafter");

    let full = status(ServiceError::ResourceExhausted {
        what: "queue slots".into(),
        retry_after: DELAY,
    });
    assert_eq!(
        full.get_details_quota_failure().unwrap().violations[0].subject,
        "queue slots"
    );
    assert_eq!(full.get_details_retry_info().unwrap().retry_delay, DELAY);
    assert_eq!(full.metadata().get(RETRY_PUSHBACK).unwrap(), "1500");

    let absent = status(ServiceError::unavailable("no verifier"));
    assert!(absent.get_details_retry_info().is_none());
    assert!(absent.metadata().get(RETRY_PUSHBACK).is_none());
}

#[test]
fn foreign_statuses_keep_their_code_where_there_is_a_kind() {
    let cases = [
        (Code::InvalidArgument, Code::InvalidArgument),
        (Code::OutOfRange, Code::InvalidArgument),
        (Code::NotFound, Code::NotFound),
        (Code::AlreadyExists, Code::AlreadyExists),
        (Code::Unavailable, Code::Unavailable),
        (Code::Unauthenticated, Code::Internal),
        (Code::Unknown, Code::Internal),
    ];
    for (from, to) in cases {
        let error = ServiceError::from_status(&Status::new(from, "told by a proxy"));
        assert_eq!(error.code(), to, "{from:?}");
        assert!(error.to_string().contains("told by a proxy"), "{error}");
    }
}

#[test]
fn a_broken_connection_is_unavailable_and_names_its_cause() {
    let io = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "reset by peer");
    let status = Status::from_error(Box::new(io));
    let error = ServiceError::from_status(&status);
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.is_retryable());
    assert!(error.to_string().contains("reset by peer"), "{error}");
}

#[test]
fn a_peer_cannot_make_messages_long() {
    let error = ServiceError::from_status(&Status::internal("é".repeat(100_000)));
    assert!(error.to_string().len() <= MAX_PEER_MESSAGE);
}

#[test]
fn an_incomplete_error_info_falls_back_to_the_code() {
    let mut details = ErrorDetails::new();
    details.set_error_info(
        "INVALID_ARGUMENT",
        ERROR_DOMAIN,
        HashMap::<String, String>::new(),
    );
    let status = Status::with_error_details(Code::InvalidArgument, "odd", details);
    assert_eq!(
        ServiceError::from_status(&status),
        ServiceError::invalid("request", "odd")
    );
}

#[test]
fn an_expired_timeout_of_the_call_is_a_deadline() {
    let status = Status::from_error(Box::new(TimeoutExpired(())));
    assert_eq!(
        ServiceError::from_status(&status),
        ServiceError::DeadlineExceeded
    );
}
