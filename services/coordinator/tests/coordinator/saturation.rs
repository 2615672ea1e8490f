//! More requests than places.

use tonic::Code;
use treespec_rpc::proto::{coordinator::v1::generate_response::Event, verify::v1::FinishReason};

use crate::{
    fake_verify::{Act, FakeVerify, finish, tokens},
    harness::{Coordinator, assert_retryable, model, request},
};

#[tokio::test]
async fn a_full_queue_refuses_and_a_free_slot_serves_who_waited() {
    let verify = FakeVerify::start(model()).await;
    let flags = ["--max-in-flight=1", "--max-waiting=1"];
    let coordinator = Coordinator::start(&[&verify], &flags).await;
    verify.script([tokens(&[40]), Act::Hang]);
    verify.script([tokens(&[41]), finish(FinishReason::Length)]);

    let running = coordinator.open(request(&[1])).await.unwrap();
    verify.active(1).await;
    let mut waiting = coordinator.open(request(&[1])).await.unwrap();
    let started = waiting.message().await.unwrap().unwrap().event;
    assert!(matches!(started, Some(Event::Started(_))));

    let status = coordinator.generate(request(&[1])).await.unwrap_err();
    assert_retryable(&status, Code::ResourceExhausted);
    assert!(
        status.message().contains("1 running and 1 waiting"),
        "{status:?}"
    );
    assert_eq!(verify.calls().len(), 1);

    drop(running);
    let delta = waiting.message().await.unwrap().unwrap().event;
    assert!(matches!(delta, Some(Event::Delta(delta)) if delta.token_ids == [41]));
}
