//! A lost replica and the stream that goes on.

use tonic::{Code, Status};
use treespec_rpc::proto::{
    coordinator::v1::{GenerateRequest, generate_response::Event},
    verify::v1::{
        FinishReason, GetModelInfoResponse, Mode, OutputOptions, PromptLogprobs,
        SpeculationOptions, generate_response::Event as VerifyEvent,
    },
};

use crate::{
    fake_verify::{Act, FakeVerify, finish, prefill, tokens},
    harness::{Coordinator, DRAFTER, assert_retryable, eos, model, request},
};

/// A broken replica: two tokens, then `end`.
fn two_tokens_then(end: impl IntoIterator<Item = Act>) -> Vec<Act> {
    [prefill(3, 3), tokens(&[40]), tokens(&[41])]
        .into_iter()
        .chain(end)
        .collect()
}

fn last_tokens() -> Vec<Act> {
    vec![prefill(5, 5), tokens(&[42]), finish(FinishReason::Length)]
}

#[tokio::test]
async fn another_replica_goes_on_and_the_client_sees_one_stream() {
    let ends: [Vec<Act>; 2] = [vec![], vec![Act::Fail(Status::unavailable("draining"))]];
    for end in ends {
        let (broken, whole) = (
            FakeVerify::start(model()).await,
            FakeVerify::start_loading(model()).await,
        );
        let drafter = format!("--draft={DRAFTER}");
        let coordinator = Coordinator::start(&[&broken, &whole], &[&drafter]).await;
        broken.script(two_tokens_then(end.into_iter().collect::<Vec<_>>()));
        whole.script(last_tokens());
        // Only now is there a second one: the first call is the broken replica's.
        whole.readiness().set_serving().await;
        whole.known().await;
        let answer = coordinator
            .generate(GenerateRequest {
                request_id: "moved".to_owned(),
                max_tokens: Some(3),
                ..request(&[1, 2, 3])
            })
            .await
            .unwrap();

        assert_eq!(answer.token_ids(), [40, 41, 42]);
        assert_eq!(answer.finished().usage.unwrap().completion_tokens, 3);
        let started = answer
            .events
            .iter()
            .filter(|event| matches!(event, Event::Started(_)));
        assert_eq!(started.count(), 1);
        let progress = answer
            .events
            .iter()
            .filter(|event| matches!(event, Event::Progress(_)));
        assert_eq!(progress.count(), 1, "a replay is not the client's progress");

        let (first, second) = (broken.calls().remove(0), whole.calls().remove(0));
        let replay = second.request;
        assert_eq!(replay.token_ids, [1, 2, 3, 40, 41]);
        assert_eq!(replay.prompt_length, Some(3));
        assert_eq!(replay.max_tokens, Some(3));
        assert_eq!(replay.request_id, "moved");
        assert_eq!(replay.sampling, first.request.sampling);
        assert!(replay.drafter.is_some());
    }
}

#[tokio::test]
async fn the_only_replica_is_used_again_when_it_is_back() {
    let mut verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    verify.script(two_tokens_then([Act::Hang]));
    verify.script(last_tokens());
    let mut stream = coordinator.open(request(&[1, 2, 3])).await.unwrap();
    let mut token_ids = Vec::new();
    while let Some(response) = stream.message().await.unwrap() {
        if let Some(Event::Delta(delta)) = response.event {
            token_ids.extend(delta.token_ids);
            if token_ids.len() == 2 {
                verify.kill().await;
                verify.restart().await;
            }
        }
    }
    assert_eq!(token_ids, [40, 41, 42]);
    assert_eq!(verify.calls()[1].request.token_ids, [1, 2, 3, 40, 41]);
}

#[tokio::test]
async fn after_three_attempts_the_client_is_told() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    for _ in 0..4 {
        verify.script([Act::Fail(Status::unavailable("draining"))]);
    }
    let status = coordinator.generate(request(&[1])).await.unwrap_err();
    assert_retryable(&status, Code::Unavailable);
    assert!(status.message().contains("3 times"), "{status:?}");
    assert!(status.message().contains("draining"), "{status:?}");
    assert_eq!(verify.calls().len(), 3);
}

#[tokio::test]
async fn without_a_replica_the_stream_ends_unavailable() {
    let mut verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &["--failover-wait-ms=100"]).await;
    verify.script(two_tokens_then([Act::Hang]));
    let mut stream = coordinator.open(request(&[1, 2, 3])).await.unwrap();
    verify.active(1).await;
    verify.kill().await;
    let status = loop {
        match stream.message().await {
            Ok(response) => assert!(response.is_some(), "the stream ended without a status"),
            Err(status) => break status,
        }
    };
    assert_retryable(&status, Code::Unavailable);
    assert!(status.message().contains(&verify.endpoint()), "{status:?}");

    // New requests are told at once.
    let status = coordinator.generate(request(&[1])).await.unwrap_err();
    assert_retryable(&status, Code::Unavailable);
}

