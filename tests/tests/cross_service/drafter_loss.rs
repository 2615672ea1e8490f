//! A drafter that dies, hangs or does not fit costs speed, never a token.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use treespec_testkit::{Answer, AnswerStream, Ask, Client, Lie, Logs, Mode, Service, Silence};
use treespec_tests::{Expected, case_json};

use crate::models::{FIT, LLAMA, QWEN3, RANDOM, cluster, plain_cluster};

const TREE: Mode = Mode::Tree(16);
/// Longest that a hanging drafter may hold up a request on a loaded machine.
const BOUND: Duration = Duration::from_secs(12);

fn prompt() -> Vec<u32> {
    let mut expected: Expected = case_json(QWEN3, "expected.json");
    expected.prompts.swap_remove(2).prompt
}

fn ask(mode: Mode, max_tokens: usize) -> Ask {
    Ask::tokens(&prompt())
        .mode(mode)
        .max_tokens(max_tokens)
        .ignore_eos()
        .trees()
}

/// The tokens of plain decoding, which every other way must give.
async fn plain_tokens(client: &Client, count: usize) -> Vec<u32> {
    client
        .generate(ask(Mode::Ar, count))
        .await
        .unwrap()
        .token_ids
}

/// Reads on until the tree of the last step has nodes below the root, or has none.
async fn read_until(stream: &mut AnswerStream, drafted: bool) {
    loop {
        let delta = stream.next().await.unwrap();
        let delta = delta.expect("the generation is long enough");
        let tree = delta
            .tree
            .filter(|tree| (tree.token_ids.len() > 1) == drafted);
        if tree.is_some() {
            return;
        }
    }
}

#[tokio::test]
async fn a_killed_drafter_costs_no_token() {
    let mut cluster = cluster(QWEN3, FIT).start().await;
    let client = cluster.client();
    let expected = plain_tokens(&client, 600).await;
    let mut stream = client.open(ask(TREE, 600)).await.unwrap();
    read_until(&mut stream, true).await;
    cluster.drafters[0].kill().await;
    let answer = stream.finish().await.unwrap();
    assert_eq!(answer.token_ids, expected);
    assert!(answer.stats.fallback_steps > 0, "{:?}", answer.stats);
    // Steps after the loss are plain and are counted.
    let plain = answer.trees.iter().filter(|tree| tree.token_ids.len() == 1);
    assert_eq!(plain.count(), answer.stats.fallback_steps as usize);

    // Requests that come while it is away do not even wait for it.
    let answer = client.generate(ask(TREE, 48)).await.unwrap();
    assert_eq!(answer.token_ids, expected[..48]);
    assert_eq!(answer.stats.fallback_steps, answer.stats.steps);
}

#[tokio::test]
async fn speculation_comes_back_with_the_drafter_within_a_request() {
    let mut cluster = cluster(QWEN3, FIT).start().await;
    let client = cluster.client();
    let mut stream = client.open(ask(TREE, 3_900)).await.unwrap();
    read_until(&mut stream, true).await;
    cluster.drafters[0].kill().await;
    read_until(&mut stream, false).await;
    cluster.drafters[0].restart().await;
    read_until(&mut stream, true).await;
    let tokens = stream.so_far().token_ids.clone();
    drop(stream);
    assert_eq!(tokens, plain_tokens(&client, tokens.len()).await);

    // Requests after that are drafted from their first step on.
    let answer = client.generate(ask(TREE, 48)).await.unwrap();
    assert_eq!(answer.stats.fallback_steps, 0);
    assert_eq!(answer.token_ids, tokens[..48]);
}

#[tokio::test]
async fn the_next_lease_goes_to_another_drafter() {
    let mut cluster = cluster(QWEN3, FIT).drafters(2).start().await;
    let client = cluster.client();
    cluster.drafters[0].kill().await;
    let mut drafted = 0;
    for _ in 0..4 {
        let answer = client.generate(ask(TREE, 48)).await.unwrap();
        drafted += u32::from(answer.stats.fallback_steps == 0);
    }
    assert_eq!(drafted, 2, "every second lease is for the living one");
}

async fn decode_beside_a_silent_drafter(silence: Silence) {
    let drafter = Service::silent_drafter(silence).await;
    let cluster = cluster(QWEN3, FIT)
        .drafters(0)
        .draft_endpoint(drafter.endpoint())
        .start()
        .await;
    let client = cluster.client();
    let expected = plain_tokens(&client, 100).await;
    let started = Instant::now();
    let answer = client.generate(ask(TREE, 100)).await.unwrap();
    let took = started.elapsed();
    let what = format!("silent at {silence:?}");
    assert_eq!(answer.token_ids, expected, "{what}");
    assert_eq!(answer.stats.fallback_steps, answer.stats.steps, "{what}");
    assert!(took < BOUND, "{what}: {took:?}");
}

