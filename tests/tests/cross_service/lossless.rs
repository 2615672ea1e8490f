//! No draft of any kind changes an answer, under any rule. The long form is `treespec bench lossless`.

use treespec_rpc::proto::coordinator::v1::GenerateRequest;
use treespec_rpc::proto::verify::v1::{Constraint, DraftRanking, SamplingParams, constraint::Kind};
use treespec_testkit::{Answer, Ask, Client, Mode};
use treespec_tests::{Expected, case_json};

use crate::models::{FIT, LLAMA, Placement, QWEN3, RANDOM, plain_cluster};

const TOKENS: usize = 32;
const MODES: [Mode; 4] = [Mode::Chain, Mode::Tree(3), Mode::Tree(12), Mode::Tree(40)];
const RANKINGS: [DraftRanking; 2] = [DraftRanking::Plain, DraftRanking::Full];

type Edit = fn(&mut SamplingParams);

/// Temperatures with and without rules.
fn samplings() -> Vec<SamplingParams> {
    let plain = |temperature: f32| SamplingParams {
        temperature: Some(temperature),
        ..SamplingParams::default()
    };
    let rules: [Edit; 5] = [
        |s| s.top_p = Some(0.9),
        |s| s.min_p = Some(0.05),
        |s| s.top_k = Some(12),
        |s| {
            s.repetition_penalty = Some(1.3);
            s.presence_penalty = Some(0.5);
            s.frequency_penalty = Some(-0.4);
        },
        |s| {
            s.logit_bias = [(40, 2.5), (300, -3.0)].into();
            s.banned_token_ids = vec![41, 42, 301];
        },
    ];
    let mut all: Vec<SamplingParams> = [0.0, 0.3, 0.7, 1.0, 1.5].map(plain).to_vec();
    for (rule, temperature) in rules.into_iter().zip([1.0, 1.5, 0.7, 1.0, 0.3]) {
        let mut sampling = plain(temperature);
        rule(&mut sampling);
        all.push(sampling);
    }
    // Penalties and bans without noise.
    let mut greedy = plain(0.0);
    rules[3](&mut greedy);
    rules[4](&mut greedy);
    all.push(greedy);
    all
}

fn requests(prompt: &[u32]) -> Vec<GenerateRequest> {
    let ask = |seed: u64, sampling: &SamplingParams| {
        Ask::tokens(prompt)
            .max_tokens(TOKENS)
            .ignore_eos()
            .top_logprobs(4)
            .edit(|request| {
                request.sampling = Some(SamplingParams {
                    seed: Some(seed),
                    ..sampling.clone()
                });
            })
    };
    let mut requests = Vec::new();
    for (seed, sampling) in (1..).zip(&samplings()) {
        requests.push(ask(seed, sampling).into());
        requests.push(ask(seed << 40, sampling).into());
    }
    for (seed, temperature) in [(3, 0.0), (4, 1.0)] {
        let kind = Kind::Regex("([a-z]{1,6} ){2,9}!".into());
        let request = Ask::tokens(prompt).max_tokens(TOKENS).top_logprobs(4);
        requests.push(
            request
                .sampled(temperature, seed)
                .edit(|request| request.constraint = Some(Constraint { kind: Some(kind) }))
                .into(),
        );
    }
    requests
}

async fn answer(
    client: &Client,
    request: &GenerateRequest,
    mode: Mode,
    ranking: DraftRanking,
) -> Answer {
    let mut request = request.clone();
    let mut speculation = mode.speculation();
    speculation.ranking = Some(ranking.into());
    request.speculation = Some(speculation);
    client.generate(request).await.unwrap()
}

async fn check(case: &str, drafter: &str, placement: Placement) {
    let expected: Expected = case_json(case, "expected.json");
    let prompt = &expected.prompts[2].prompt;
    let plain = plain_cluster(case).start().await;
    let drafting = placement.cluster(case, drafter).start().await;
    let mut accepted = 0;
    for request in requests(prompt) {
        let expected = answer(&plain.client(), &request, Mode::Ar, DraftRanking::Plain).await;
        for mode in MODES {
            for ranking in RANKINGS {
                let answer = answer(&drafting.client(), &request, mode, ranking).await;
                let what = format!("{mode} {ranking:?} {request:?}");
                assert_eq!(answer.token_ids, expected.token_ids, "{what}");
                assert_eq!(answer.text, expected.text, "{what}");
                assert_eq!(answer.logprobs, expected.logprobs, "{what}");
                assert_eq!(answer.finish, expected.finish, "{what}");
                assert_eq!(answer.usage, expected.usage, "{what}");
                accepted += answer.rounds.iter().sum::<u32>();
            }
        }
    }
    // The drafts were there: even a drafter that knows nothing is right now and then under a constraint.
    assert!(accepted > 0, "{case} {drafter}");
}

#[tokio::test]
async fn llama_answers_alike_with_drafts_of_a_service() {
    check(LLAMA, FIT, Placement::Draft).await;
}

#[tokio::test]
async fn llama_answers_alike_with_trees_built_at_the_verifier() {
    check(LLAMA, FIT, Placement::DraftWithoutTopk).await;
}

#[tokio::test]
async fn qwen3_answers_alike_with_the_drafter_in_the_verifier() {
    check(QWEN3, FIT, Placement::Local).await;
}

#[tokio::test]
async fn llama_answers_alike_with_a_drafter_that_knows_nothing() {
    check(LLAMA, RANDOM, Placement::Local).await;
}
