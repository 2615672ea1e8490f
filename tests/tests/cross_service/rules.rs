//! Bans, least lengths, stop strings and several answers, with drafts.

use treespec_rpc::proto::coordinator::v1::finished::Stop;
use treespec_rpc::proto::verify::v1::FinishReason;
use treespec_testkit::{Ask, Mode};

use crate::models::{FIT, LLAMA, Placement, cluster};

const TOKENS: usize = 40;
const MODES: [Mode; 3] = [Mode::Ar, Mode::Chain, Mode::Tree(16)];

fn ask(mode: Mode) -> Ask {
    Ask::tokens(&[40, 41, 42]).mode(mode).max_tokens(TOKENS)
}

#[tokio::test]
async fn nothing_ends_an_answer_before_its_least_length() {
    for placement in [Placement::Draft, Placement::Local] {
        let cluster = placement.cluster(LLAMA, FIT).start().await;
        let client = cluster.client();
        let free = client.generate(ask(Mode::Ar).ignore_eos()).await.unwrap();
        // Tokens that the answer has early end it at once, unless it has a least length.
        let stops: Vec<u32> = free.token_ids[..6].to_vec();
        let mut plain = None;
        for mode in MODES {
            let ask = |min_tokens| {
                ask(mode).edit(|request| {
                    request.stop_token_ids.clone_from(&stops);
                    request.min_tokens = min_tokens;
                })
            };
            let short = client.generate(ask(None)).await.unwrap();
            assert_eq!(short.token_ids, free.token_ids[..1], "{mode}");
            assert_eq!(short.stop, Some(Stop::StopTokenId(stops[0])), "{mode}");
            let long = client.generate(ask(Some(17))).await.unwrap();
            assert!(long.token_ids.len() >= 17, "{mode}: {:?}", long.token_ids);
            let early = &long.token_ids[..16];
            assert!(early.iter().all(|token| !stops.contains(token)), "{mode}");
            let plain = plain.get_or_insert_with(|| long.token_ids.clone());
            assert_eq!(long.token_ids, *plain, "{mode}");
        }
    }
}

#[tokio::test]
async fn only_allowed_tokens_are_chosen() {
    let cluster = cluster(LLAMA, FIT).start().await;
    for mode in MODES {
        for temperature in [0.0, 1.0] {
            let ask = ask(mode).sampled(temperature, 5).edit(|request| {
                let sampling = request.sampling.as_mut().unwrap();
                sampling.allowed_token_ids = (60..90).collect();
                sampling.banned_token_ids = vec![61, 70];
            });
            let answer = cluster.client().generate(ask).await.unwrap();
            assert_eq!(answer.token_ids.len(), TOKENS);
            let allowed = |token: &u32| (60..90).contains(token) && ![61, 70].contains(token);
            assert!(
                answer.token_ids.iter().all(allowed),
                "{mode}: {:?}",
                answer.token_ids
            );
        }
    }
}

#[tokio::test]
async fn a_stop_string_ends_every_mode_at_the_same_place() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let client = cluster.client();
    let sampled = |mode| ask(mode).sampled(1.0, 77).ignore_eos().top_logprobs(1);
    let free = client.generate(sampled(Mode::Ar)).await.unwrap();
    let middle = free.text.chars().skip(free.text.chars().count() / 2);
    let stop: String = middle.take(2).collect();
    let start = free.text.find(&stop).unwrap();
    let mut plain = None;
    for mode in MODES {
        for include in [false, true] {
            let ask = sampled(mode).edit(|request| {
                request.stop_strings = vec![stop.clone()];
                request.include_stop = Some(include);
            });
            let answer = client.generate(ask).await.unwrap();
            let end = if include { start + stop.len() } else { start };
            assert_eq!(answer.text, free.text[..end], "{mode}");
            assert_eq!(answer.finish, FinishReason::Stop, "{mode}");
            assert_eq!(answer.stop, Some(Stop::StopString(stop.clone())), "{mode}");
            let tokens = answer.token_ids.len();
            assert_eq!(answer.token_ids, free.token_ids[..tokens], "{mode}");
            assert_eq!(answer.logprobs, free.logprobs[..tokens], "{mode}");
            assert_eq!(answer.usage.completion_tokens as usize, tokens, "{mode}");
            assert!(answer.stats.steps > 0, "{mode}");
            let plain = plain.get_or_insert(tokens);
            assert_eq!(tokens, *plain, "{mode}");
        }
    }
}

#[tokio::test]
async fn a_drawn_seed_is_told_and_repeats_the_answers() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let client = cluster.client();
    let ask = |mode: Mode, seed: Option<u64>| {
        ask(mode).sampled(1.2, 0).edit(|request| {
            request.sampling.as_mut().unwrap().seed = seed;
            request.choices = Some(3);
        })
    };
    let first = client.generate_all(ask(Mode::Tree(8), None)).await.unwrap();
    assert_eq!(first.len(), 3);
    assert_ne!(first[0].token_ids, first[1].token_ids);
    assert_ne!(first[1].token_ids, first[2].token_ids);
    for mode in MODES {
        let again = client
            .generate_all(ask(mode, Some(first[0].seed)))
            .await
            .unwrap();
        for (again, first) in again.iter().zip(&first) {
            assert_eq!(again.token_ids, first.token_ids, "{mode}");
            assert_eq!(again.text, first.text, "{mode}");
        }
    }
    // One answer alone is the first of several.
    let alone = ask(Mode::Ar, Some(first[0].seed)).edit(|request| request.choices = None);
    let alone = client.generate(alone).await.unwrap();
    assert_eq!(alone.token_ids, first[0].token_ids);
}
