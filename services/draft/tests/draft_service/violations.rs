//! A violation of the protocol costs its sequence, never the link or another sequence.

use tonic::Code;
use treespec_rpc::proto::draft::v1::{
    Context, DraftShape, FeatureRows, Propose, SequenceFailure, TopkPlacement,
    link_request::Message,
};

use crate::{
    scripted::{CONTEXT_LENGTH, VOCAB},
    verifier::{MAX_SEQUENCES, Service, Verifier, features, propose},
};

fn assert_failure(failure: &SequenceFailure, key: (u64, u32), code: Code, parts: &[&str]) {
    assert_eq!((failure.sequence_id, failure.epoch), key, "{failure:?}");
    assert_eq!(Code::from_i32(failure.code), code, "{failure:?}");
    for part in parts {
        assert!(
            failure.message.contains(part),
            "{} lacks {part}",
            failure.message
        );
    }
}

/// A link with sequence 1 at epoch 5, which the test may ruin, and sequence 2, which must not notice. Both hold
/// positions 0..4.
async fn two_sequences(service: &Service) -> Verifier {
    let mut verifier = Verifier::connect(service, "v").await;
    for (sequence, epoch) in [(1, 5), (2, 0)] {
        verifier.open(sequence, epoch).await;
        verifier.context(sequence, epoch, 0, 4).await;
    }
    verifier
}

/// The message ends sequence 1 at its epoch.
async fn assert_fatal(message: Message, code: Code, parts: &[&str]) {
    let service = Service::start().await;
    let mut verifier = two_sequences(&service).await;
    verifier.send(message).await;
    assert_failure(&verifier.failure().await, (1, 5), code, parts);
    service.wait_open_contexts(1).await;
    verifier.send_propose(propose(1, 5, 4)).await;
    assert_failure(
        &verifier.failure().await,
        (1, 5),
        Code::NotFound,
        &["sequence 1"],
    );
    verifier.assert_alive(2, 0, 4).await;
    // The verifier can start over.
    verifier.open(1, 6).await;
    verifier.context(1, 6, 2, 2).await;
    verifier.assert_alive(1, 6, 4).await;
}

/// The message fails without harm to sequence 1.
async fn assert_harmless(message: Message, key: (u64, u32), code: Code, parts: &[&str]) {
    let service = Service::start().await;
    let mut verifier = two_sequences(&service).await;
    verifier.send(message).await;
    assert_failure(&verifier.failure().await, key, code, parts);
    verifier.assert_alive(1, 5, 4).await;
    verifier.assert_alive(2, 0, 4).await;
}

fn context(sequence_id: u64, epoch: u32, rows: Option<FeatureRows>) -> Message {
    Message::Context(Context {
        sequence_id,
        epoch,
        rows,
    })
}

fn rows(start: u32, count: u32) -> Option<FeatureRows> {
    Some(crate::verifier::rows(start, &features(start, count)))
}

#[tokio::test]
async fn a_gap_or_an_overlap_in_the_context() {
    let gap = context(1, 5, rows(6, 1));
    assert_fatal(gap, Code::FailedPrecondition, &["6", "ends at 4"]).await;
    let overlap = context(1, 5, rows(3, 2));
    assert_fatal(overlap, Code::FailedPrecondition, &["3", "ends at 4"]).await;
}

#[tokio::test]
async fn malformed_rows() {
    let absent = context(1, 5, None);
    assert_fatal(absent, Code::InvalidArgument, &["rows", "missing"]).await;
    let mut short = rows(4, 2);
    short.as_mut().unwrap().ctx_end = 7;
    assert_fatal(
        context(1, 5, short),
        Code::InvalidArgument,
        &["16 bytes", "24"],
    )
    .await;
    let nan = crate::verifier::rows(4, &[1.0, f32::NAN]);
    assert_fatal(context(1, 5, Some(nan)), Code::InvalidArgument, &["NaN"]).await;
}

#[tokio::test]
async fn a_proposal_at_the_wrong_position() {
    for ctx_end in [3, 5] {
        let message = Message::Propose(propose(1, 5, ctx_end));
        let asked = format!("at {ctx_end}");
        assert_fatal(
            message,
            Code::FailedPrecondition,
            &["ctx_end", &asked, "ends at 4"],
        )
        .await;
    }
}

