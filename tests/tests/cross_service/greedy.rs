//! The reference's greedy tokens and log-probabilities, whatever speculates.

use futures_util::future::join_all;
use treespec_rpc::proto::verify::v1::FinishReason;
use treespec_testkit::{Answer, Ask, Client, Mode};
use treespec_tests::{Expected, ExpectedPrompt, TOLERANCE, case_json};

use crate::models::{FIT, LLAMA, Placement, QWEN3, RANDOM, top};

const MODES: [Mode; 8] = [
    Mode::Ar,
    Mode::Auto,
    Mode::Chain,
    Mode::Tree(1),
    Mode::Tree(8),
    Mode::Tree(16),
    Mode::Tree(33),
    Mode::Tree(255),
];

#[tokio::test]
async fn llama_decodes_like_the_reference_with_the_top_k_pass_at_the_drafter() {
    every_mode(LLAMA, Placement::Draft).await;
}

#[tokio::test]
async fn llama_decodes_like_the_reference_with_the_top_k_pass_at_the_verifier() {
    every_mode(LLAMA, Placement::DraftWithoutTopk).await;
}

#[tokio::test]
async fn qwen3_decodes_like_the_reference_with_the_top_k_pass_at_the_drafter() {
    every_mode(QWEN3, Placement::Draft).await;
}

#[tokio::test]
async fn qwen3_decodes_like_the_reference_with_the_top_k_pass_at_the_verifier() {
    every_mode(QWEN3, Placement::DraftWithoutTopk).await;
}

#[tokio::test]
async fn llama_decodes_like_the_reference_with_the_drafter_in_the_verifier() {
    every_mode(LLAMA, Placement::Local).await;
}

#[tokio::test]
async fn qwen3_decodes_like_the_reference_with_the_drafter_in_the_verifier() {
    every_mode(QWEN3, Placement::Local).await;
}

async fn every_mode(case: &str, placement: Placement) {
    let expected: Expected = case_json(case, "expected.json");
    for drafter in [RANDOM, FIT] {
        let cluster = placement.cluster(case, drafter).start().await;
        let client = cluster.client();
        let plain = answers(&client, &expected, Mode::Ar).await;
        for mode in MODES {
            let answers = answers(&client, &expected, mode).await;
            for ((answer, plain), expected) in answers.iter().zip(&plain).zip(&expected.prompts) {
                let prompt = expected.prompt.len();
                let what = format!("{case} {drafter} {placement:?} {mode}, prompt of {prompt}");
                check_tokens(answer, expected, &what);
                check_logprobs(answer, expected, &what);
                // Not just close: speculation does not enter.
                assert_eq!(answer.logprobs, plain.logprobs, "{what}");
                assert_eq!(answer.prompt_logprobs, plain.prompt_logprobs, "{what}");
                check_statistics(answer, mode, &what);
            }
        }
    }
}

/// All prompts at once: company must not change anything either.
async fn answers(client: &Client, expected: &Expected, mode: Mode) -> Vec<Answer> {
    join_all(expected.prompts.iter().map(|prompt| async move {
        let ask = Ask::tokens(&prompt.prompt)
            .mode(mode)
            .max_tokens(prompt.greedy.len())
            .top_logprobs(5)
            .prompt_logprobs();
        client.generate(ask).await.unwrap()
    }))
    .await
}

fn check_tokens(answer: &Answer, expected: &ExpectedPrompt, what: &str) {
    assert_eq!(answer.token_ids, expected.greedy, "{what}");
    assert_eq!(answer.finish, FinishReason::Length, "{what}");
    let counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens);
    let lengths = (expected.prompt.len() as u32, expected.greedy.len() as u32);
    assert_eq!(counts, lengths, "{what}");
}

fn check_logprobs(answer: &Answer, expected: &ExpectedPrompt, what: &str) {
    assert_eq!(answer.logprobs.len(), expected.top5.len(), "{what}");
    for (j, (got, expected)) in answer.logprobs.iter().zip(&expected.top5).enumerate() {
        let what = format!("{what}, token {j}");
        assert_eq!(got.token_id, answer.token_ids[j], "{what}");
        assert_eq!(got.top.len(), 5, "{what}");
        expected.assert_close(&top(got), &what);
        assert_eq!(got.logprob, got.top[0].logprob, "{what}");
    }
    // The first prompt token has no context and no value.
    let prompt = &expected.prompt_logprobs[1..];
    assert_eq!(answer.prompt_logprobs.len(), prompt.len(), "{what}");
    for (got, expected) in answer.prompt_logprobs.iter().zip(prompt) {
        assert!((got - expected.unwrap()).abs() <= TOLERANCE, "{what}");
    }
}

fn check_statistics(answer: &Answer, mode: Mode, what: &str) {
    let stats = &answer.stats;
    assert_eq!(stats.rounds.len(), stats.steps as usize, "{what}");
    assert_eq!(stats.fallback_steps, 0, "{what}");
    assert_eq!(stats.stale_drafts, 0, "{what}");
    let per_step = f64::from(answer.usage.completion_tokens - 1) / f64::from(stats.steps);
    assert!((stats.tokens_per_step - per_step).abs() < 1e-9, "{what}");
    for (depth, &count) in stats.accepted_by_depth.iter().enumerate() {
        let reached = stats.rounds.iter().filter(|&&r| r as usize > depth).count();
        assert_eq!(count as usize, reached, "{what}");
    }
    if let Mode::Tree(budget) = mode {
        let nodes = u64::from(budget) * u64::from(stats.steps);
        assert_eq!(stats.drafted_nodes, nodes, "{what}");
    }
    if mode == Mode::Ar {
        assert_eq!((stats.drafted_nodes, stats.steps), (0, 47), "{what}");
    }
}
