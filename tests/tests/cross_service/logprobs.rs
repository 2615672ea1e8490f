//! Log-probabilities of sampled answers: of the model's own distribution, and of the one that tokens are drawn from.

use treespec_rpc::proto::verify::v1::{LogprobKind, TokenLogprob};
use treespec_testkit::{Answer, Ask, Mode};

use crate::models::{FIT, LLAMA, cluster};

const TOKENS: usize = 24;

fn ask() -> Ask {
    Ask::tokens(&[40, 41, 42, 43])
        .mode(Mode::Tree(8))
        .max_tokens(TOKENS)
        .ignore_eos()
        .top_logprobs(20)
        .sampled(1.3, 11)
}

fn mass(token: &TokenLogprob) -> f32 {
    token.top.iter().map(|entry| entry.logprob.exp()).sum()
}

/// The place of a chosen token in its list, where it is there.
fn place(token: &TokenLogprob) -> Option<usize> {
    let place = token
        .top
        .iter()
        .position(|entry| entry.token_id == token.token_id);
    if let Some(place) = place {
        assert_eq!(token.rank as usize, place + 1);
        assert_eq!(token.logprob, token.top[place].logprob);
    } else {
        assert!(token.rank as usize > token.top.len(), "{token:?}");
    }
    place
}

fn check_order(answer: &Answer) {
    assert_eq!(answer.logprobs.len(), TOKENS);
    for (id, token) in answer.token_ids.iter().zip(&answer.logprobs) {
        assert_eq!(*id, token.token_id);
        assert!(token.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
        assert!(token.logprob.is_finite() && token.rank >= 1);
        place(token);
    }
}

#[tokio::test]
async fn raw_ones_are_the_models_whatever_the_rules() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let answer = cluster.client().generate(ask()).await.unwrap();
    check_order(&answer);
    assert!(answer.logprobs.iter().all(|token| token.top.len() == 20));
    // Tokens far down the list are drawn at this temperature.
    assert!(answer.logprobs.iter().any(|token| place(token).is_none()));

    // The same tokens as a prompt have the same log-probabilities.
    let prompt: Vec<u32> = [40, 41, 42, 43]
        .into_iter()
        .chain(answer.token_ids)
        .collect();
    let again = Ask::tokens(&prompt).max_tokens(1).prompt_logprobs();
    let again = cluster.client().generate(again).await.unwrap();
    for (token, logprob) in answer.logprobs.iter().zip(&again.prompt_logprobs[3..]) {
        assert!(
            (token.logprob - logprob).abs() < 1e-4,
            "{token:?} {logprob}"
        );
    }
}

#[tokio::test]
async fn processed_ones_are_of_the_distribution_that_is_drawn_from() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let processed = |top_k: Option<u32>| {
        ask().edit(|request| {
            request.sampling.as_mut().unwrap().top_k = top_k;
            request.output.as_mut().unwrap().logprob_kind = Some(LogprobKind::Processed.into());
        })
    };
    let five = cluster.client().generate(processed(Some(5))).await.unwrap();
    check_order(&five);
    for token in &five.logprobs {
        assert_eq!(token.top.len(), 5);
        assert!(token.rank <= 5);
        assert!((mass(token) - 1.0).abs() < 1e-4, "{}", mass(token));
    }
    // Without filters only the temperature changes: ratios are those of the raw ones, divided by it.
    let raw = cluster.client().generate(ask()).await.unwrap();
    let all = cluster.client().generate(processed(None)).await.unwrap();
    assert_eq!(raw.token_ids, all.token_ids);
    for (raw, all) in raw.logprobs.iter().zip(&all.logprobs) {
        assert_eq!(raw.rank, all.rank);
        let ratio = |token: &TokenLogprob| token.top[0].logprob - token.top[7].logprob;
        assert!((ratio(raw) / 1.3 - ratio(all)).abs() < 1e-3);
    }
}

#[tokio::test]
async fn a_greedy_answer_has_ranks_too() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let ask = ask().sampled(0.0, 1);
    let answer = cluster.client().generate(ask).await.unwrap();
    check_order(&answer);
    assert!(answer.logprobs.iter().all(|token| token.rank == 1));
}