#[tokio::test]
async fn malformed_proposals() {
    type Edit = fn(&mut Propose);
    let cases: [(Edit, &str, &str); 7] = [
        (|p| p.root_token_id = VOCAB as u32, "root_token_id", "40"),
        (|p| p.budget = 0, "budget", "0"),
        (|p| p.budget = 256, "budget", "256"),
        (|p| p.shape = DraftShape::Unspecified.into(), "shape", "0"),
        (|p| p.shape = 9, "shape", "9"),
        (
            |p| p.placement = TopkPlacement::Unspecified.into(),
            "placement",
            "0",
        ),
        (|p| p.placement = -1, "placement", "-1"),
    ];
    for (edit, field, value) in cases {
        let mut message = propose(1, 5, 4);
        edit(&mut message);
        assert_fatal(
            Message::Propose(message),
            Code::InvalidArgument,
            &[field, value],
        )
        .await;
    }
}

#[tokio::test]
async fn messages_for_another_epoch() {
    for epoch in [4, 6] {
        let parts = ["epoch 5", &format!("epoch {epoch}")];
        let key = (1, epoch);
        let late = context(1, epoch, rows(4, 1));
        assert_harmless(late, key, Code::FailedPrecondition, &parts).await;
        let late = Message::Propose(propose(1, epoch, 4));
        assert_harmless(late, key, Code::FailedPrecondition, &parts).await;
        let late = context(1, epoch, None);
        assert_harmless(late, key, Code::InvalidArgument, &["rows"]).await;
    }
}

#[tokio::test]
async fn unknown_sequences() {
    let key = (77, 0);
    let parts = ["sequence 77"];
    assert_harmless(context(77, 0, rows(0, 1)), key, Code::NotFound, &parts).await;
    assert_harmless(
        Message::Propose(propose(77, 0, 0)),
        key,
        Code::NotFound,
        &parts,
    )
    .await;
}

#[tokio::test]
async fn opening_again_under_an_epoch_that_is_not_higher() {
    let service = Service::start().await;
    let mut verifier = two_sequences(&service).await;
    for epoch in [4, 5] {
        verifier.send_open(1, epoch).await;
        let failure = verifier.failure().await;
        assert_failure(
            &failure,
            (1, epoch),
            Code::FailedPrecondition,
            &["epoch 5", "not higher"],
        );
    }
    verifier.assert_alive(1, 5, 4).await;
    verifier.open(1, 6).await;
    verifier.send_propose(propose(1, 6, 4)).await;
    assert_failure(
        &verifier.failure().await,
        (1, 6),
        Code::FailedPrecondition,
        &["ends at 0"],
    );
}

#[tokio::test]
async fn more_sequences_than_there_is_room_for() {
    let service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    let sequences = MAX_SEQUENCES as u64;
    for sequence in 0..sequences {
        verifier.open(sequence, 0).await;
    }
    verifier.send_open(sequences, 0).await;
    let failure = verifier.failure().await;
    assert_failure(&failure, (sequences, 0), Code::ResourceExhausted, &["16"]);
    verifier.close(0).await;
    // Closing what is not open is no error and has no answer.
    verifier.close(0).await;
    verifier.open(sequences, 0).await;
}

#[tokio::test]
async fn a_context_beyond_the_models_length() {
    let long = CONTEXT_LENGTH - 3;
    let message = context(1, 5, rows(4, long));
    assert_fatal(message, Code::InvalidArgument, &["1000"]).await;
}

#[tokio::test]
async fn a_failing_forward_costs_only_the_sequence_at_fault() {
    let service = Service::start().await;
    let mut verifier = two_sequences(&service).await;
    verifier.open(3, 0).await;
    verifier.context(3, 0, CONTEXT_LENGTH - 1, 1).await;
    for (sequence, epoch, ctx_end) in [(1, 5, 4), (3, 0, CONTEXT_LENGTH), (2, 0, 4)] {
        verifier
            .send_propose(propose(sequence, epoch, ctx_end))
            .await;
    }
    assert_eq!(verifier.proposal().await.sequence_id, 1);
    assert_failure(
        &verifier.failure().await,
        (3, 0),
        Code::InvalidArgument,
        &["1000"],
    );
    assert_eq!(verifier.proposal().await.sequence_id, 2);
    service.wait_open_contexts(2).await;
}

#[tokio::test]
async fn a_tree_from_a_drafter_without_a_head() {
    let service = Service::with_head(false).await;
    let mut verifier = two_sequences(&service).await;
    verifier.send_propose(propose(1, 5, 4)).await;
    let failure = verifier.failure().await;
    assert_failure(
        &failure,
        (1, 5),
        Code::FailedPrecondition,
        &["without a head", "verify"],
    );
    verifier
        .send_propose(Propose {
            placement: TopkPlacement::Verify.into(),
            ..propose(2, 0, 4)
        })
        .await;
    assert_eq!(verifier.proposal().await.sequence_id, 2);
}
