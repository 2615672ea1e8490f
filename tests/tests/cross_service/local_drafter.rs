//! A drafter inside the verifier that fails costs speed, never a token; a device that is lost ends the service.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use treespec_engine::{
    Backend, BlockTable, Drafter, EngineError, ForwardOutput, HeadRow, RowBatch, Speculated,
    SpeculativeStep, Speculator, StepBatch, StepOutput, TargetSpec,
};
use treespec_rpc::proto::verify::v1 as verify;
use treespec_rpc::transport;
use treespec_testkit::{Answer, Ask, Client, Mode, Service};
use treespec_tests::{Expected, case_json};
use treespec_verify::{LoadedModel, LoadedTarget};

use crate::models::{FIT, Placement, QWEN3, plain_cluster};

const BUDGET: u32 = 16;
const TREE: Mode = Mode::Tree(BUDGET);
const TOKENS: usize = 48;

/// Whether a call fails: gets its number, from 0, and how many sequences it has.
type Fault = fn(usize, usize) -> Option<EngineError>;

/// What fails.
#[derive(Clone, Default)]
struct Faults {
    speculate: Option<Fault>,
    step: Option<Fault>,
    calls: Arc<Calls>,
}

#[derive(Default)]
struct Calls {
    speculate: AtomicUsize,
    step: AtomicUsize,
    /// Most sequences of one speculation.
    widest: AtomicUsize,
}

impl Faults {
    fn in_speculate(fault: Fault) -> Self {
        Self {
            speculate: Some(fault),
            ..Self::default()
        }
    }

    fn in_step(fault: Fault) -> Self {
        Self {
            step: Some(fault),
            ..Self::default()
        }
    }
}

/// The real models, with faults.
struct Faulty {
    inner: Box<dyn Speculator>,
    faults: Faults,
}

impl Backend for Faulty {
    fn spec(&self) -> &TargetSpec {
        self.inner.spec()
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<Vec<ForwardOutput>, EngineError> {
        self.inner.forward(batch)
    }

    fn compact(
        &mut self,
        table: &BlockTable,
        committed: usize,
        path: &[usize],
    ) -> Result<(), EngineError> {
        self.inner.compact(table, committed, path)
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        self.inner.head_topk(hidden, k)
    }

    fn step(&mut self, batch: &StepBatch<'_>) -> Result<StepOutput, EngineError> {
        let call = self.faults.calls.step.fetch_add(1, Ordering::SeqCst);
        let sequences = batch.rows.len() + batch.trees.len();
        match self.faults.step.and_then(|fault| fault(call, sequences)) {
            Some(error) => Err(error),
            None => self.inner.step(batch),
        }
    }
}

impl Speculator for Faulty {
    fn drafter(&mut self) -> &mut dyn Drafter {
        self.inner.drafter()
    }

    fn speculate(&mut self, steps: &[SpeculativeStep<'_>]) -> Result<Vec<Speculated>, EngineError> {
        let calls = &self.faults.calls;
        let call = calls.speculate.fetch_add(1, Ordering::SeqCst);
        calls.widest.fetch_max(steps.len(), Ordering::SeqCst);
        // Everything is done before it fails: a retry finds the contexts ahead of what was committed.
        let speculated = self.inner.speculate(steps);
        match self
            .faults
            .speculate
            .and_then(|fault| fault(call, steps.len()))
        {
            Some(error) => Err(error),
            None => speculated,
        }
    }
}

/// A coordinator before one verifier with a faulty model.
struct Faulted {
    verifier: Service,
    coordinator: Service,
    faults: Faults,
}

impl Faulted {
    async fn start(faults: &Faults) -> Self {
        Self::start_with_contexts(faults, 8).await
    }

    async fn start_with_contexts(faults: &Faults, contexts: usize) -> Self {
        let builder = Placement::Local.cluster(QWEN3, FIT).max_sequences(contexts);
        let mut verifier = faulty_verifier(builder.verify_config(), faults).await;
        let config = builder.coordinator_config(vec![verifier.endpoint()], Vec::new());
        let mut coordinator = Service::coordinator(config).await;
        verifier.wait_until_serving().await;
        coordinator.wait_until_serving().await;
        Self {
            verifier,
            coordinator,
            faults: faults.clone(),
        }
    }

