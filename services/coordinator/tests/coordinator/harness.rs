//! A coordinator in this process, and a client of it.

use std::{path::PathBuf, time::Duration};

use clap::Parser;
use tokio::{sync::oneshot, task::JoinHandle};
use tonic::{Code, IntoRequest, Status, Streaming, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_types::StatusExt;
use treespec_checkpoint::TextTokenizer;
use treespec_coordinator::{Config, Server};
use treespec_rpc::{
    proto::{
        coordinator::v1::{
            Delta, Finished, GenerateRequest, GenerateResponse, Started, TokenIds,
            coordinator_service_client::CoordinatorServiceClient, generate_request::Prompt,
            generate_response::Event,
        },
        verify::v1::GetModelInfoResponse,
    },
    transport,
};

use crate::fake_verify::FakeVerify;

pub(crate) const CONTEXT_LENGTH: u32 = 64;
pub(crate) const VOCAB_SIZE: u32 = 560;
pub(crate) const DRAFTER: &str = "http://127.0.0.1:9";

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    config: Config,
}

pub(crate) fn model_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/cases/01_llama_gqa_tied/model")
}

/// The configuration of these flags; a flag wins over the default that the tests share.
pub(crate) fn config(flags: &[&str]) -> Config {
    let listen = "--listen=127.0.0.1:0";
    let target = format!("--target={}", model_path().display());
    let mut arguments = vec!["coordinator", listen];
    if !flags.iter().any(|flag| flag.starts_with("--target")) {
        arguments.push(&target);
    }
    arguments.extend(flags);
    Command::try_parse_from(arguments).unwrap().config
}

pub(crate) fn tokenizer() -> TextTokenizer {
    TextTokenizer::open(&model_path()).unwrap()
}

/// What a verify replica of the fixture says of itself.
pub(crate) fn model() -> GetModelInfoResponse {
    GetModelInfoResponse {
        architecture: "llama".to_owned(),
        vocab_size: VOCAB_SIZE,
        context_length: CONTEXT_LENGTH,
        eos_token_ids: vec![eos()],
        tokenizer_hash: tokenizer().fingerprint().to_owned(),
        numerics_profile: "f32-test".to_owned(),
        instance_id: "fake".to_owned(),
        max_budget: 128,
        block_size: 6,
        default_budget: 8,
        ..GetModelInfoResponse::default()
    }
}

/// A special token of the fixture's tokenizer.
pub(crate) fn eos() -> u32 {
    let tokenizer = tokenizer();
    (0..VOCAB_SIZE)
        .find(|&id| tokenizer.is_special(id))
        .expect("the fixture has special tokens")
}

pub(crate) struct Coordinator {
    pub(crate) client: CoordinatorServiceClient<Channel>,
    health: HealthClient<Channel>,
    shutdown: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

impl Coordinator {
    /// Serving, with these replicas and further flags.
    pub(crate) async fn start(replicas: &[&FakeVerify], flags: &[&str]) -> Self {
        let coordinator = Self::start_unready(replicas, flags).await;
        coordinator.wait_for(ServingStatus::Serving).await;
        coordinator
    }

    pub(crate) async fn start_unready(replicas: &[&FakeVerify], flags: &[&str]) -> Self {
        let endpoints = replicas
            .iter()
            .map(|replica| format!("--verify={}", replica.endpoint()));
        let flags: Vec<_> = endpoints
            .chain(flags.iter().map(|&flag| flag.to_owned()))
            .collect();
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        let config = config(&flags);
        let server = Server::bind(&config).await.unwrap();
        let channel = transport::channel(&format!("http://{}", server.local_addr())).unwrap();
        let (shutdown, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(async move {
            let stopped = async {
                let _ = stopped.await;
            };
            server.serve(stopped).await.unwrap();
        });
        Self {
            client: transport::coordinator_client(channel.clone()),
            health: HealthClient::new(channel),
            shutdown,
            server: serving,
        }
    }

    /// Asks it to end; resolves when it has.
    pub(crate) fn shut_down(self) -> JoinHandle<()> {
        self.shutdown.send(()).unwrap();
        self.server
    }

    /// Waits until its health is `wanted`.
    pub(crate) async fn wait_for(&self, wanted: ServingStatus) {
        let request = HealthCheckRequest {
            service: String::new(),
        };
        let mut health = self.health.clone();
        let mut statuses = health.watch(request).await.unwrap().into_inner();
        let reached =
            async { while statuses.message().await.unwrap().unwrap().status() != wanted {} };
        tokio::time::timeout(Duration::from_secs(10), reached)
            .await
            .unwrap_or_else(|_| panic!("health never became {wanted:?}"));
    }

    pub(crate) async fn health(&self) -> ServingStatus {
        let request = HealthCheckRequest {
            service: String::new(),
        };
        let mut health = self.health.clone();
        health.check(request).await.unwrap().into_inner().status()
    }

    pub(crate) async fn open(
        &self,
        request: impl IntoRequest<GenerateRequest>,
    ) -> Result<Streaming<GenerateResponse>, Status> {
        let response = self.client.clone().generate(request).await?;
        Ok(response.into_inner())
    }

    /// The whole answer, or the status wherever it came.
    pub(crate) async fn generate(&self, request: GenerateRequest) -> Result<Answer, Status> {
        let mut stream = self.open(request).await?;
        let mut answer = Answer::default();
        while let Some(response) = stream.message().await? {
            answer.events.push(response.event.unwrap());
        }
        Ok(answer)
    }
}

/// Every event of a finished stream.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) events: Vec<Event>,
}

impl Answer {
    pub(crate) fn started(&self) -> &Started {
        match self.events.first() {
            Some(Event::Started(started)) => started,
            other => panic!("the stream starts with {other:?}"),
        }
    }

    pub(crate) fn finished(&self) -> &Finished {
        match self.events.last() {
            Some(Event::Finished(finished)) => finished,
            other => panic!("the stream ends with {other:?}"),
        }
    }

    pub(crate) fn deltas(&self) -> impl Iterator<Item = &Delta> {
        self.events.iter().filter_map(|event| match event {
            Event::Delta(delta) => Some(delta),
            _ => None,
        })
    }

    pub(crate) fn text(&self) -> String {
        self.deltas().map(|delta| delta.text.as_str()).collect()
    }

    pub(crate) fn token_ids(&self) -> Vec<u32> {
        self.deltas()
            .flat_map(|delta| delta.token_ids.iter().copied())
            .collect()
    }
}

/// A request for token ids.
pub(crate) fn request(ids: &[u32]) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: ids.to_vec() })),
        ..GenerateRequest::default()
    }
}

/// The field that a status blames.
pub(crate) fn violated_field(status: &Status) -> String {
    let violations = status
        .get_details_bad_request()
        .unwrap_or_else(|| panic!("no BadRequest in {status:?}"))
        .field_violations;
    assert_eq!(violations.len(), 1, "{status:?}");
    violations[0].field.clone()
}

/// A refusal that tells the client when to come back.
pub(crate) fn assert_retryable(status: &Status, code: Code) {
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.get_details_retry_info().is_some(), "{status:?}");
    assert!(status.get_details_error_info().is_some(), "{status:?}");
}
