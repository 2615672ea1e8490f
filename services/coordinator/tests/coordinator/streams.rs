//! The shape of an answer.

use tonic::{Code, Status};
use treespec_rpc::{
    ServiceError,
    proto::{
        coordinator::v1::{
            DetokenizeRequest, GenerateRequest, GetModelInfoRequest, Message, Messages,
            TokenizeRequest, generate_request::Prompt, generate_response::Event,
            tokenize_request::Input,
        },
        verify::v1::{
            DraftRanking, FinishReason, GetModelInfoResponse, Mode, OutputOptions, PromptLogprobs,
            SamplingParams, SpeculationOptions, generate_response::Event as VerifyEvent,
        },
    },
};

use crate::{
    fake_verify::{Act, FakeVerify, finish, prefill, tokens},
    harness::{Coordinator, DRAFTER, VOCAB_SIZE, eos, model, request, tokenizer},
};

fn conversation() -> Messages {
    Messages {
        messages: vec![Message {
            role: "user".to_owned(),
            content: "hello".to_owned(),
        }],
    }
}

#[tokio::test]
async fn events_come_in_order_and_the_last_one_counts() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let logprobs = PromptLogprobs {
        logprobs: vec![-1.0, -2.0],
    };
    verify.script([
        prefill(2, 3),
        prefill(3, 3),
        Act::Send(VerifyEvent::PromptLogprobs(logprobs.clone())),
        tokens(&[40]),
        tokens(&[41, 42]),
        finish(FinishReason::Length),
    ]);
    let answer = coordinator
        .generate(GenerateRequest {
            output: Some(OutputOptions {
                prompt_logprobs: Some(true),
                ..OutputOptions::default()
            }),
            ..request(&[1, 2, 3])
        })
        .await
        .unwrap();

    let kinds: Vec<_> = answer
        .events
        .iter()
        .map(|event| match event {
            Event::Started(_) => "started",
            Event::Progress(_) => "progress",
            Event::PromptLogprobs(_) => "prompt_logprobs",
            Event::Delta(_) => "delta",
            Event::Finished(_) => "finished",
        })
        .collect();
    assert_eq!(
        kinds,
        [
            "started",
            "progress",
            "progress",
            "prompt_logprobs",
            "delta",
            "delta",
            "finished"
        ]
    );
    assert_eq!(answer.events[3], Event::PromptLogprobs(logprobs));
    assert_eq!(answer.started().prompt_tokens, 3);
    assert_eq!(answer.started().request_id.len(), 36);
    assert_eq!(answer.token_ids(), [40, 41, 42]);
    assert_eq!(
        answer.text(),
        tokenizer().decode(&[40, 41, 42], true).unwrap()
    );
    let finished = answer.finished();
    assert_eq!(finished.finish_reason(), FinishReason::Length);
    assert_eq!(finished.stats.as_ref().unwrap().steps, 4);
    let usage = finished.usage.unwrap();
    assert_eq!(
        (
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens
        ),
        (3, 3, 3)
    );
}

#[tokio::test]
async fn verify_is_told_everything() {
    let verify = FakeVerify::start(model()).await;
    let drafter = format!("--draft={DRAFTER}");
    let coordinator = Coordinator::start(&[&verify], &[&drafter]).await;
    let answer = coordinator
        .generate(GenerateRequest {
            request_id: "r1".to_owned(),
            max_tokens: Some(5),
            stop_token_ids: vec![9],
            ignore_eos: Some(true),
            sampling: Some(SamplingParams {
                seed: Some(77),
                ..SamplingParams::default()
            }),
            speculation: Some(SpeculationOptions {
                mode: Some(Mode::Tree.into()),
                budget: Some(16),
                ..Default::default()
            }),
            ..request(&[1, 2, 3])
        })
        .await
        .unwrap();
    assert_eq!(answer.started().request_id, "r1");
    assert_eq!(answer.started().seed, 77);

    let call = verify.calls().remove(0).request;
    assert_eq!(call.request_id, "r1");
    assert_eq!(
        (call.token_ids, call.prompt_length),
        (vec![1, 2, 3], Some(3))
    );
    assert_eq!((call.max_tokens, call.ignore_eos), (Some(5), Some(true)));
    assert_eq!(call.stop_token_ids, [9]);
    let sampling = call.sampling.unwrap();
    assert_eq!((sampling.seed, sampling.temperature), (Some(77), Some(0.0)));
    let speculation = call.speculation.unwrap();
    assert_eq!(
        (speculation.mode(), speculation.budget),
        (Mode::Tree, Some(16))
    );
    assert_eq!(call.drafter.unwrap().endpoint, DRAFTER);
}

