//! A verifier's side of the protocol, and a service with a scripted drafter to talk to.

use std::{
    future::pending,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Channel};
use treespec_draft::{Error, LoadedDrafter, run_with};
use treespec_engine::{DraftShape, HeadRow, build_draft};
use treespec_rpc::{
    ServiceError, convert,
    handshake::{FeatureDtype, Fingerprint, PROTOCOL_VERSION},
    proto::draft::v1::{
        Close, Context, FeatureRows, Hello, LinkRequest, LinkResponse, Open, Opened, PrimeRequest,
        Proposal, Propose, SequenceFailure, TopkPlacement, Welcome, link_request, link_response,
        proposal::Draft,
    },
    transport,
};
use treespec_telemetry::Announcer;
use treespec_tree::TokenTree;

use crate::scripted::{BLOCK, HIDDEN, Probe, ScriptedDrafter, VOCAB, head};

pub(crate) const SOON: Duration = Duration::from_secs(10);
pub(crate) const MAX_SEQUENCES: usize = 16;

pub(crate) fn fingerprint() -> Fingerprint {
    Fingerprint {
        vocab_size: VOCAB as u32,
        hidden_size: HIDDEN as u32,
        tokenizer_hash: "aa".to_owned(),
        taps: vec![1, 2],
        block_size: BLOCK as u32,
        mask_token_id: 3,
        feature_dtype: FeatureDtype::F32,
        projection_hash: "bb".to_owned(),
    }
}

/// A draft service on loopback; dropping it kills it.
pub(crate) struct Service {
    pub(crate) channel: Channel,
    pub(crate) probe: Arc<Probe>,
    pub(crate) shutdown: Option<oneshot::Sender<()>>,
    pub(crate) task: JoinHandle<Result<(), Error>>,
}

impl Drop for Service {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Service {
    pub(crate) async fn start() -> Self {
        Self::with_head(true).await
    }

    /// Started and loaded.
    pub(crate) async fn with_head(has_head: bool) -> Self {
        let probe = Arc::new(Probe::default());
        let drafter = ScriptedDrafter::new(&probe, has_head);
        let load = move || {
            Ok(LoadedDrafter {
                drafter: Box::new(drafter),
                fingerprint: fingerprint(),
            })
        };
        let service = Self::loading(probe, load).await;
        service.wait_loaded().await;
        service
    }

    /// Started, with `load` running.
    pub(crate) async fn loading(
        probe: Arc<Probe>,
        load: impl FnOnce() -> Result<LoadedDrafter, Error> + Send + 'static,
    ) -> Self {
        let listener = transport::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
            .await
            .unwrap();
        let endpoint = transport::endpoint(&listener).unwrap();
        let (shutdown, stop) = oneshot::channel::<()>();
        let stop = async {
            if stop.await.is_err() {
                pending::<()>().await;
            }
        };
        let task = tokio::spawn(run_with(
            load,
            MAX_SEQUENCES,
            listener,
            Announcer::silent(),
            stop,
        ));
        Self {
            channel: transport::channel(&endpoint).unwrap(),
            probe,
            shutdown: Some(shutdown),
            task,
        }
    }

