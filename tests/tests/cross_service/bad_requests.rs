//! Bad requests: one line that names the field, and the service goes on.

use tonic::{Code, Status};
use tonic_types::StatusExt;
use treespec_rpc::proto::coordinator::v1 as public;
use treespec_rpc::proto::verify::v1 as verify;
use treespec_testkit::{Ask, Cluster, Mode};
use treespec_tests::{Expected, ExpectedPrompt, case_json};

use crate::models::{FIT, LLAMA, cluster, plain_cluster};

const VOCAB: u32 = 560;
const CONTEXT: usize = 4_096;

/// What is wrong with a request, in terms that both services understand.
#[derive(Debug, Clone, Copy)]
enum Fault {
    UnknownToken,
    EmptyPrompt,
    PromptBeyondTheContext,
    UnknownMode,
    BudgetZero,
    BudgetTooLarge,
    TooManyLogprobs,
    NoTokens,
    UnknownStopToken,
    Temperature,
}

const FAULTS: [Fault; 10] = [
    Fault::UnknownToken,
    Fault::EmptyPrompt,
    Fault::PromptBeyondTheContext,
    Fault::UnknownMode,
    Fault::BudgetZero,
    Fault::BudgetTooLarge,
    Fault::TooManyLogprobs,
    Fault::NoTokens,
    Fault::UnknownStopToken,
    Fault::Temperature,
];

impl Fault {
    /// What the message must blame, and the value that it must show.
    fn expected(self) -> (&'static str, String) {
        match self {
            Self::UnknownToken => ("token_ids", VOCAB.to_string()),
            Self::EmptyPrompt => ("token_ids", "empty".to_owned()),
            Self::PromptBeyondTheContext => ("token_ids", CONTEXT.to_string()),
            Self::UnknownMode => ("speculation.mode", "77".to_owned()),
            Self::BudgetZero => ("speculation.budget", "0".to_owned()),
            Self::BudgetTooLarge => ("speculation.budget", "256".to_owned()),
            Self::TooManyLogprobs => ("output.top_logprobs", "21".to_owned()),
            Self::NoTokens => ("max_tokens", "0".to_owned()),
            Self::UnknownStopToken => ("stop_token_ids[1]", VOCAB.to_string()),
            Self::Temperature => ("sampling.temperature", "-0.7".to_owned()),
        }
    }

    fn spoil(self, request: &mut verify::GenerateRequest) {
        match self {
            Self::UnknownToken => request.token_ids.push(VOCAB),
            Self::EmptyPrompt => request.token_ids.clear(),
            Self::PromptBeyondTheContext => request.token_ids = vec![1; CONTEXT],
            Self::UnknownMode => request.speculation = speculation(77, None),
            Self::BudgetZero => request.speculation = tree(0),
            Self::BudgetTooLarge => request.speculation = tree(256),
            Self::TooManyLogprobs => {
                request.output = Some(verify::OutputOptions {
                    top_logprobs: Some(21),
                    ..Default::default()
                });
            }
            Self::NoTokens => request.max_tokens = Some(0),
            Self::UnknownStopToken => request.stop_token_ids = vec![1, VOCAB],
            Self::Temperature => {
                request.sampling = Some(verify::SamplingParams {
                    temperature: Some(-0.7),
                    ..Default::default()
                });
            }
        }
    }

    fn check(self, status: &Status, service: &str) {
        let (field, value) = self.expected();
        let message = status.message();
        let what = format!("{service}, {self:?}: {status:?}");
        assert_eq!(status.code(), Code::InvalidArgument, "{what}");
        assert!(message.contains(field), "{what}");
        assert!(message.contains(&value), "{what}");
        assert!(!message.contains('\n'), "{what}");
        assert!(status.get_details_error_info().is_some(), "{what}");
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations.len(), 1, "{what}");
        assert!(violations[0].field.starts_with(field), "{what}");
    }
}

fn speculation(mode: i32, budget: Option<u32>) -> Option<verify::SpeculationOptions> {
    Some(verify::SpeculationOptions {
        mode: Some(mode),
        budget,
        ..Default::default()
    })
}

fn tree(budget: u32) -> Option<verify::SpeculationOptions> {
    speculation(verify::Mode::Tree.into(), Some(budget))
}

/// The same request to the coordinator.
fn to_public(request: verify::GenerateRequest) -> public::GenerateRequest {
    public::GenerateRequest {
        prompt: Some(public::generate_request::Prompt::TokenIds(
            public::TokenIds {
                ids: request.token_ids,
            },
        )),
        max_tokens: request.max_tokens,
        stop_token_ids: request.stop_token_ids,
        sampling: request.sampling,
        speculation: request.speculation,
        output: request.output,
        ..Default::default()
    }
}

/// A good request and its answer.
fn good() -> (verify::GenerateRequest, ExpectedPrompt) {
    let mut expected: Expected = case_json(LLAMA, "expected.json");
    let prompt = expected.prompts.swap_remove(2);
    let request = verify::GenerateRequest {
        token_ids: prompt.prompt.clone(),
        max_tokens: Some(8),
        ..Default::default()
    };
    (request, prompt)
}

