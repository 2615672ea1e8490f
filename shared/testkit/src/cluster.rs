//! A coordinator with its verifiers and drafters.

use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;

use tonic::transport::Channel;
use treespec_engine::{DeviceChoice, Precision, PrefillMode};
use treespec_rpc::proto::verify::v1::verify_service_client::VerifyServiceClient;
use treespec_rpc::transport;

use treespec_verify::DraftPlacement;

use crate::{Client, Service, TopkPlacement};

/// One thread per engine: tests run side by side, and pools that spin for each other's cores hurt all of them.
const THREADS: usize = 1;
/// Not a divisor of the fixtures' prompt lengths, so that prompts end inside a chunk.
const PREFILL_CHUNK: usize = 100;

/// The services of a test. Dropping it kills them all.
pub struct Cluster {
    /// The public API.
    pub coordinator: Service,
    /// In the order in which the coordinator knows them.
    pub verifiers: Vec<Service>,
    /// In the order in which the coordinator leases them.
    pub drafters: Vec<Service>,
}

/// What a cluster is made of.
#[derive(Debug, Clone)]
pub struct ClusterBuilder {
    target: PathBuf,
    drafter: Option<PathBuf>,
    drafted_with: Option<PathBuf>,
    placement: TopkPlacement,
    draft_placement: DraftPlacement,
    verifiers: usize,
    drafters: usize,
    more_draft_endpoints: Vec<String>,
    kv_tokens: usize,
    max_sequences: usize,
    precision: Precision,
}

impl Cluster {
    /// One verifier of `target`, plain decoding only until [`ClusterBuilder::drafter`] is called.
    pub fn builder(target: impl Into<PathBuf>) -> ClusterBuilder {
        ClusterBuilder {
            target: target.into(),
            drafter: None,
            drafted_with: None,
            placement: TopkPlacement::Draft,
            draft_placement: DraftPlacement::Remote,
            verifiers: 1,
            drafters: 1,
            more_draft_endpoints: Vec::new(),
            kv_tokens: 4_096,
            max_sequences: 8,
            precision: Precision::F32,
        }
    }

    /// A client of the coordinator.
    pub fn client(&self) -> Client {
        Client::new(self.coordinator.channel())
    }

    /// A client of one verifier, past the coordinator.
    pub fn verify_client(&self, verifier: usize) -> VerifyServiceClient<Channel> {
        transport::verify_client(self.verifiers[verifier].channel())
    }
}

impl ClusterBuilder {
    /// The drafter's checkpoint, for verify and draft. Adds one draft service.
    pub fn drafter(mut self, drafter: impl Into<PathBuf>) -> Self {
        self.drafter = Some(drafter.into());
        self
    }

    /// Another checkpoint for the draft services than the one that verify reads.
    pub fn drafted_with(mut self, drafter: impl Into<PathBuf>) -> Self {
        self.drafted_with = Some(drafter.into());
        self
    }

    /// Who runs the top-k pass for the drafter's rows. The drafter when not called.
    pub fn placement(mut self, placement: TopkPlacement) -> Self {
        self.placement = placement;
        self
    }

    /// The drafter runs in the verifiers; no draft service is started.
    pub fn local_drafter(mut self) -> Self {
        self.draft_placement = DraftPlacement::Local;
        self.drafters = 0;
        self
    }

    /// How many verifiers.
    pub fn verifiers(mut self, count: usize) -> Self {
        self.verifiers = count;
        self
    }

    /// How many draft services; none are started without a drafter's checkpoint.
    pub fn drafters(mut self, count: usize) -> Self {
        self.drafters = count;
        self
    }

    /// A draft service from elsewhere, leased after the cluster's own.
    pub fn draft_endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.more_draft_endpoints.push(endpoint.into());
        self
    }

    /// KV rows of each verifier, 4,096 when not called.
    pub fn kv_tokens(mut self, tokens: usize) -> Self {
        self.kv_tokens = tokens;
        self
    }

    /// Sequences that each draft service, or each verifier with its drafter, holds; 8 when not called.
    pub fn max_sequences(mut self, count: usize) -> Self {
        self.max_sequences = count;
        self
    }

    /// Arithmetic of both models: f32 unless told otherwise, as references want it.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Configuration of a verifier of this cluster.
    pub fn verify_config(&self) -> treespec_verify::Config {
        treespec_verify::Config {
            listen: any_port(),
            target: self.target.clone(),
            drafter: self.drafter.clone(),
            device: DeviceChoice::Cpu,
            draft_placement: self.draft_placement,
            drafter_contexts: self.max_sequences,
            threads: THREADS,
            cpu_precision: Some(self.precision),
            cpu_isa: None,
            kv_tokens: self.kv_tokens,
            prefill_chunk: Some(PREFILL_CHUNK),
            prefill: PrefillMode::Exact,
            max_budget: treespec_tree::MAX_BUDGET,
            default_budget: Some(8),
            topk_placement: self.placement,
            feature_window: 2_048,
            max_waiting: 256,
            announce: false,
            exit_with_stdin: false,
        }
    }

    /// Configuration of a draft service of this cluster; `None` without a drafter's checkpoint.
    pub fn draft_config(&self) -> Option<treespec_draft::Config> {
        let drafter = self.drafted_with.clone().or_else(|| self.drafter.clone())?;
        Some(treespec_draft::Config {
            listen: any_port(),
            drafter,
            target: self.target.clone(),
            threads: NonZeroUsize::new(THREADS),
            cpu_precision: Some(self.precision),
            cpu_isa: None,
            device: DeviceChoice::Cpu,
            context_window: 2_048,
            max_sequences: self.max_sequences,
            no_head: false,
            announce: false,
            exit_with_stdin: false,
        })
    }

    /// Configuration of a coordinator in front of these endpoints.
    pub fn coordinator_config(
        &self,
        verify: Vec<String>,
        draft: Vec<String>,
    ) -> treespec_coordinator::Config {
        treespec_coordinator::Config {
            listen: any_port(),
            target: self.target.clone(),
            verify,
            draft,
            max_in_flight: 64,
            max_waiting: 256,
            failover_wait_ms: 10_000,
            announce: false,
            exit_with_stdin: false,
        }
    }

    /// Starts everything and waits until all of it is SERVING.
    ///
    /// # Panics
    /// When a service does not start.
    pub async fn start(self) -> Cluster {
        let mut verifiers = Vec::with_capacity(self.verifiers);
        for _ in 0..self.verifiers {
            verifiers.push(Service::verifier(self.verify_config()).await);
        }
        let mut drafters = Vec::with_capacity(self.drafters);
        if let Some(config) = self.draft_config() {
            for _ in 0..self.drafters {
                drafters.push(Service::drafter(config.clone()).await);
            }
        }
        let verify = verifiers.iter().map(Service::endpoint).collect();
        let draft = drafters
            .iter()
            .map(Service::endpoint)
            .chain(self.more_draft_endpoints.iter().cloned())
            .collect();
        let mut coordinator = Service::coordinator(self.coordinator_config(verify, draft)).await;
        for service in verifiers.iter_mut().chain(&mut drafters) {
            service.wait_until_serving().await;
        }
        coordinator.wait_until_serving().await;
        Cluster {
            coordinator,
            verifiers,
            drafters,
        }
    }
}

fn any_port() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}
