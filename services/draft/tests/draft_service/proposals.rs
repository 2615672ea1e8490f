use std::time::{Duration, Instant};

use tonic::Code;
use treespec_engine::DraftShape;
use treespec_rpc::proto::draft::v1::{
    DraftShape as ShapeMessage, Proposal, Propose, TopkPlacement, proposal::Draft,
};

use crate::{
    scripted::{BLOCK, WINDOW},
    verifier::{Service, Verifier, features, propose, tree_of},
};

async fn ask(verifier: &mut Verifier, message: Propose) -> Proposal {
    verifier.send_propose(message).await;
    verifier.proposal().await
}

#[tokio::test]
async fn both_placements_give_the_same_draft() {
    let service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    verifier.open(1, 0).await;
    verifier.context(1, 0, 0, 9).await;
    let budgets = [1, 2, 8, 31, 255];
    let shapes = budgets
        .map(|budget| DraftShape::Tree { budget })
        .into_iter()
        .chain([DraftShape::Chain]);
    for shape in shapes {
        let (name, budget) = match shape {
            DraftShape::Chain => (ShapeMessage::Chain, 0),
            DraftShape::Tree { budget } => (ShapeMessage::Tree, budget as u32),
        };
        let trees = [TopkPlacement::Draft, TopkPlacement::Verify].map(|placement| Propose {
            shape: name.into(),
            budget,
            placement: placement.into(),
            ..propose(1, 0, 9)
        });
        let here = ask(&mut verifier, trees[0]).await;
        let there = ask(&mut verifier, trees[1]).await;
        assert!(matches!(here.draft, Some(Draft::Tree(_))));
        assert!(matches!(there.draft, Some(Draft::BlockHidden(_))));
        let tree = tree_of(&here, 7, shape);
        assert_eq!(tree, tree_of(&there, 7, shape));
        match shape {
            DraftShape::Chain => assert!(tree.is_chain() && tree.budget() == BLOCK - 1),
            DraftShape::Tree { budget } => assert_eq!(tree.budget(), budget),
        }
        let timings = here.timings.unwrap();
        assert!(timings.forward_seconds > 0.0 && timings.head_seconds > 0.0);
        assert!(timings.tree_seconds > 0.0);
        assert_eq!(there.timings.unwrap().head_seconds, 0.0);
    }
}

#[tokio::test]
async fn a_primed_context_equals_one_sent_on_the_link() {
    let service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    verifier.open(1, 0).await;
    verifier.context(1, 0, 0, 10).await;
    verifier.open(2, 3).await;
    let chunks: Vec<_> = [(0, 3), (3, 4), (7, 2)]
        .map(|(start, count)| (start, features(start, count)))
        .into();
    assert_eq!(service.prime("v", 2, 3, &chunks).await, Ok(9));
    verifier.context(2, 3, 9, 1).await;
    let linked = ask(&mut verifier, propose(1, 0, 10)).await;
    let primed = ask(&mut verifier, propose(2, 3, 10)).await;
    assert_eq!(linked.draft, primed.draft);
}

#[tokio::test]
async fn only_the_last_rows_of_a_long_prefill_are_needed() {
    let service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    verifier.open(1, 0).await;
    let start = 500;
    let chunk = (start, features(start, WINDOW as u32));
    let end = start + WINDOW as u32;
    assert_eq!(service.prime("v", 1, 0, &[chunk]).await, Ok(end));
    verifier.assert_alive(1, 0, end).await;
}

#[tokio::test]
async fn prime_needs_an_open_and_a_sound_stream() {
    let service = Service::start().await;
    let chunk = |start| (start, features(start, 2));
    let unlinked = service.prime("v", 1, 0, &[chunk(0)]).await.unwrap_err();
    assert_eq!(unlinked.code(), Code::NotFound);
    assert!(unlinked.to_string().contains("\"v\""), "{unlinked}");

    let mut verifier = Verifier::connect(&service, "v").await;
    let unopened = service.prime("v", 1, 0, &[chunk(0)]).await.unwrap_err();
    assert_eq!(unopened.code(), Code::NotFound);
    assert!(unopened.to_string().contains("sequence 1"), "{unopened}");

    verifier.open(1, 1).await;
    let empty = service.prime("v", 1, 1, &[]).await.unwrap_err();
    assert_eq!(empty.code(), Code::InvalidArgument);
    let stale = service.prime("v", 1, 0, &[chunk(0)]).await.unwrap_err();
    assert_eq!(stale.code(), Code::FailedPrecondition);
    let nan = service.prime("v", 1, 1, &[(0, vec![f32::NAN, 0.0])]).await;
    assert_eq!(nan.unwrap_err().code(), Code::InvalidArgument);
    let gap = service.prime("v", 1, 1, &[chunk(0), chunk(3)]).await;
    let gap = gap.unwrap_err();
    assert_eq!(gap.code(), Code::FailedPrecondition);
    assert!(gap.to_string().contains("ends at 2"), "{gap}");
    service.wait_open_contexts(0).await;
}

#[tokio::test]
async fn many_sequences_share_a_link() {
    let service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    let sequences = 0..12u64;
    for sequence in sequences.clone() {
        verifier.send_open(sequence, 0).await;
        verifier.context(sequence, 0, 0, sequence as u32 + 1).await;
    }
    for _ in sequences.clone() {
        verifier.receive().await.unwrap();
    }
    for step in 0..5 {
        for sequence in sequences.clone() {
            let end = sequence as u32 + 1 + step;
            let placement = if sequence % 2 == 0 {
                TopkPlacement::Draft
            } else {
                TopkPlacement::Verify
            };
            let message = Propose {
                placement: placement.into(),
                ..propose(sequence, 0, end)
            };
            verifier.send_propose(message).await;
            verifier.context(sequence, 0, end, 1).await;
        }
        for expected in sequences.clone() {
            let proposal = verifier.proposal().await;
            assert_eq!(proposal.sequence_id, expected);
            assert_eq!(proposal.ctx_end, expected as u32 + 1 + step);
            let tree = tree_of(&proposal, 7, DraftShape::Tree { budget: 8 });
            assert_eq!(tree.budget(), 8);
        }
    }
}

/// Printed, not asserted: the machine that runs the tests is shared.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::print_stdout, reason = "the figure is what this test is for")]
async fn round_trip_time() {
    let service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    verifier.open(1, 0).await;
    let mut times: Vec<Duration> = Vec::new();
    for end in 1..500 {
        verifier.context(1, 0, end - 1, 1).await;
        let started = Instant::now();
        ask(&mut verifier, propose(1, 0, end)).await;
        times.push(started.elapsed());
    }
    times.sort();
    let (median, slow) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!("Propose round trip on loopback: median {median:?}, 99% below {slow:?}");
}