#[tokio::test]
async fn a_missing_seed_is_drawn_and_the_same_everywhere() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let first = coordinator.generate(request(&[1])).await.unwrap();
    let second = coordinator.generate(request(&[1])).await.unwrap();
    assert_ne!(first.started().seed, second.started().seed);
    let sent: Vec<_> = verify
        .calls()
        .iter()
        .map(|call| call.request.sampling.as_ref().unwrap().seed.unwrap())
        .collect();
    assert_eq!(sent, [first.started().seed, second.started().seed]);
}

#[tokio::test]
async fn plain_decoding_takes_no_drafter() {
    let verify = FakeVerify::start(model()).await;
    let drafter = format!("--draft={DRAFTER}");
    let coordinator = Coordinator::start(&[&verify], &[&drafter]).await;
    let speculation = Some(SpeculationOptions {
        mode: Some(Mode::Ar.into()),
        budget: None,
        ..Default::default()
    });
    let plain = GenerateRequest {
        speculation,
        ..request(&[1])
    };
    coordinator.generate(plain).await.unwrap();
    coordinator.generate(request(&[1])).await.unwrap();
    let leases: Vec<_> = verify
        .calls()
        .iter()
        .map(|call| call.request.drafter.is_some())
        .collect();
    assert_eq!(leases, [false, true]);
}

#[tokio::test]
async fn deltas_are_whole_characters() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let text = "naïve 世界 🙂 ok";
    let ids = tokenizer().encode(text, false).unwrap();
    let steps: Vec<_> = ids.iter().map(|&id| tokens(&[id])).collect();
    verify.script(steps.into_iter().chain([finish(FinishReason::Length)]));
    let answer = coordinator.generate(request(&[1])).await.unwrap();

    assert_eq!(answer.text(), text);
    assert_eq!(answer.token_ids(), ids);
    let waiting = answer
        .deltas()
        .filter(|delta| delta.text.is_empty())
        .count();
    assert!(waiting > 0, "no character was split: {ids:?}");
    assert!(
        answer
            .deltas()
            .all(|delta| !delta.text.contains('\u{fffd}'))
    );
}

#[tokio::test]
async fn half_a_character_at_the_end_is_not_lost() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let ids = tokenizer().encode("🙂", false).unwrap();
    assert!(ids.len() > 1);
    verify.script([tokens(&ids[..1]), finish(FinishReason::Length)]);
    let answer = coordinator.generate(request(&[1])).await.unwrap();
    let texts: Vec<_> = answer.deltas().map(|delta| delta.text.as_str()).collect();
    assert_eq!(texts, ["", "\u{fffd}"]);
    assert_eq!(answer.token_ids(), ids[..1]);
}

#[tokio::test]
async fn end_of_sequence_is_a_token_but_no_text() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    verify.script([tokens(&[40, eos()]), finish(FinishReason::Stop)]);
    let answer = coordinator.generate(request(&[1])).await.unwrap();
    assert_eq!(answer.token_ids(), [40, eos()]);
    assert_eq!(answer.text(), tokenizer().decode(&[40], true).unwrap());
}

