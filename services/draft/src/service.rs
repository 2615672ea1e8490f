//! The gRPC side of the drafter. Everything here only checks messages and passes them to the engine thread.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use treespec_engine::DrafterSpec;
use treespec_rpc::{
    ServiceError, convert,
    handshake::{Fingerprint, PROTOCOL_VERSION},
    proto::draft::v1::{
        GetModelInfoRequest, GetModelInfoResponse, LinkRequest, LinkResponse, PrimeRequest,
        PrimeResponse, Welcome, draft_service_server::DraftService,
    },
};

use crate::{
    engine_thread::{EngineHandle, Job, Loaded, PrimeChunk},
    link::Link,
    sessions::{LinkId, SequenceKey},
};

/// Requests of a link that may be unanswered before it is not read any further.
const LINK_DEPTH: usize = 512;
/// When to try again while weights load.
const LOADING_RETRY: Duration = Duration::from_secs(1);

/// What a verifier is told about this drafter.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) spec: DrafterSpec,
    /// Random per process start.
    instance: String,
}

impl Identity {
    fn context_window(&self) -> u32 {
        u32::try_from(self.spec.context_window).unwrap_or(u32::MAX)
    }

    pub(crate) fn welcome(&self) -> Welcome {
        Welcome {
            protocol_version: PROTOCOL_VERSION,
            drafter_instance: self.instance.clone(),
            fingerprint: Some((&self.fingerprint).into()),
            context_window: self.context_window(),
        }
    }
}

/// The service; clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct DraftServer {
    engine: EngineHandle,
    identity: Arc<OnceLock<Arc<Identity>>>,
    next_link: Arc<AtomicU64>,
    stopping: CancellationToken,
}

impl DraftServer {
    /// A service that answers UNAVAILABLE until [`DraftServer::set_loaded`]. Its links end when `stopping` is
    /// cancelled.
    pub(crate) fn new(engine: EngineHandle, stopping: CancellationToken) -> Self {
        Self {
            engine,
            identity: Arc::default(),
            next_link: Arc::default(),
            stopping,
        }
    }

    /// Opens the service for calls.
    pub(crate) fn set_loaded(&self, loaded: Loaded) {
        self.identity.get_or_init(|| {
            Arc::new(Identity {
                fingerprint: loaded.fingerprint,
                spec: loaded.spec,
                instance: format!("{:032x}", rand::random::<u128>()),
            })
        });
    }

    fn identity(&self) -> Result<Arc<Identity>, ServiceError> {
        self.identity
            .get()
            .cloned()
            .ok_or_else(|| ServiceError::Unavailable {
                description: "the drafter is still loading its weights".to_owned(),
                retry_after: Some(LOADING_RETRY),
            })
    }

    async fn prime_chunk(
        &self,
        message: PrimeRequest,
        hidden_size: usize,
    ) -> Result<u32, ServiceError> {
        let key = SequenceKey {
            id: message.sequence_id,
            epoch: message.epoch,
        };
        let rows = convert::features_from_proto(message.rows, hidden_size)?;
        let (reply, done) = oneshot::channel();
        self.engine.send(Job::Prime(PrimeChunk {
            verifier: message.verifier_instance,
            key,
            rows,
            reply,
        }))?;
        done.await.map_err(|_| EngineHandle::stopped())?
    }
}

#[tonic::async_trait]
impl DraftService for DraftServer {
    type LinkStream = ReceiverStream<Result<LinkResponse, Status>>;

    async fn prime(
        &self,
        request: Request<Streaming<PrimeRequest>>,
    ) -> Result<Response<PrimeResponse>, Status> {
        let hidden_size = self.identity()?.spec.hidden_size;
        let mut chunks = request.into_inner();
        let mut ctx_end = None;
        while let Some(chunk) = chunks.message().await? {
            ctx_end = Some(self.prime_chunk(chunk, hidden_size).await?);
        }
        let ctx_end =
            ctx_end.ok_or_else(|| ServiceError::invalid("rows", "the stream has no chunk"))?;
        Ok(Response::new(PrimeResponse { ctx_end }))
    }

    async fn link(
        &self,
        request: Request<Streaming<LinkRequest>>,
    ) -> Result<Response<Self::LinkStream>, Status> {
        let identity = self.identity()?;
        let (responses, stream) = mpsc::channel(LINK_DEPTH);
        let link = Link {
            id: LinkId(self.next_link.fetch_add(1, Ordering::Relaxed)),
            identity,
            engine: self.engine.clone(),
            requests: request.into_inner(),
            responses,
        };
        tokio::spawn(link.run(self.stopping.clone()));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn get_model_info(
        &self,
        _request: Request<GetModelInfoRequest>,
    ) -> Result<Response<GetModelInfoResponse>, Status> {
        let identity = self.identity()?;
        Ok(Response::new(GetModelInfoResponse {
            fingerprint: Some((&identity.fingerprint).into()),
            protocol_version: PROTOCOL_VERSION,
            drafter_instance: identity.instance.clone(),
            num_layers: u32::try_from(identity.spec.num_layers).unwrap_or(u32::MAX),
            context_window: identity.context_window(),
        }))
    }
}
