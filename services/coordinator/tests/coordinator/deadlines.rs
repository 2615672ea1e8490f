//! Clients that stop waiting.

use std::time::Duration;

use tonic::{Code, Request};
use treespec_rpc::proto::coordinator::v1::{GenerateRequest, generate_response::Event};

use crate::{
    fake_verify::{Act, FakeVerify, tokens},
    harness::{Coordinator, model, request},
};

/// A call with the gRPC header, but without the client library's own timer: the service has to end it.
fn with_timeout_header(timeout: &str) -> Request<GenerateRequest> {
    let mut request = Request::new(request(&[1, 2, 3]));
    request
        .metadata_mut()
        .insert("grpc-timeout", timeout.parse().unwrap());
    request
}

#[tokio::test]
async fn a_deadline_ends_the_stream_and_the_verify_call() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    verify.script([tokens(&[40]), Act::Hang]);
    let mut stream = coordinator.open(with_timeout_header("400m")).await.unwrap();
    let mut token_ids = Vec::new();
    let status = loop {
        match stream.message().await {
            Ok(Some(response)) => {
                if let Some(Event::Delta(delta)) = response.event {
                    token_ids.extend(delta.token_ids);
                }
            }
            Ok(None) => panic!("the stream ended without a status"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert_eq!(token_ids, [40], "what was delivered stays delivered");
    verify.active(0).await;

    let forwarded = verify.calls()[0]
        .timeout
        .clone()
        .expect("a deadline for verify");
    let (value, unit) = forwarded.split_at(forwarded.len() - 1);
    let micros: u64 = match unit {
        "u" => value.parse().unwrap(),
        "n" => value.parse::<u64>().unwrap() / 1000,
        "m" => value.parse::<u64>().unwrap() * 1000,
        other => panic!("unit {other}"),
    };
    assert!((1..=400_000).contains(&micros), "{forwarded}");
    // The replica is not to blame.
    coordinator.generate(request(&[1])).await.unwrap();
}

#[tokio::test]
async fn the_deadline_counts_in_the_queue_too() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &["--max-in-flight=1"]).await;
    verify.script([Act::Hang]);
    let _running = coordinator.open(request(&[1])).await.unwrap();
    verify.active(1).await;
    let mut stream = coordinator.open(with_timeout_header("100m")).await.unwrap();
    let started = stream.message().await.unwrap().unwrap().event;
    assert!(matches!(started, Some(Event::Started(_))));
    let status = stream.message().await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert_eq!(verify.calls().len(), 1);
}

#[tokio::test]
async fn without_a_deadline_none_is_forwarded() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    coordinator.generate(request(&[1])).await.unwrap();
    assert_eq!(verify.calls()[0].timeout, None);
}

#[tokio::test]
async fn a_client_that_leaves_frees_the_verify_call_and_its_slot() {
    let verify = FakeVerify::start(model()).await;
    let flags = ["--max-in-flight=1", "--max-waiting=1"];
    let coordinator = Coordinator::start(&[&verify], &flags).await;
    verify.script([tokens(&[40]), Act::Hang]);
    let mut stream = coordinator.open(request(&[1])).await.unwrap();
    for _ in 0..2 {
        stream.message().await.unwrap().unwrap();
    }
    verify.active(1).await;
    drop(stream);
    verify.active(0).await;
    let next = coordinator.generate(request(&[1]));
    tokio::time::timeout(Duration::from_secs(10), next)
        .await
        .expect("the slot is free")
        .unwrap();
}
