//! Requests that run together answer as they would alone.

use futures_util::future::join_all;
use treespec_testkit::{Answer, Ask, Mode};
use treespec_tests::{Expected, case_json};

use crate::models::{FIT, Placement, QWEN3};

const MODES: [Mode; 6] = [
    Mode::Ar,
    Mode::Auto,
    Mode::Chain,
    Mode::Tree(1),
    Mode::Tree(16),
    Mode::Tree(60),
];

#[tokio::test]
async fn six_requests_of_different_modes_and_prompts_answer_as_alone() {
    let expected: Expected = case_json(QWEN3, "expected.json");
    let asks: Vec<Ask> = MODES
        .iter()
        .zip(&expected.prompts)
        .map(|(&mode, prompt)| {
            Ask::tokens(&prompt.prompt)
                .mode(mode)
                .max_tokens(120)
                .ignore_eos()
                .top_logprobs(3)
        })
        .collect();
    for placement in [
        Placement::Draft,
        Placement::DraftWithoutTopk,
        Placement::Local,
    ] {
        let cluster = placement.cluster(QWEN3, FIT).start().await;
        let client = cluster.client();
        let together = join_all(asks.iter().map(|ask| client.generate(ask.clone()))).await;
        for ((ask, together), expected) in asks.iter().zip(together).zip(&expected.prompts) {
            let together = together.unwrap();
            let alone = client.generate(ask.clone()).await.unwrap();
            assert_eq!(together.token_ids[..48], expected.greedy);
            assert_eq!(comparable(&together), comparable(&alone), "{placement:?}");
        }
    }
}

/// Everything that must not depend on the company.
fn comparable(answer: &Answer) -> Answer {
    Answer {
        request_id: String::new(),
        seed: 0,
        stats: Default::default(),
        ..answer.clone()
    }
}
