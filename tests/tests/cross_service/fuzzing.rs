//! Random requests and random bytes never take a service down.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tonic::Code;
use treespec_rpc::proto::coordinator::v1::{
    GenerateRequest, Message, Messages, TokenIds, generate_request::Prompt,
};
use treespec_rpc::proto::verify::v1::{
    Choices, Constraint, OutputOptions, SamplingParams, SpeculationOptions, constraint::Kind,
};
use treespec_testkit::{Ask, Cluster, Mode, PATIENCE, Service, call_with_bytes};

use crate::models::{FIT, LLAMA, cluster};

const METHODS: [&str; 6] = [
    "/treespec.coordinator.v1.CoordinatorService/Generate",
    "/treespec.coordinator.v1.CoordinatorService/Tokenize",
    "/treespec.verify.v1.VerifyService/Generate",
    "/treespec.draft.v1.DraftService/Prime",
    "/treespec.draft.v1.DraftService/Link",
    "/treespec.draft.v1.DraftService/GetModelInfo",
];

/// Values at and around every limit, and any at all.
fn number() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 0..70u32,
        1 => prop::sample::select(vec![255, 256, 559, 560, 4_095, 4_096, u32::MAX]),
        1 => any::<u32>(),
    ]
}

fn float() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => Just(0.0),
        2 => Just(1.0),
        1 => any::<f32>(),
    ]
}

fn maybe<T: std::fmt::Debug + Clone>(
    strategy: impl Strategy<Value = T>,
) -> impl Strategy<Value = Option<T>> {
    prop::option::weighted(0.3, strategy)
}

fn prompt() -> impl Strategy<Value = Prompt> {
    let message = ("[a-z]{0,9}", ".{0,40}");
    prop_oneof![
        2 => ".{0,80}".prop_map(Prompt::Text),
        2 => prop::collection::vec(message, 0..4).prop_map(|messages| {
            let messages = messages.into_iter().map(|(role, content)| Message { role, content });
            Prompt::Messages(Messages { messages: messages.collect() })
        }),
        4 => prop::collection::vec(0..560u32, 0..40).prop_map(|ids| {
            Prompt::TokenIds(TokenIds { ids })
        }),
        1 => prop::collection::vec(number(), 0..40).prop_map(|ids| {
            Prompt::TokenIds(TokenIds { ids })
        }),
    ]
}

prop_compose! {
    fn sampling()(
        temperature in maybe(float()),
        top_p in maybe(float()),
        top_k in maybe(number()),
        min_p in maybe(float()),
        seed in maybe(any::<u64>()),
        repetition_penalty in maybe(float()),
        (presence_penalty, frequency_penalty) in (maybe(float()), maybe(float())),
        logit_bias in prop::collection::hash_map(number(), float(), 0..3),
        allowed_token_ids in prop_oneof![4 => Just(Vec::new()), 1 => prop::collection::vec(number(), 0..4)],
        banned_token_ids in prop::collection::vec(number(), 0..3),
    ) -> SamplingParams {
        SamplingParams {
            temperature, top_p, top_k, min_p, seed, repetition_penalty, presence_penalty, frequency_penalty,
            logit_bias, allowed_token_ids, banned_token_ids,
        }
    }
}

prop_compose! {
    fn speculation()(
        mode in maybe(prop_oneof![8 => 0..6i32, 1 => any::<i32>()]),
        budget in maybe(number()),
        ranking in maybe(0..5i32),
    ) -> SpeculationOptions {
        SpeculationOptions { mode, budget, ranking }
    }
}

prop_compose! {
    fn output()(
        top_logprobs in maybe(0..25u32),
        prompt_logprobs in maybe(any::<bool>()),
        include_trees in maybe(any::<bool>()),
        logprob_kind in maybe(0..4i32),
    ) -> OutputOptions {
        OutputOptions { top_logprobs, prompt_logprobs, include_trees, logprob_kind }
    }
}

fn constraint() -> impl Strategy<Value = Constraint> {
    let junk = "[\\[\\]{}()*+?|\\\\\":,a-z0-9 ]{0,20}";
    let kind = prop_oneof![
        1 => Just(None),
        1 => junk.prop_map(|text| Some(Kind::JsonSchema(text))),
        1 => Just(Some(Kind::JsonSchema("{\"type\": \"integer\"}".to_owned()))),
        2 => junk.prop_map(|text| Some(Kind::Regex(text))),
        2 => prop::collection::vec(".{0,4}", 0..3).prop_map(|options| Some(Kind::Choices(Choices { options }))),
        1 => junk.prop_map(|text| Some(Kind::Lark(text))),
    ];
    kind.prop_map(|kind| Constraint { kind })
}

