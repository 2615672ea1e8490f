//! The short form of the 32-prompt reference, with the default models.

use futures_util::future::join_all;
use treespec_engine::Precision;
use treespec_testkit::{
    Ask, Client, Cluster, Mode, TopkPlacement, default_drafter, default_target, is_there,
};
use treespec_tests::{DefaultModelsReference, ReferenceAnswer, fixture, read_json};

const PROMPTS: usize = 4;
const TOKENS: usize = 48;

#[tokio::test]
async fn the_default_models_answer_like_the_reference_with_the_top_k_pass_at_the_drafter() {
    let modes = [
        (Mode::Ar, None),
        (Mode::Chain, Some("chain")),
        (Mode::Tree(8), Some("8")),
        (Mode::Tree(16), Some("16")),
        (Mode::Tree(32), Some("32")),
        (Mode::Tree(64), Some("64")),
    ];
    check(TopkPlacement::Draft, &modes).await;
}

#[tokio::test]
async fn the_default_models_answer_like_the_reference_with_the_top_k_pass_at_the_verifier() {
    let modes = [
        (Mode::Chain, Some("chain")),
        (Mode::Tree(8), Some("8")),
        (Mode::Tree(16), Some("16")),
        (Mode::Tree(32), Some("32")),
        (Mode::Tree(64), Some("64")),
    ];
    check(TopkPlacement::Verify, &modes).await;
}

/// The default arithmetic for quantised weights: other answers than in f32, but the same in every mode.
#[tokio::test]
async fn in_integers_every_mode_answers_alike() {
    if !is_there(&default_target()) {
        return;
    }
    let mut reference: DefaultModelsReference = read_json(&fixture("eval32_f32.json"));
    reference.prompts.truncate(PROMPTS);
    let cluster = Cluster::builder(default_target())
        .drafter(default_drafter())
        .precision(Precision::Quantised)
        .kv_tokens(1_024)
        .max_sequences(PROMPTS)
        .start()
        .await;
    let client = cluster.client();
    let answers = async |mode| {
        let ask =
            |prompt: &ReferenceAnswer| Ask::user(&prompt.prompt).mode(mode).max_tokens(TOKENS);
        let answers = reference
            .prompts
            .iter()
            .map(|prompt| client.generate(ask(prompt)));
        join_all(answers)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect::<Vec<_>>()
    };
    let plain = answers(Mode::Ar).await;
    for mode in [Mode::Chain, Mode::Tree(8), Mode::Tree(32)] {
        let (mut tokens, mut steps) = (0, 0);
        for (plain, answer) in plain.iter().zip(answers(mode).await) {
            assert_eq!(answer.token_ids, plain.token_ids, "{mode}");
            tokens += answer.token_ids.len();
            steps += answer.stats.steps;
        }
        // The drafter works in integers, too, and is still a good one.
        assert!(
            tokens > 2 * steps as usize,
            "{mode}: {tokens} tokens in {steps} steps"
        );
    }
}

async fn check(placement: TopkPlacement, modes: &[(Mode, Option<&str>)]) {
    if !is_there(&default_target()) {
        return;
    }
    let mut reference: DefaultModelsReference = read_json(&fixture("eval32_f32.json"));
    reference.prompts.truncate(PROMPTS);
    let cluster = Cluster::builder(default_target())
        .drafter(default_drafter())
        .placement(placement)
        .kv_tokens(1_024)
        .max_sequences(PROMPTS)
        .start()
        .await;
    let client = cluster.client();
    for &(mode, rounds) in modes {
        let answers = reference
            .prompts
            .iter()
            .map(|expected| check_answer(&client, expected, mode, rounds));
        join_all(answers).await;
    }
}

async fn check_answer(
    client: &Client,
    expected: &ReferenceAnswer,
    mode: Mode,
    rounds: Option<&str>,
) {
    let ask = Ask::user(&expected.prompt).mode(mode).max_tokens(TOKENS);
    let answer = client.generate(ask).await.unwrap();
    let what = format!("{mode}: {}", expected.prompt);
    assert_eq!(answer.prompt_tokens, expected.prompt_tokens, "{what}");
    let tokens = expected.tokens(TOKENS);
    assert_eq!(answer.token_ids, tokens, "{what}");
    assert_eq!(answer.stats.fallback_steps, 0, "{what}");
    if let Some(rounds) = rounds {
        assert_eq!(
            answer.rounds,
            expected.rounds(rounds, tokens.len()),
            "{what}"
        );
    }
}