#[tokio::test]
async fn prompts_are_tokenised_as_the_text_calls_do() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let mut client = coordinator.client.clone();
    let mut tokenized = Vec::new();
    for input in [
        Input::Text("hello world".to_owned()),
        Input::Messages(conversation()),
    ] {
        let request = TokenizeRequest {
            input: Some(input),
            add_special_tokens: None,
        };
        tokenized.push(
            client
                .tokenize(request)
                .await
                .unwrap()
                .into_inner()
                .token_ids,
        );
    }
    for prompt in [
        Prompt::Text("hello world".to_owned()),
        Prompt::Messages(conversation()),
    ] {
        let request = GenerateRequest {
            prompt: Some(prompt),
            ..GenerateRequest::default()
        };
        coordinator.generate(request).await.unwrap();
    }
    let sent: Vec<_> = verify
        .calls()
        .into_iter()
        .map(|call| call.request.token_ids)
        .collect();
    assert_eq!(sent, tokenized);

    let request = DetokenizeRequest {
        token_ids: tokenized.remove(0),
        skip_special_tokens: Some(true),
    };
    let text = client.detokenize(request).await.unwrap().into_inner().text;
    assert_eq!(text, "hello world");
}

#[tokio::test]
async fn an_error_of_verify_reaches_the_client_as_it_is() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let errors = [
        ServiceError::internal("the engine thread has stopped"),
        ServiceError::ResourceExhausted {
            what: "KV blocks".to_owned(),
            retry_after: None,
        },
        ServiceError::invalid("token_ids", "verify does not like them"),
    ];
    for error in errors {
        verify.script([tokens(&[40]), Act::Fail(Status::from(error.clone()))]);
        let status = coordinator.generate(request(&[1])).await.unwrap_err();
        assert_eq!(ServiceError::from_status(&status), error);
    }
    assert_eq!(verify.calls().len(), 3);
}

#[tokio::test]
async fn a_request_id_is_taken_while_it_runs() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let named = GenerateRequest {
        request_id: "twice".to_owned(),
        ..request(&[1])
    };
    verify.script([tokens(&[40]), Act::Hang]);
    let running = coordinator.open(named.clone()).await.unwrap();
    let status = coordinator.generate(named.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::AlreadyExists, "{status:?}");
    assert!(status.message().contains("twice"), "{status:?}");
    drop(running);
    verify.active(0).await;
    coordinator.generate(named).await.unwrap();
}

#[tokio::test]
async fn model_info_tells_what_can_be_asked_for() {
    let verify = FakeVerify::start(model()).await;
    let drafter = format!("--draft={DRAFTER}");
    let plain = Coordinator::start(&[&verify], &[]).await;
    let speculating = Coordinator::start(&[&verify], &[&drafter]).await;
    let info = |coordinator: &Coordinator| {
        let mut client = coordinator.client.clone();
        async move {
            let response = client.get_model_info(GetModelInfoRequest {}).await;
            response.unwrap().into_inner()
        }
    };
    let all = info(&speculating).await;
    assert_eq!(
        all.modes().collect::<Vec<_>>(),
        [Mode::Auto, Mode::Ar, Mode::Chain, Mode::Tree]
    );
    assert_eq!(
        (all.vocab_size, all.block_size, all.max_budget),
        (VOCAB_SIZE, 6, 128)
    );
    assert_eq!(all.eos_token_ids, [eos()]);
    assert_eq!(all.name, "model");
    assert!(all.has_chat_template);
    assert_eq!(info(&plain).await.modes().collect::<Vec<_>>(), [Mode::Ar]);
}

#[tokio::test]
async fn a_model_that_hosts_its_drafter_needs_no_draft_service_and_no_lease() {
    let hosting = GetModelInfoResponse {
        hosts_drafter: true,
        ..model()
    };
    let verify = FakeVerify::start(hosting).await;
    let drafter = format!("--draft={DRAFTER}");
    for flags in [&[][..], &[&*drafter]] {
        let coordinator = Coordinator::start(&[&verify], flags).await;
        let tree = GenerateRequest {
            speculation: Some(SpeculationOptions {
                mode: Some(Mode::Tree.into()),
                budget: Some(4),
                ranking: Some(DraftRanking::Fitted.into()),
            }),
            ..request(&[1])
        };
        coordinator.generate(tree.clone()).await.unwrap();
        let call = verify.calls().pop().unwrap().request;
        assert_eq!(call.speculation, tree.speculation);
        assert_eq!(call.drafter, None);
        let mut client = coordinator.client.clone();
        let info = client.get_model_info(GetModelInfoRequest {}).await.unwrap();
        assert_eq!(info.into_inner().modes().count(), 4);
    }
}