#[tokio::test]
async fn a_drafter_that_stops_answering_does_not_hold_up_a_request() {
    let silences = [
        Silence::Connection,
        Silence::Hello,
        Silence::Open,
        Silence::Prime,
        Silence::Propose,
    ];
    join_all(silences.map(decode_beside_a_silent_drafter)).await;
}

#[tokio::test]
async fn a_drafter_that_lies_costs_no_token() {
    // Rows that are verified: what is a tree, never more of it than was asked for and never deeper than a block of 10.
    let lies = [
        (Lie::WrongTokens, 10),
        (Lie::TooManyNodes, 17),
        (Lie::UnknownToken, 1),
        (Lie::Cycle, 1),
        (Lie::OtherPosition, 1),
        (Lie::Nothing, 1),
        (Lie::ShortHidden, 1),
    ];
    for (lie, most_rows) in lies {
        let drafter = Service::lying_drafter(lie).await;
        let cluster = cluster(QWEN3, FIT)
            .drafters(0)
            .draft_endpoint(drafter.endpoint())
            .start()
            .await;
        let client = cluster.client();
        let expected = plain_tokens(&client, 60).await;
        let answer = client.generate(ask(TREE, 60)).await.unwrap();
        assert_eq!(answer.token_ids, expected, "{lie:?}");
        let largest = answer.trees.iter().map(|tree| tree.token_ids.len()).max();
        assert_eq!(largest, Some(most_rows), "{lie:?}");
        let times = answer.stats.stage_seconds.unwrap();
        for time in [times.draft, times.head, times.tree, times.wire] {
            assert!((0.0..60.0).contains(&time), "{lie:?}: {times:?}");
        }
    }
}

/// What a draft service says of its projection.
async fn projection_hash(service: &Service) -> String {
    let mut client = treespec_rpc::transport::draft_client(service.channel());
    let request = treespec_rpc::proto::draft::v1::GetModelInfoRequest {};
    let info = client.get_model_info(request).await.unwrap().into_inner();
    info.fingerprint.unwrap().projection_hash
}

#[tokio::test]
async fn a_drafter_of_another_projection_is_refused_by_name_and_not_used() {
    let logs = Logs::capture();
    let fitting = cluster(LLAMA, FIT).start().await;
    let ours = projection_hash(&fitting.drafters[0]).await;
    let foreign = cluster(LLAMA, FIT)
        .drafted_with(treespec_tests::case_path(LLAMA, RANDOM))
        .start()
        .await;
    let theirs = projection_hash(&foreign.drafters[0]).await;
    assert_ne!(ours, theirs);

    let expected: Expected = case_json(LLAMA, "expected.json");
    let prompt = &expected.prompts[1];
    let ask = Ask::tokens(&prompt.prompt).mode(TREE).max_tokens(48);
    let answer: Answer = foreign.client().generate(ask).await.unwrap();
    assert_eq!(answer.token_ids, prompt.greedy);
    assert_eq!(answer.stats.fallback_steps, answer.stats.steps);
    logs.wait_for_line(&["cannot link", "projection_hash", &ours, &theirs])
        .await;
}

#[tokio::test]
async fn a_drafter_of_another_target_is_refused_by_name_and_not_used() {
    let logs = Logs::capture();
    let other = cluster(QWEN3, FIT).start().await;
    let cluster = cluster(LLAMA, FIT)
        .drafters(0)
        .draft_endpoint(other.drafters[0].endpoint())
        .start()
        .await;
    let expected: Expected = case_json(LLAMA, "expected.json");
    let prompt = &expected.prompts[1];
    let ask = Ask::tokens(&prompt.prompt).mode(TREE).max_tokens(48);
    let answer = cluster.client().generate(ask).await.unwrap();
    assert_eq!(answer.token_ids, prompt.greedy);
    logs.wait_for_line(&["cannot link", "vocab_size", "560", "832"])
        .await;
}

#[tokio::test]
async fn nobody_at_the_drafters_endpoint_is_plain_decoding() {
    // A port that was free a moment ago.
    let mut gone = Service::silent_drafter(Silence::Connection).await;
    gone.kill().await;
    let cluster = cluster(QWEN3, FIT)
        .drafters(0)
        .draft_endpoint(gone.endpoint())
        .start()
        .await;
    let plain = plain_cluster(QWEN3).start().await;
    let expected = plain_tokens(&plain.client(), 48).await;
    let answer = cluster.client().generate(ask(TREE, 48)).await.unwrap();
    assert_eq!(answer.token_ids, expected);
    assert_eq!(answer.stats.fallback_steps, answer.stats.steps);
}