    fn client(&self) -> Client {
        Client::new(self.coordinator.channel())
    }
}

async fn faulty_verifier(config: treespec_verify::Config, faults: &Faults) -> Service {
    let faults = faults.clone();
    Service::verifier_with(config, move |config, announcer| {
        let loaded = treespec_verify::load(config, announcer)?;
        let LoadedModel::Speculator(inner) = loaded.model else {
            panic!("the drafter is not local");
        };
        let faults = faults.clone();
        Ok(LoadedTarget {
            model: LoadedModel::Speculator(Box::new(Faulty { inner, faults })),
            ..loaded
        })
    })
    .await
}

fn expected() -> Expected {
    case_json(QWEN3, "expected.json")
}

fn ask(prompt: &[u32]) -> Ask {
    Ask::tokens(prompt).mode(TREE).max_tokens(TOKENS).trees()
}

/// Runs one prompt and compares its tokens with the reference's.
async fn answer(client: &Client, prompt: usize) -> Answer {
    let expected = expected();
    let prompt = &expected.prompts[prompt];
    let answer = client.generate(ask(&prompt.prompt)).await.unwrap();
    assert_eq!(answer.token_ids, prompt.greedy);
    answer
}

/// Runs all prompts at once and compares their tokens with the reference's.
async fn answer_all(client: &Client) -> Vec<Answer> {
    let count = expected().prompts.len();
    join_all((0..count).map(|prompt| answer(client, prompt))).await
}

fn drafted(answer: &Answer) -> usize {
    let is_drafted = |tree: &&verify::StepTree| tree.token_ids.len() == BUDGET as usize + 1;
    answer.trees.iter().filter(is_drafted).count()
}

fn out_of_memory() -> EngineError {
    EngineError::OutOfDeviceMemory {
        wanted_bytes: 2,
        free_bytes: 1,
        what: "a tree".to_owned(),
    }
}

fn broken() -> EngineError {
    EngineError::InvalidBatch("broken on purpose".to_owned())
}

#[tokio::test]
async fn a_request_needs_no_lease_and_its_stages_are_told() {
    let cluster = Placement::Local.cluster(QWEN3, FIT).start().await;
    assert!(cluster.drafters.is_empty());
    let answer = answer(&cluster.client(), 2).await;
    assert_eq!(drafted(&answer), answer.stats.steps as usize);
    let stages = answer.stats.stage_seconds.unwrap();
    for seconds in [
        stages.draft,
        stages.head,
        stages.tree,
        stages.verify,
        stages.accept,
    ] {
        assert!(seconds > 0.0, "{stages:?}");
    }
    assert_eq!(stages.wire, 0.0);
    let total = stages.draft + stages.head + stages.tree + stages.verify + stages.accept;
    assert!(total < answer.stats.decode_seconds + 0.01, "{stages:?}");

    // At the verifier itself, too; a lease that comes along is not used.
    let lease = verify::DrafterLease {
        endpoint: "http://127.0.0.1:9".to_owned(),
    };
    for drafter in [None, Some(lease)] {
        let request = verify::GenerateRequest {
            token_ids: expected().prompts[2].prompt.clone(),
            max_tokens: Some(TOKENS as u32),
            speculation: Some(TREE.speculation()),
            drafter,
            ..Default::default()
        };
        let mut stream = cluster
            .verify_client(0)
            .generate(request)
            .await
            .unwrap()
            .into_inner();
        let mut finished = None;
        while let Some(response) = stream.message().await.unwrap() {
            if let Some(verify::generate_response::Event::Finished(event)) = response.event {
                finished = event.stats;
            }
        }
        let stats = finished.unwrap();
        assert_eq!(
            (stats.rounds, stats.fallback_steps),
            (answer.stats.rounds.clone(), 0)
        );
    }
}

#[tokio::test]
async fn a_drafter_that_always_fails_is_plain_decoding() {
    let cluster = Faulted::start(&Faults::in_speculate(|_, _| Some(broken()))).await;
    let answer = answer(&cluster.client(), 2).await;
    assert_eq!(answer.stats.fallback_steps, answer.stats.steps);
    assert_eq!(drafted(&answer), 0);
    // It is not asked for ever.
    let calls = cluster.faults.calls.speculate.load(Ordering::SeqCst);
    assert_eq!(calls, 5);
}

#[tokio::test]
async fn a_drafter_that_fails_once_comes_back_within_the_request() {
    let once = |call, _| (call == 2).then(out_of_memory);
    let cluster = Faulted::start(&Faults::in_speculate(once)).await;
    let answer = answer(&cluster.client(), 2).await;
    assert_eq!(answer.stats.fallback_steps, 1);
    assert_eq!(drafted(&answer), answer.stats.steps as usize - 1);
}

#[tokio::test]
async fn a_sequence_that_fails_others_is_found_by_running_each_alone() {
    let in_company = |_, sequences| (sequences > 1).then(broken);
    let cluster = Faulted::start(&Faults::in_speculate(in_company)).await;
    answer_all(&cluster.client()).await;
    assert!(cluster.faults.calls.widest.load(Ordering::SeqCst) > 1);
}

#[tokio::test]
async fn sequences_beyond_the_drafters_contexts_decode_plainly_until_one_is_free() {
    let cluster = Faulted::start_with_contexts(&Faults::default(), 1).await;
    let client = cluster.client();
    let answers = answer_all(&client).await;
    let fallbacks: u32 = answers
        .iter()
        .map(|answer| answer.stats.fallback_steps)
        .sum();
    assert!(fallbacks > 0);
    // All contexts are back.
    let alone = answer(&client, 2).await;
    assert_eq!(alone.stats.fallback_steps, 0);
}

#[tokio::test]
async fn a_device_without_memory_for_a_forward_fails_the_request_only() {
    let cluster = Faulted::start(&Faults::in_step(|call, _| (call == 0).then(out_of_memory))).await;
    let client = cluster.client();
    let prompt = expected().prompts[2].prompt.clone();
    let status = client.generate(ask(&prompt)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(status.message().contains("device memory"), "{status:?}");
    answer(&client, 2).await;
}

#[tokio::test]
async fn a_forward_that_fails_in_company_is_run_for_each_alone() {
    let in_company = |_, sequences| (sequences > 1).then(broken);
    let cluster = Faulted::start(&Faults::in_step(in_company)).await;
    let client = cluster.client();
    answer_all(&client).await;
    answer(&client, 2).await;
}

async fn lose_the_device(faults: Faults) {
    let mut cluster = Faulted::start(&faults).await;
    let mut client = transport::verify_client(cluster.verifier.channel());
    let request = verify::GenerateRequest {
        token_ids: expected().prompts[2].prompt.clone(),
        max_tokens: Some(TOKENS as u32),
        speculation: Some(TREE.speculation()),
        ..Default::default()
    };
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let status = loop {
        match stream.message().await {
            Ok(message) => assert!(message.is_some(), "the stream ended well"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(status.message().contains("Xid 79"), "{status:?}");
    cluster.verifier.wait_for(ServingStatus::NotServing).await;
    let reason = cluster.verifier.wait_for_end().await.unwrap_err();
    assert_eq!(reason, "the device is lost: Xid 79; restart the service");
    // Whoever is in front of it knows.
    cluster
        .coordinator
        .wait_for(ServingStatus::NotServing)
        .await;
}

fn lost() -> EngineError {
    EngineError::DeviceLost("Xid 79".to_owned())
}

#[tokio::test]
async fn a_device_lost_while_drafting_ends_the_service_with_its_reason() {
    lose_the_device(Faults::in_speculate(|call, _| (call == 3).then(lost))).await;
}

#[tokio::test]
async fn a_device_lost_in_a_prompt_ends_the_service_with_its_reason() {
    lose_the_device(Faults::in_step(|call, _| (call == 0).then(lost))).await;
}

#[tokio::test]
async fn a_request_goes_on_elsewhere_when_the_device_is_lost() {
    let builder = Placement::Local.cluster(QWEN3, FIT);
    let faults = Faults::in_speculate(|call, _| (call == 3).then(lost));
    let mut doomed = faulty_verifier(builder.verify_config(), &faults).await;
    doomed.wait_until_serving().await;
    let mut sound = Service::verifier(plain_cluster(QWEN3).verify_config()).await;
    let endpoints = vec![doomed.endpoint(), sound.endpoint()];
    let config = builder.coordinator_config(endpoints, Vec::new());
    let mut coordinator = Service::coordinator(config).await;
    coordinator.wait_until_serving().await;
    sound.wait_until_serving().await;
    let client = Client::new(coordinator.channel());
    // The first requests go to the sound one when the coordinator does not know the other yet.
    while faults.calls.speculate.load(Ordering::SeqCst) < 4 {
        answer(&client, 2).await;
    }
    let reason = doomed.wait_for_end().await.unwrap_err();
    assert!(reason.contains("Xid 79"), "{reason}");
}
