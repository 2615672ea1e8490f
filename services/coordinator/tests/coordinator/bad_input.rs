//! What a client may get wrong, and how it is told.

use tonic::Code;
use tonic_types::StatusExt;
use treespec_rpc::proto::{
    coordinator::v1::{
        DetokenizeRequest, GenerateRequest, Message, Messages, TokenizeRequest,
        generate_request::Prompt, tokenize_request::Input,
    },
    verify::v1::{Mode, OutputOptions, SamplingParams, SpeculationOptions},
};

use crate::{
    fake_verify::FakeVerify,
    harness::{CONTEXT_LENGTH, Coordinator, DRAFTER, VOCAB_SIZE, model, request, violated_field},
};

struct Case {
    request: GenerateRequest,
    field: &'static str,
    mention: String,
}

fn case(
    field: &'static str,
    mention: impl ToString,
    edit: impl FnOnce(&mut GenerateRequest),
) -> Case {
    let mut request = request(&[1, 2, 3]);
    edit(&mut request);
    Case {
        request,
        field,
        mention: mention.to_string(),
    }
}

fn messages(list: &[(&str, &str)]) -> Messages {
    Messages {
        messages: list
            .iter()
            .map(|&(role, content)| Message {
                role: role.to_owned(),
                content: content.to_owned(),
            })
            .collect(),
    }
}

fn sampling(edit: impl FnOnce(&mut SamplingParams)) -> Option<SamplingParams> {
    let mut sampling = SamplingParams::default();
    edit(&mut sampling);
    Some(sampling)
}

fn speculation(mode: i32, budget: Option<u32>) -> Option<SpeculationOptions> {
    Some(SpeculationOptions {
        mode: Some(mode),
        budget,
        ..Default::default()
    })
}

fn prompts() -> Vec<Case> {
    let token_ids = |ids: Vec<u32>| request(&ids).prompt;
    let full = CONTEXT_LENGTH as usize;
    vec![
        case("prompt", "text, messages or token_ids", |r| r.prompt = None),
        case("text", "empty", |r| {
            r.prompt = Some(Prompt::Text(String::new()))
        }),
        case("token_ids.ids", "empty", |r| r.prompt = token_ids(vec![])),
        case("messages", "empty", |r| {
            r.prompt = Some(Prompt::Messages(messages(&[])));
        }),
        case("messages.messages[1].role", "empty", |r| {
            r.prompt = Some(Prompt::Messages(messages(&[("user", "hi"), ("", "there")])));
        }),
        case("messages", "Only user and assistant roles", |r| {
            r.prompt = Some(Prompt::Messages(messages(&[("tool", "42")])));
        }),
        case("token_ids.ids[2]", VOCAB_SIZE, |r| {
            r.prompt = token_ids(vec![0, 1, VOCAB_SIZE]);
        }),
        case("token_ids.ids[0]", u32::MAX, |r| {
            r.prompt = token_ids(vec![u32::MAX])
        }),
        case("token_ids.ids", "64 tokens, the context holds 64", |r| {
            r.prompt = token_ids(vec![1; full]);
        }),
        case("token_ids.ids", "9000 tokens, the context holds 64", |r| {
            r.prompt = token_ids(vec![1; 9000]);
        }),
        case("text", "the context holds 64", |r| {
            r.prompt = Some(Prompt::Text("many words ".repeat(200)));
        }),
    ]
}

