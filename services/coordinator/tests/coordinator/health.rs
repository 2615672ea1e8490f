//! Readiness follows the verify replicas.

use std::sync::Arc;

use tokio::sync::Notify;
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use treespec_coordinator::Server;
use treespec_rpc::proto::{
    coordinator::v1::{DetokenizeRequest, GetModelInfoRequest, generate_response::Event},
    verify::v1::{FinishReason, GetModelInfoResponse},
};

use crate::{
    fake_verify::{Act, FakeVerify, finish, tokens},
    harness::{Coordinator, assert_retryable, config, model, request, tokenizer},
};

#[tokio::test]
async fn it_serves_while_a_replica_does() {
    let mut verify = FakeVerify::start_loading(model()).await;
    let coordinator = Coordinator::start_unready(&[&verify], &[]).await;
    assert_eq!(coordinator.health().await, ServingStatus::NotServing);
    let status = coordinator.generate(request(&[1])).await.unwrap_err();
    assert_retryable(&status, Code::Unavailable);
    let mut client = coordinator.client.clone();
    let status = client
        .get_model_info(GetModelInfoRequest {})
        .await
        .unwrap_err();
    assert_retryable(&status, Code::Unavailable);
    // Text needs no verifier.
    client
        .detokenize(DetokenizeRequest::default())
        .await
        .unwrap();

    verify.readiness().set_serving().await;
    coordinator.wait_for(ServingStatus::Serving).await;
    coordinator.generate(request(&[1])).await.unwrap();

    verify.readiness().set_not_serving().await;
    coordinator.wait_for(ServingStatus::NotServing).await;
    verify.readiness().set_serving().await;
    coordinator.wait_for(ServingStatus::Serving).await;

    verify.kill().await;
    coordinator.wait_for(ServingStatus::NotServing).await;
    verify.restart().await;
    coordinator.wait_for(ServingStatus::Serving).await;
    coordinator.generate(request(&[1])).await.unwrap();
}

#[tokio::test]
async fn one_serving_replica_is_enough() {
    let (first, second) = (
        FakeVerify::start(model()).await,
        FakeVerify::start(model()).await,
    );
    let coordinator = Coordinator::start(&[&first, &second], &[]).await;
    first.readiness().set_not_serving().await;
    second.readiness().set_not_serving().await;
    coordinator.wait_for(ServingStatus::NotServing).await;
    second.readiness().set_serving().await;
    coordinator.wait_for(ServingStatus::Serving).await;
    coordinator.generate(request(&[1])).await.unwrap();
    assert!(first.calls().is_empty());
}

#[tokio::test]
async fn a_replica_with_another_tokenizer_is_not_used() {
    let foreign = GetModelInfoResponse {
        tokenizer_hash: "f00d".to_owned(),
        ..model()
    };
    let other = FakeVerify::start(foreign).await;
    let coordinator = Coordinator::start_unready(&[&other], &[]).await;
    // The replica is looked at right after the start; until then the answer is UNAVAILABLE.
    let status = loop {
        let status = coordinator.generate(request(&[1])).await.unwrap_err();
        if status.code() != Code::Unavailable {
            break status;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    assert!(status.message().contains("f00d"), "{status:?}");
    assert!(
        status.message().contains(tokenizer().fingerprint()),
        "{status:?}"
    );
    assert_eq!(coordinator.health().await, ServingStatus::NotServing);
    assert!(other.calls().is_empty());
}

#[tokio::test]
async fn shutdown_lets_running_streams_end() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let signal = Arc::new(Notify::new());
    verify.script([
        tokens(&[40]),
        Act::Await(Arc::clone(&signal)),
        tokens(&[41]),
        finish(FinishReason::Length),
    ]);
    let mut stream = coordinator.open(request(&[1])).await.unwrap();
    verify.active(1).await;
    let ended = coordinator.shut_down();
    signal.notify_one();
    let mut token_ids = Vec::new();
    while let Some(response) = stream.message().await.unwrap() {
        if let Some(Event::Delta(delta)) = response.event {
            token_ids.extend(delta.token_ids);
        }
    }
    assert_eq!(token_ids, [40, 41]);
    ended.await.unwrap();
}

#[tokio::test]
async fn a_bad_start_names_the_flag() {
    let cases: [(&[&str], &[&str]); 4] = [
        (
            &["--verify=localhost:1"],
            &["--verify", "localhost:1", "http://"],
        ),
        (
            &["--verify=http://a:1", "--draft=ftp://b:1"],
            &["--draft", "ftp"],
        ),
        (
            &["--verify=http://a:1", "--max-in-flight=0"],
            &["--max-in-flight"],
        ),
        (
            &["--verify=http://a:1", "--target=/nonexistent"],
            &["--target", "/nonexistent"],
        ),
    ];
    for (flags, mentions) in cases {
        let Err(error) = Server::bind(&config(flags)).await else {
            panic!("{flags:?} starts");
        };
        let text = error.to_string();
        for mention in mentions {
            assert!(text.contains(mention), "{text} lacks {mention}");
        }
        assert!(!text.contains('\n'), "{text}");
    }
}