#[tokio::test]
async fn committed_tokens_do_not_move_to_another_numerics_profile() {
    let other = GetModelInfoResponse {
        numerics_profile: "bf16-test".to_owned(),
        ..model()
    };
    let broken = FakeVerify::start(model()).await;
    let different = FakeVerify::start_loading(other).await;
    let coordinator =
        Coordinator::start(&[&broken, &different], &["--failover-wait-ms=2000"]).await;
    broken.script(two_tokens_then([]));
    broken.script(last_tokens());
    different.readiness().set_serving().await;
    different.known().await;
    let answer = coordinator.generate(request(&[1, 2, 3])).await.unwrap();
    assert_eq!(answer.token_ids(), [40, 41, 42]);
    assert!(different.calls().is_empty());
}

#[tokio::test]
async fn a_complete_answer_is_not_replayed() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let short = || GenerateRequest {
        max_tokens: Some(2),
        ..request(&[1, 2, 3])
    };
    verify.script(two_tokens_then([]));
    let answer = coordinator.generate(short()).await.unwrap();
    assert_eq!(answer.finished().finish_reason(), FinishReason::Length);

    verify.script([tokens(&[40, eos()])]);
    let answer = coordinator.generate(request(&[1])).await.unwrap();
    assert_eq!(answer.finished().finish_reason(), FinishReason::Stop);
    assert_eq!(answer.finished().usage.unwrap().completion_tokens, 2);
    assert_eq!(verify.calls().len(), 2);
}

#[tokio::test]
async fn prompt_logprobs_come_once() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let logprobs = || Act::Send(VerifyEvent::PromptLogprobs(PromptLogprobs::default()));
    verify.script([logprobs(), tokens(&[40])]);
    verify.script(last_tokens());
    let output = Some(OutputOptions {
        prompt_logprobs: Some(true),
        ..OutputOptions::default()
    });
    let request = GenerateRequest {
        output,
        ..request(&[1, 2])
    };
    let answer = coordinator.generate(request).await.unwrap();
    assert_eq!(answer.token_ids(), [40, 42]);
    let asked: Vec<_> = verify
        .calls()
        .iter()
        .map(|call| call.request.output.as_ref().unwrap().prompt_logprobs())
        .collect();
    assert_eq!(asked, [true, false]);
}

#[tokio::test]
async fn sequences_go_to_the_replica_with_the_fewest() {
    let (a, b) = (
        FakeVerify::start(model()).await,
        FakeVerify::start(model()).await,
    );
    let coordinator = Coordinator::start(&[&a, &b], &[]).await;
    a.known().await;
    b.known().await;
    let mut streams = Vec::new();
    for _ in 0..2 {
        for verify in [&a, &b] {
            verify.script([tokens(&[40]), Act::Hang]);
        }
    }
    for _ in 0..4 {
        let mut stream = coordinator.open(request(&[1])).await.unwrap();
        // Started, then the delta: the replica has taken the sequence.
        for _ in 0..2 {
            stream.message().await.unwrap().unwrap();
        }
        streams.push(stream);
    }
    a.active(2).await;
    b.active(2).await;
}

#[tokio::test]
async fn a_replica_without_a_drafter_goes_on_plainly() {
    let hosting = GetModelInfoResponse {
        hosts_drafter: true,
        ..model()
    };
    let (hosting, plain) = (
        FakeVerify::start(hosting).await,
        FakeVerify::start_loading(model()).await,
    );
    let coordinator = Coordinator::start(&[&hosting, &plain], &[]).await;
    hosting.script(two_tokens_then([]));
    plain.script(last_tokens());
    plain.readiness().set_serving().await;
    plain.known().await;
    let mode = |mode: Mode| SpeculationOptions {
        mode: Some(mode.into()),
        ..Default::default()
    };
    let answer = coordinator
        .generate(GenerateRequest {
            speculation: Some(mode(Mode::Tree)),
            ..request(&[1, 2, 3])
        })
        .await
        .unwrap();
    assert_eq!(answer.token_ids(), [40, 41, 42]);
    let (first, second) = (hosting.calls().remove(0), plain.calls().remove(0));
    assert_eq!(first.request.speculation.unwrap().mode(), Mode::Tree);
    assert_eq!(second.request.speculation, Some(mode(Mode::Ar)));
}