    pub(crate) async fn wait_loaded(&self) {
        timeout(SOON, async {
            while self.model_info().await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap();
    }

    pub(crate) async fn model_info(
        &self,
    ) -> Result<treespec_rpc::proto::draft::v1::GetModelInfoResponse, ServiceError> {
        transport::draft_client(self.channel.clone())
            .get_model_info(treespec_rpc::proto::draft::v1::GetModelInfoRequest {})
            .await
            .map(tonic::Response::into_inner)
            .map_err(|status| ServiceError::from_status(&status))
    }

    pub(crate) async fn wait_open_contexts(&self, count: usize) {
        timeout(SOON, async {
            while self.probe.open_contexts.load(Ordering::SeqCst) != count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap_or_else(|_| panic!("there are not {count} open contexts"));
    }

    /// Sends chunks of rows `(start, values)` as one Prime.
    pub(crate) async fn prime(
        &self,
        instance: &str,
        sequence_id: u64,
        epoch: u32,
        chunks: &[(u32, Vec<f32>)],
    ) -> Result<u32, ServiceError> {
        let requests: Vec<PrimeRequest> = chunks
            .iter()
            .map(|(start, values)| PrimeRequest {
                verifier_instance: instance.to_owned(),
                sequence_id,
                epoch,
                rows: Some(rows(*start, values)),
            })
            .collect();
        transport::draft_client(self.channel.clone())
            .prime(tokio_stream::iter(requests))
            .await
            .map(|response| response.into_inner().ctx_end)
            .map_err(|status| ServiceError::from_status(&status))
    }
}

pub(crate) fn rows(start: u32, values: &[f32]) -> FeatureRows {
    convert::features_to_proto(start, values, HIDDEN).unwrap()
}

/// Feature rows that differ from position to position.
pub(crate) fn features(start: u32, count: u32) -> Vec<f32> {
    (start..start + count)
        .flat_map(|position| [(position as f32 * 0.3).sin(), (position as f32 * 0.7).cos()])
        .collect()
}

pub(crate) fn hello(instance: &str) -> Hello {
    Hello {
        protocol_version: PROTOCOL_VERSION,
        verifier_instance: instance.to_owned(),
        fingerprint: Some((&fingerprint()).into()),
    }
}

/// One Link.
pub(crate) struct Verifier {
    requests: mpsc::Sender<LinkRequest>,
    responses: Streaming<LinkResponse>,
}

impl Verifier {
    /// A link before its Hello.
    pub(crate) async fn dial(service: &Service) -> Self {
        let (requests, stream) = mpsc::channel(64);
        let responses = transport::draft_client(service.channel.clone())
            .link(ReceiverStream::new(stream))
            .await
            .unwrap()
            .into_inner();
        Self {
            requests,
            responses,
        }
    }

    pub(crate) async fn shake_hands(
        service: &Service,
        hello: Hello,
    ) -> Result<Welcome, ServiceError> {
        let mut verifier = Self::dial(service).await;
        verifier.send(link_request::Message::Hello(hello)).await;
        match verifier.receive().await? {
            link_response::Message::Welcome(welcome) => Ok(welcome),
            other => panic!("{other:?} instead of a Welcome"),
        }
    }

    pub(crate) async fn connect(service: &Service, instance: &str) -> Self {
        let mut verifier = Self::dial(service).await;
        verifier
            .send(link_request::Message::Hello(hello(instance)))
            .await;
        let welcome = verifier.receive().await.unwrap();
        assert!(matches!(welcome, link_response::Message::Welcome(_)));
        verifier
    }

    pub(crate) async fn send(&self, message: link_request::Message) {
        let request = LinkRequest {
            message: Some(message),
        };
        self.requests.send(request).await.unwrap();
    }

    pub(crate) async fn send_unknown(&self) {
        let request = LinkRequest { message: None };
        self.requests.send(request).await.unwrap();
    }

    pub(crate) async fn receive(&mut self) -> Result<link_response::Message, ServiceError> {
        match timeout(SOON, self.responses.message()).await.unwrap() {
            Ok(Some(response)) => Ok(response.message.unwrap()),
            Ok(None) => Err(ServiceError::unavailable("the link ended")),
            Err(status) => Err(ServiceError::from_status(&status)),
        }
    }

    pub(crate) async fn open(&mut self, sequence_id: u64, epoch: u32) -> Opened {
        self.send_open(sequence_id, epoch).await;
        match self.receive().await.unwrap() {
            link_response::Message::Opened(opened) => opened,
            other => panic!("{other:?} instead of Opened"),
        }
    }

    pub(crate) async fn send_open(&self, sequence_id: u64, epoch: u32) {
        let open = Open { sequence_id, epoch };
        self.send(link_request::Message::Open(open)).await;
    }

    pub(crate) async fn context(&self, sequence_id: u64, epoch: u32, start: u32, count: u32) {
        let context = Context {
            sequence_id,
            epoch,
            rows: Some(rows(start, &features(start, count))),
        };
        self.send(link_request::Message::Context(context)).await;
    }

    pub(crate) async fn close(&self, sequence_id: u64) {
        self.send(link_request::Message::Close(Close { sequence_id }))
            .await;
    }

    pub(crate) async fn send_propose(&self, propose: Propose) {
        self.send(link_request::Message::Propose(propose)).await;
    }

    pub(crate) async fn proposal(&mut self) -> Proposal {
        match self.receive().await.unwrap() {
            link_response::Message::Proposal(proposal) => proposal,
            other => panic!("{other:?} instead of a Proposal"),
        }
    }

    pub(crate) async fn failure(&mut self) -> SequenceFailure {
        match self.receive().await.unwrap() {
            link_response::Message::Failure(failure) => failure,
            other => panic!("{other:?} instead of a SequenceFailure"),
        }
    }

    /// The sequence can still be drafted for at `ctx_end`.
    pub(crate) async fn assert_alive(&mut self, sequence_id: u64, epoch: u32, ctx_end: u32) {
        self.send_propose(propose(sequence_id, epoch, ctx_end))
            .await;
        let proposal = self.proposal().await;
        assert_eq!(
            (proposal.sequence_id, proposal.epoch, proposal.ctx_end),
            (sequence_id, epoch, ctx_end)
        );
    }
}

/// A request for a tree of 8 nodes, built by the drafter.
pub(crate) fn propose(sequence_id: u64, epoch: u32, ctx_end: u32) -> Propose {
    use treespec_rpc::proto::draft::v1::DraftShape as Shape;
    Propose {
        sequence_id,
        epoch,
        ctx_end,
        root_token_id: 7,
        shape: Shape::Tree.into(),
        budget: 8,
        placement: TopkPlacement::Draft.into(),
        coupling: None,
    }
}

/// The tree of a proposal, whoever has to build it.
pub(crate) fn tree_of(proposal: &Proposal, root: u32, shape: DraftShape) -> TokenTree {
    match proposal.draft.as_ref().unwrap() {
        Draft::Tree(tree) => convert::tree_from_proto(root, tree, VOCAB).unwrap(),
        Draft::BlockHidden(hidden) => {
            let hidden = convert::block_hidden_from_proto(hidden, BLOCK, HIDDEN).unwrap();
            let rows: Vec<HeadRow> = head(&hidden, shape.candidates_per_depth(VOCAB));
            build_draft(root, &rows, shape, None)
        }
    }
}