prop_compose! {
    fn request()(
        request_id in ".{0,6}",
        prompt in prop::option::weighted(0.95, prompt()),
        // Always a limit: a valid request for the whole context would take its time.
        max_tokens in 0..30u32,
        stop_token_ids in prop::collection::vec(number(), 0..3),
        ignore_eos in maybe(any::<bool>()),
        sampling in maybe(sampling()),
        speculation in prop::option::of(speculation()),
        output in maybe(output()),
        stop_strings in prop::collection::vec(".{0,3}", 0..3),
        include_stop in maybe(any::<bool>()),
        min_tokens in maybe(0..40u32),
        constraint in prop::option::weighted(0.1, constraint()),
        choices in maybe(0..4u32),
    ) -> GenerateRequest {
        GenerateRequest {
            request_id, prompt, max_tokens: Some(max_tokens), stop_token_ids, ignore_eos, sampling, speculation, output,
            stop_strings, include_stop, min_tokens, constraint, choices,
        }
    }
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    })
}

fn start(runtime: &Runtime) -> Cluster {
    runtime.block_on(cluster(LLAMA, FIT).start())
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

async fn assert_serving(cluster: &Cluster) {
    let ask = Ask::tokens(&[40, 41]).mode(Mode::Tree(8)).max_tokens(6);
    let answer = cluster.client().generate(ask).await.unwrap();
    assert_eq!(answer.token_ids.len(), 6);
    assert_eq!(answer.stats.fallback_steps, 0, "the drafter is there");
}

/// Codes that a request may be refused with. Not INTERNAL or UNKNOWN: those are faults.
fn is_refusal(code: Code) -> bool {
    matches!(
        code,
        Code::InvalidArgument | Code::Unimplemented | Code::FailedPrecondition
    )
}

#[test]
fn random_requests_are_answered_or_refused() {
    let runtime = runtime();
    let cluster = start(&runtime);
    let client = cluster.client();
    let answered = std::cell::Cell::new(0);
    runner(300)
        .run(&request(), |request| {
            let most = request.max_tokens.unwrap_or_default() as usize;
            match runtime.block_on(client.generate(request)) {
                Ok(answer) => {
                    answered.set(answered.get() + 1);
                    prop_assert!(answer.token_ids.len() <= most);
                }
                Err(status) => {
                    prop_assert!(is_refusal(status.code()), "{:?}", status);
                    prop_assert!(!status.message().contains('\n'), "{:?}", status);
                }
            }
            Ok(())
        })
        .unwrap();
    assert!(answered.get() >= 30, "most of it must not be refused");
    runtime.block_on(assert_serving(&cluster));
}

#[test]
fn random_messages_are_refused_and_change_nothing() {
    let runtime = runtime();
    let cluster = start(&runtime);
    let service_of = |method: &str| -> &Service {
        match method {
            method if method.contains("coordinator") => &cluster.coordinator,
            method if method.contains("verify") => &cluster.verifiers[0],
            _ => &cluster.drafters[0],
        }
    };
    let bytes = prop::collection::vec(any::<u8>(), 0..200);
    runner(300)
        .run(
            &(prop::sample::select(&METHODS), bytes),
            |(method, bytes)| {
                let call = call_with_bytes(service_of(method).channel(), method, bytes);
                let ended = runtime.block_on(async { timeout(PATIENCE, call).await });
                prop_assert!(ended.is_ok(), "{} hangs", method);
                Ok(())
            },
        )
        .unwrap();
    runtime.block_on(assert_serving(&cluster));
}

#[test]
fn bytes_that_are_no_http_at_all_change_nothing() {
    let runtime = runtime();
    let cluster = start(&runtime);
    let services = [
        &cluster.coordinator,
        &cluster.verifiers[0],
        &cluster.drafters[0],
    ];
    let preface = prop::option::of(Just(&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..]));
    let bytes = prop::collection::vec(any::<u8>(), 0..300);
    runner(60)
        .run(
            &(0..services.len(), preface, bytes),
            |(at, preface, bytes)| {
                let address = services[at].address();
                runtime.block_on(async {
                    let mut stream = TcpStream::connect(address).await.unwrap();
                    // The service may hang up in the middle of it.
                    let _ = stream.write_all(preface.unwrap_or_default()).await;
                    let _ = stream.write_all(&bytes).await;
                });
                Ok(())
            },
        )
        .unwrap();
    runtime.block_on(assert_serving(&cluster));
}
