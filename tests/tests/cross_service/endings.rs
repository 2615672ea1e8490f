//! Where a generation ends does not depend on how far a draft reached beyond it.

use treespec_rpc::proto::coordinator::v1::GenerateRequest;
use treespec_rpc::proto::verify::v1::FinishReason;
use treespec_testkit::{Ask, Mode};
use treespec_tests::{Expected, case_json};

use crate::models::{FIT, QWEN3, cluster};

const CONTEXT: usize = 4_096;
const MODES: [Mode; 4] = [Mode::Ar, Mode::Chain, Mode::Tree(16), Mode::Tree(255)];

#[tokio::test]
async fn a_stop_token_is_the_last_wherever_it_lies_in_a_draft() {
    let expected: Expected = case_json(QWEN3, "expected.json");
    let prompt = &expected.prompts[2];
    let cluster = cluster(QWEN3, FIT).start().await;
    for mode in MODES {
        for stop in [0, 1, 5, 11, 20, 33, 47] {
            let stop = prompt.greedy[stop];
            let end = prompt
                .greedy
                .iter()
                .position(|&token| token == stop)
                .unwrap();
            let ask = Ask::tokens(&prompt.prompt).mode(mode).max_tokens(48);
            let request = GenerateRequest {
                stop_token_ids: vec![stop],
                ..ask.top_logprobs(1).into()
            };
            let answer = cluster.client().generate(request).await.unwrap();
            let what = format!("{mode}, token {end}");
            assert_eq!(answer.token_ids, prompt.greedy[..=end], "{what}");
            assert_eq!(answer.finish, FinishReason::Stop, "{what}");
            assert_eq!(answer.logprobs.len(), end + 1, "{what}");
            assert_eq!(answer.usage.completion_tokens as usize, end + 1, "{what}");
        }
    }
}

#[tokio::test]
async fn max_tokens_cuts_a_draft() {
    let expected: Expected = case_json(QWEN3, "expected.json");
    let prompt = &expected.prompts[2];
    let cluster = cluster(QWEN3, FIT).start().await;
    for mode in MODES {
        for tokens in 1..12 {
            let ask = Ask::tokens(&prompt.prompt).mode(mode).max_tokens(tokens);
            let answer = cluster.client().generate(ask).await.unwrap();
            let what = format!("{mode}, {tokens} tokens");
            assert_eq!(answer.token_ids, prompt.greedy[..tokens], "{what}");
            assert_eq!(answer.finish, FinishReason::Length, "{what}");
        }
    }
}

#[tokio::test]
async fn the_context_is_filled_to_its_last_position() {
    let expected: Expected = case_json(QWEN3, "expected.json");
    let room = 7;
    let long = expected.prompts[5].prompt.iter().copied().cycle();
    let prompt: Vec<u32> = long.take(CONTEXT - room).collect();
    let cluster = cluster(QWEN3, FIT).kv_tokens(CONTEXT + 256).start().await;
    let mut plain = None;
    for mode in MODES {
        let ask = Ask::tokens(&prompt).mode(mode).ignore_eos();
        let answer = cluster.client().generate(ask).await.unwrap();
        assert_eq!(answer.token_ids.len(), room, "{mode}");
        assert_eq!(answer.finish, FinishReason::Length, "{mode}");
        let plain = plain.get_or_insert_with(|| answer.token_ids.clone());
        assert_eq!(answer.token_ids, *plain, "{mode}");
    }
}
