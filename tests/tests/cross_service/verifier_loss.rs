//! A verifier that dies: the stream goes on at another, or ends with a status.

use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use treespec_testkit::{Answer, AnswerStream, Ask, Logs, Mode};

use crate::models::{FIT, QWEN3, cluster};

const TOKENS: usize = 600;

fn ask(mode: Mode) -> Ask {
    Ask::tokens(&[40, 41, 42])
        .mode(mode)
        .max_tokens(TOKENS)
        .ignore_eos()
        .top_logprobs(2)
        .prompt_logprobs()
}

/// The statistics are those of the last verifier, which did not decode what it was told.
fn check_statistics(answer: &Answer, mode: Mode) {
    let stats = &answer.stats;
    let drafted: u32 = stats.rounds.iter().sum();
    assert!(stats.steps + drafted < TOKENS as u32, "{mode}: {stats:?}");
    if mode == Mode::Ar {
        assert_eq!(stats.tokens_per_step, 1.0, "{mode}: {stats:?}");
    }
}

async fn read(stream: &mut AnswerStream, deltas: usize) {
    for _ in 0..deltas {
        stream.next().await.unwrap().expect("it is long enough");
    }
}

#[tokio::test]
async fn a_stream_goes_on_unbroken_when_its_verifier_dies() {
    for mode in [Mode::Ar, Mode::Tree(16)] {
        let logs = Logs::capture();
        let mut cluster = cluster(QWEN3, FIT).verifiers(2).start().await;
        let client = cluster.client();
        let expected = client.generate(ask(mode)).await.unwrap();
        let mut stream = client.open(ask(mode)).await.unwrap();
        read(&mut stream, 5).await;
        // Whichever of the two it runs on, it loses that one.
        cluster.verifiers[0].kill().await;
        read(&mut stream, 2).await;
        cluster.verifiers[0].restart().await;
        cluster.verifiers[1].kill().await;
        let answer = stream.finish().await.unwrap();
        assert_eq!(answer.token_ids, expected.token_ids, "{mode}");
        assert_eq!(answer.text, expected.text, "{mode}");
        assert_eq!(answer.logprobs, expected.logprobs, "{mode}");
        assert_eq!(answer.prompt_logprobs, expected.prompt_logprobs, "{mode}");
        assert_eq!(answer.finish, expected.finish, "{mode}");
        assert_eq!(answer.usage, expected.usage, "{mode}");
        check_statistics(&answer, mode);
        logs.wait_for_line(&["verify replica lost, replaying"])
            .await;
    }
}

#[tokio::test]
async fn requests_go_to_the_verifier_that_is_left() {
    let mut cluster = cluster(QWEN3, FIT).verifiers(2).start().await;
    let client = cluster.client();
    let ask = || {
        Ask::tokens(&[40, 41, 42])
            .mode(Mode::Tree(8))
            .max_tokens(20)
    };
    let expected = client.generate(ask()).await.unwrap().token_ids;
    cluster.verifiers[0].kill().await;
    for _ in 0..3 {
        let answer = client.generate(ask()).await.unwrap();
        assert_eq!(answer.token_ids, expected);
    }
}

#[tokio::test]
async fn the_coordinator_serves_again_when_its_only_verifier_is_back() {
    let mut cluster = cluster(QWEN3, FIT).start().await;
    let client = cluster.client();
    cluster.verifiers[0].kill().await;
    cluster
        .coordinator
        .wait_for(ServingStatus::NotServing)
        .await;
    let status = client.generate(ask(Mode::Ar)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(!status.message().contains('\n'), "{status:?}");

    cluster.verifiers[0].restart().await;
    cluster.coordinator.wait_until_serving().await;
    let ask = Ask::tokens(&[40]).mode(Mode::Tree(8)).max_tokens(20);
    let answer = client.generate(ask).await.unwrap();
    // The drafter takes the new process of the verifier, too.
    assert_eq!(answer.stats.fallback_steps, 0);
}

#[tokio::test]
async fn a_stream_resumes_on_the_same_verifier_after_its_restart() {
    let mut cluster = cluster(QWEN3, FIT).start().await;
    let client = cluster.client();
    let expected = client.generate(ask(Mode::Tree(8))).await.unwrap();
    let mut stream = client.open(ask(Mode::Tree(8))).await.unwrap();
    read(&mut stream, 3).await;
    cluster.verifiers[0].restart().await;
    let answer = stream.finish().await.unwrap();
    assert_eq!(answer.token_ids, expected.token_ids);
    assert_eq!(answer.text, expected.text);
}
