//! Stop strings, and several answers to one request.

use treespec_rpc::proto::{
    coordinator::v1::{GenerateRequest, finished::Stop, generate_response::Event},
    verify::v1::{FinishReason, OutputOptions},
};
use treespec_sampling::answer_seed;

use crate::{
    fake_verify::{Act, FakeVerify, finish, tokens},
    harness::{Coordinator, model, request, tokenizer},
};

#[tokio::test]
async fn a_stop_string_ends_the_answer_and_the_verify_call() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let ids = tokenizer().encode("one two three four", false).unwrap();
    let (first, rest) = ids.split_at(1);
    // All in one step, and then nothing more: the client must not wait for verify.
    verify.script([tokens(first), tokens(rest), Act::Hang]);
    let answer = coordinator
        .generate(GenerateRequest {
            stop_strings: vec!["nowhere".into(), "two t".into()],
            ..request(&[1, 2, 3])
        })
        .await
        .unwrap();
    assert_eq!(answer.text(), "one ");
    let kept = answer.token_ids();
    let text = tokenizer().decode(&kept, true).unwrap();
    assert!(text.contains("two t"), "{text}");
    let shorter = tokenizer().decode(&kept[..kept.len() - 1], true).unwrap();
    assert!(!shorter.contains("two t"), "{shorter}");
    let finished = answer.finished();
    assert_eq!(finished.finish_reason(), FinishReason::Stop);
    assert_eq!(finished.stop, Some(Stop::StopString("two t".into())));
    assert_eq!(
        finished.usage.unwrap().completion_tokens as usize,
        kept.len()
    );
    let stats = finished.stats.clone().unwrap();
    assert_eq!((stats.steps, stats.rounds.len()), (1, 1));
    verify.active(0).await;
}

#[tokio::test]
async fn a_request_has_as_many_answers_as_it_asks_for() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    for id in [40, 41, 42] {
        verify.script([tokens(&[id]), finish(FinishReason::Length)]);
    }
    let answer = coordinator
        .generate(GenerateRequest {
            request_id: "three".into(),
            choices: Some(3),
            output: Some(OutputOptions {
                prompt_logprobs: Some(true),
                ..OutputOptions::default()
            }),
            ..request(&[1, 2, 3])
        })
        .await
        .unwrap();
    let seed = answer.started().seed;
    let mut ends = Vec::new();
    let mut texts = vec![Vec::<u32>::new(); 3];
    for event in &answer.events {
        match event {
            Event::Delta(delta) => texts[delta.choice as usize].extend(&delta.token_ids),
            Event::Finished(finished) => ends.push(finished.choice),
            Event::Started(_) | Event::Progress(_) | Event::PromptLogprobs(_) => {}
        }
    }
    ends.sort_unstable();
    assert_eq!(ends, [0, 1, 2]);
    let mut all = texts.concat();
    all.sort_unstable();
    assert_eq!(all, [40, 41, 42]);
    let mut asked: Vec<(String, u64, bool)> = verify
        .calls()
        .into_iter()
        .map(|call| {
            let seed = call.request.sampling.unwrap().seed.unwrap();
            let logprobs = call.request.output.unwrap().prompt_logprobs();
            (call.request.request_id, seed, logprobs)
        })
        .collect();
    asked.sort();
    let expected = [
        ("three".to_owned(), seed, true),
        ("three#1".to_owned(), answer_seed(seed, 1), false),
        ("three#2".to_owned(), answer_seed(seed, 2), false),
    ];
    assert_eq!(asked, expected);
}
