//! A client that goes away gives everything back.

use std::time::Instant;

use treespec_rpc::proto::verify::v1::StepTree;
use treespec_testkit::{AnswerStream, Ask, Client, Mode};

use crate::models::{FIT, Placement, QWEN3, cluster};

const KV_TOKENS: usize = 1_024;
const BUDGET: usize = 8;
const PROMPT: [u32; 5] = [40, 41, 42, 43, 44];

/// A request for every KV row of the verifier.
fn whole_cache(prompt: &[u32]) -> Ask {
    Ask::tokens(prompt)
        .mode(Mode::Tree(BUDGET as u32))
        .max_tokens(KV_TOKENS - prompt.len() - BUDGET)
        .ignore_eos()
        .trees()
}

/// Reads until three steps were drafted: cache and drafter context are in use then.
async fn hold(client: &Client) -> AnswerStream {
    let mut stream = client.open(whole_cache(&PROMPT)).await.unwrap();
    while stream.so_far().trees.len() < 3 {
        stream.next().await.unwrap().unwrap();
    }
    let trees = &stream.so_far().trees;
    let drafted = |tree: &StepTree| tree.token_ids.len() == BUDGET + 1;
    assert!(trees.iter().all(drafted), "{trees:?}");
    stream
}

#[tokio::test]
async fn a_dropped_stream_frees_its_cache_and_its_drafter_context() {
    dropped_streams(Placement::Draft).await;
}

#[tokio::test]
async fn a_dropped_stream_frees_its_cache_and_its_context_of_a_drafter_in_the_verifier() {
    dropped_streams(Placement::Local).await;
}

async fn dropped_streams(placement: Placement) {
    let cluster = placement
        .cluster(QWEN3, FIT)
        .kv_tokens(KV_TOKENS)
        // The drafter's only context is as scarce as the cache.
        .max_sequences(1)
        .start()
        .await;
    let client = cluster.client();
    let started = Instant::now();
    let whole = client.generate(whole_cache(&PROMPT)).await.unwrap();
    let whole_time = started.elapsed();

    let started = Instant::now();
    for _ in 0..4 {
        let stream = hold(&client).await;
        let tokens = &stream.so_far().token_ids;
        assert_eq!(whole.token_ids[..tokens.len()], *tokens);
    }
    // Each waited for the one before to be dropped, not for its end.
    let four = started.elapsed();
    assert!(four < whole_time, "{four:?}, one alone {whole_time:?}");
}

#[tokio::test]
async fn a_request_that_is_dropped_while_it_waits_is_forgotten() {
    let cluster = cluster(QWEN3, FIT).kv_tokens(KV_TOKENS).start().await;
    let client = cluster.client();
    let mut running = client.open(whole_cache(&[40])).await.unwrap();
    running.next().await.unwrap().unwrap();
    // Accepted, and waits for the cache.
    let waiting = client.open(whole_cache(&[41])).await.unwrap();
    drop(waiting);
    drop(running);
    let ask = whole_cache(&[42]);
    let mut next = client.open(ask).await.unwrap();
    next.next().await.unwrap().unwrap();
    assert!(!next.so_far().token_ids.is_empty());
}