fn options() -> Vec<Case> {
    let tree = Mode::Tree.into();
    let output = |top_logprobs| {
        Some(OutputOptions {
            top_logprobs: Some(top_logprobs),
            ..OutputOptions::default()
        })
    };
    vec![
        case("request_id", "129 bytes", |r| {
            r.request_id = "x".repeat(129)
        }),
        case("max_tokens", "0", |r| r.max_tokens = Some(0)),
        case("stop_token_ids[1]", "9999", |r| {
            r.stop_token_ids = vec![1, 9999]
        }),
        case("speculation.mode", "77", |r| {
            r.speculation = speculation(77, None)
        }),
        case("speculation.budget", "0", |r| {
            r.speculation = speculation(tree, Some(0))
        }),
        case("speculation.budget", "256", |r| {
            r.speculation = speculation(tree, Some(256))
        }),
        case("speculation.budget", "128", |r| {
            r.speculation = speculation(tree, Some(129))
        }),
        case("speculation.budget", "ar", |r| {
            r.speculation = speculation(Mode::Ar.into(), Some(8));
        }),
        case("speculation.budget", "chain", |r| {
            r.speculation = speculation(Mode::Chain.into(), Some(8));
        }),
        case("sampling.temperature", "-1", |r| {
            r.sampling = sampling(|s| s.temperature = Some(-1.0));
        }),
        case("sampling.temperature", "NaN", |r| {
            r.sampling = sampling(|s| s.temperature = Some(f32::NAN));
        }),
        case("sampling.top_p", "0", |r| {
            r.sampling = sampling(|s| s.top_p = Some(0.0))
        }),
        case("sampling.top_k", "0", |r| {
            r.sampling = sampling(|s| s.top_k = Some(0))
        }),
        case("sampling.min_p", "1", |r| {
            r.sampling = sampling(|s| s.min_p = Some(1.0))
        }),
        case("output.top_logprobs", "21", |r| r.output = output(21)),
        case("output.logprob_kind", "9", |r| {
            r.output = Some(OutputOptions {
                logprob_kind: Some(9),
                ..OutputOptions::default()
            });
        }),
        case("speculation.ranking", "9", |r| {
            r.speculation = Some(SpeculationOptions {
                ranking: Some(9),
                ..SpeculationOptions::default()
            });
        }),
        case("sampling.temperature", "100.5", |r| {
            r.sampling = sampling(|s| s.temperature = Some(100.5));
        }),
        case("sampling.presence_penalty", "3", |r| {
            r.sampling = sampling(|s| s.presence_penalty = Some(3.0));
        }),
        case("sampling.logit_bias[9999]", "9999", |r| {
            r.sampling = sampling(|s| s.logit_bias = [(9999, 1.0)].into());
        }),
        case("sampling.logit_bias", "NaN", |r| {
            r.sampling = sampling(|s| s.logit_bias = [(1, f32::NAN)].into());
        }),
        case("sampling.allowed_token_ids[0]", "9999", |r| {
            r.sampling = sampling(|s| s.allowed_token_ids = vec![9999]);
        }),
        case("sampling.banned_token_ids[1]", "9999", |r| {
            r.sampling = sampling(|s| s.banned_token_ids = vec![0, 9999]);
        }),
        case("sampling.allowed_token_ids", "no token", |r| {
            r.sampling = sampling(|s| {
                s.allowed_token_ids = vec![4];
                s.banned_token_ids = vec![4];
            });
        }),
        case("stop_strings[1]", "empty", |r| {
            r.stop_strings = vec!["x".into(), String::new()];
        }),
        case("stop_strings[0]", "1025", |r| {
            r.stop_strings = vec!["x".repeat(1025)];
        }),
        case("stop_strings", "65", |r| {
            r.stop_strings = vec!["x".into(); 65];
        }),
        case("min_tokens", "9", |r| {
            r.min_tokens = Some(9);
            r.max_tokens = Some(8);
        }),
        case("choices", "0", |r| r.choices = Some(0)),
        case("choices", "17", |r| r.choices = Some(17)),
    ]
}

#[tokio::test]
async fn bad_requests_are_invalid_arguments_that_name_the_field() {
    let verify = FakeVerify::start(model()).await;
    let drafter = format!("--draft={DRAFTER}");
    let coordinator = Coordinator::start(&[&verify], &[&drafter]).await;

    for case in prompts().into_iter().chain(options()) {
        let Case {
            request,
            field,
            mention,
        } = case;
        let status = coordinator.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status:?}");
        assert_eq!(violated_field(&status), field);
        assert!(status.message().contains(&mention), "{field}: {status:?}");
        assert!(!status.message().contains('\n'), "{field}: {status:?}");
        assert!(status.get_details_error_info().is_some());
    }
    assert!(verify.calls().is_empty());
    // It keeps serving.
    coordinator.generate(request(&[1, 2, 3])).await.unwrap();
}

#[tokio::test]
async fn drafting_modes_need_a_drafter() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    for mode in [Mode::Chain, Mode::Tree] {
        let status = coordinator
            .generate(GenerateRequest {
                speculation: speculation(mode.into(), None),
                ..request(&[1, 2, 3])
            })
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
        assert!(status.message().contains("--draft"), "{status:?}");
    }
}

#[tokio::test]
async fn a_malformed_timeout_is_refused() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let mut request = tonic::Request::new(request(&[1]));
    request
        .metadata_mut()
        .insert("grpc-timeout", "soon".parse().unwrap());
    let status = coordinator.open(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(violated_field(&status), "grpc-timeout");
}

#[tokio::test]
async fn the_text_calls_check_their_input() {
    let verify = FakeVerify::start(model()).await;
    let coordinator = Coordinator::start(&[&verify], &[]).await;
    let mut client = coordinator.client.clone();

    let tokenize = |input| TokenizeRequest {
        input,
        add_special_tokens: None,
    };
    let status = client.tokenize(tokenize(None)).await.unwrap_err();
    assert_eq!(violated_field(&status), "input");
    let empty = tokenize(Some(Input::Messages(messages(&[]))));
    let status = client.tokenize(empty).await.unwrap_err();
    assert_eq!(violated_field(&status), "messages");
    let unknown = DetokenizeRequest {
        token_ids: vec![1, 1_000_000],
        skip_special_tokens: None,
    };
    let status = client.detokenize(unknown).await.unwrap_err();
    assert_eq!(violated_field(&status), "token_ids[1]");
}
