use crate::{ServiceError, proto::draft::v1 as pb};

/// Tells the verifier that a sequence cannot be drafted for any more.
pub fn failure_to_proto(sequence_id: u64, epoch: u32, error: &ServiceError) -> pb::SequenceFailure {
    pb::SequenceFailure {
        sequence_id,
        epoch,
        code: error.code().into(),
        message: error.to_string(),
    }
}

/// The drafter's error.
pub fn failure_from_proto(failure: &pb::SequenceFailure) -> ServiceError {
    ServiceError::from_code_and_message(failure.code, &failure.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_and_message_cross_the_wire() {
        let error = ServiceError::precondition("ctx_end", "9 asked, 8 held");
        let failure = failure_to_proto(7, 2, &error);
        assert_eq!(
            (failure.sequence_id, failure.epoch, failure.code),
            (7, 2, 9)
        );
        assert_eq!(failure_from_proto(&failure), error);
    }
}