/// The tokens that a verifier answers with.
async fn verified(cluster: &Cluster, request: verify::GenerateRequest) -> Result<Vec<u32>, Status> {
    let mut events = cluster
        .verify_client(0)
        .generate(request)
        .await?
        .into_inner();
    let mut tokens = Vec::new();
    while let Some(response) = events.message().await? {
        if let Some(verify::generate_response::Event::Tokens(committed)) = response.event {
            tokens.extend(committed.token_ids);
        }
    }
    Ok(tokens)
}

#[tokio::test]
async fn the_coordinator_names_the_field_and_goes_on() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let client = cluster.client();
    let (good, expected) = good();
    for fault in FAULTS {
        let mut bad = good.clone();
        fault.spoil(&mut bad);
        let status = client.generate(to_public(bad)).await.unwrap_err();
        fault.check(&status, "coordinator");
        let answer = client.generate(to_public(good.clone())).await.unwrap();
        assert_eq!(answer.token_ids, expected.greedy[..8], "after {fault:?}");
    }
}

#[tokio::test]
async fn verify_names_the_field_and_goes_on() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let (good, expected) = good();
    for fault in FAULTS {
        let mut bad = good.clone();
        fault.spoil(&mut bad);
        let status = verified(&cluster, bad).await.unwrap_err();
        fault.check(&status, "verify");
        let tokens = verified(&cluster, good.clone()).await.unwrap();
        assert_eq!(tokens, expected.greedy[..8], "after {fault:?}");
    }
}

#[tokio::test]
async fn a_lease_that_names_no_address_is_refused() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let (good, expected) = good();
    let long = "x".repeat(100_000);
    for endpoint in ["", "garbage", "ftp://draft:7071", "http://draft", &long] {
        let bad = verify::GenerateRequest {
            drafter: Some(verify::DrafterLease {
                endpoint: endpoint.to_owned(),
            }),
            ..good.clone()
        };
        let status = verified(&cluster, bad).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        let message = status.message();
        assert!(message.contains("drafter.endpoint"), "{message}");
        assert!(message.len() < 1_000, "{} bytes", message.len());
    }
    let tokens = verified(&cluster, good).await.unwrap();
    assert_eq!(tokens, expected.greedy[..8]);
}

#[tokio::test]
async fn a_request_id_is_taken_while_its_request_runs() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let client = cluster.client();
    let (good, _) = good();
    let named = |max_tokens| public::GenerateRequest {
        request_id: "twice".to_owned(),
        max_tokens: Some(max_tokens),
        ignore_eos: Some(true),
        ..to_public(good.clone())
    };
    let mut running = client.open(named(3_000)).await.unwrap();
    running.next().await.unwrap();
    let status = client.generate(named(8)).await.unwrap_err();
    assert_eq!(status.code(), Code::AlreadyExists, "{status:?}");
    for part in ["request_id", "twice"] {
        assert!(status.message().contains(part), "{status:?}");
    }
    assert!(!status.message().contains('\n'), "{status:?}");
    // The first is not disturbed, and its id is free again once it is gone.
    running.next().await.unwrap().unwrap();
    drop(running);
    let freed = async {
        loop {
            match client.generate(named(8)).await {
                Ok(answer) => return answer,
                Err(status) => assert_eq!(status.code(), Code::AlreadyExists),
            }
        }
    };
    let answer = tokio::time::timeout(treespec_testkit::PATIENCE, freed).await;
    assert_eq!(answer.unwrap().request_id, "twice");
}

#[tokio::test]
async fn a_request_that_can_never_fit_the_cache_is_refused_at_once() {
    let cluster = plain_cluster(LLAMA).kv_tokens(64).start().await;
    let client = cluster.client();
    let ask = |max_tokens| {
        Ask::tokens(&[40, 41, 42])
            .mode(Mode::Ar)
            .max_tokens(max_tokens)
    };
    let status = client.generate(ask(100)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    for part in ["max_tokens", "64", "--kv-tokens"] {
        assert!(status.message().contains(part), "{status:?}");
    }
    assert_eq!(client.generate(ask(8)).await.unwrap().token_ids.len(), 8);
}

#[tokio::test]
async fn drafting_modes_without_a_drafter_say_what_to_start() {
    let cluster = plain_cluster(LLAMA).start().await;
    let client = cluster.client();
    for mode in [Mode::Chain, Mode::Tree(8)] {
        let ask = Ask::tokens(&[40]).mode(mode).max_tokens(4);
        let status = client.generate(ask).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
        assert!(status.message().contains("--draft"), "{status:?}");
        let request = verify::GenerateRequest {
            token_ids: vec![40],
            speculation: Some(mode.speculation()),
            ..Default::default()
        };
        let status = verified(&cluster, request).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
        assert!(status.message().contains("--drafter"), "{status:?}");
    }
    // Auto is plain decoding then.
    let ask = Ask::tokens(&[40]).mode(Mode::Auto).max_tokens(4);
    let answer = client.generate(ask).await.unwrap();
    assert_eq!(answer.stats.drafted_nodes, 0);
}
