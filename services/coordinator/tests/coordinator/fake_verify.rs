//! A verify service that replies by script and remembers what it was asked.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::{Stream, StreamExt, stream};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
};
use tonic::{Request, Response, Status, service::Routes};
use treespec_rpc::{
    health::Readiness,
    proto::verify::v1::{
        CommittedTokens, FinishReason, GenerateFinished, GenerateRequest, GenerateResponse,
        GetModelInfoRequest, GetModelInfoResponse, PrefillProgress, SpeculationStats, Usage,
        generate_response::Event,
        verify_service_server::{SERVICE_NAME, VerifyService},
    },
    transport,
};

/// What the fake does in one Generate call, in order. A script that ends without [`Act::Finish`] drops the stream.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    Send(Event),
    Fail(Status),
    /// Goes on when the test says so.
    Await(Arc<Notify>),
    /// Says nothing until the caller gives up.
    Hang,
}

/// One Generate call as the fake saw it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) request: GenerateRequest,
    /// The `grpc-timeout` header.
    pub(crate) timeout: Option<String>,
}

#[derive(Clone)]
struct Service {
    model: GetModelInfoResponse,
    scripts: Arc<Mutex<VecDeque<Vec<Act>>>>,
    calls: Arc<Mutex<Vec<Call>>>,
    /// Streams that are open now.
    active: Arc<watch::Sender<usize>>,
    /// The model was asked for.
    known: Arc<watch::Sender<bool>>,
}

pub(crate) struct FakeVerify {
    service: Service,
    address: SocketAddr,
    readiness: Readiness,
    server: JoinHandle<()>,
}

impl FakeVerify {
    /// Serving on a free port.
    pub(crate) async fn start(model: GetModelInfoResponse) -> Self {
        let fake = Self::start_loading(model).await;
        fake.readiness.set_serving().await;
        fake
    }

    /// Listening, NOT_SERVING.
    pub(crate) async fn start_loading(model: GetModelInfoResponse) -> Self {
        let service = Service {
            model,
            scripts: Arc::default(),
            calls: Arc::default(),
            active: Arc::new(watch::Sender::new(0)),
            known: Arc::new(watch::Sender::new(false)),
        };
        Self::listen(service, "127.0.0.1:0".parse().unwrap()).await
    }

    async fn listen(service: Service, address: SocketAddr) -> Self {
        let listener = transport::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let readiness = Readiness::new(&[SERVICE_NAME]).await;
        let routes = Routes::new(transport::verify_server(service.clone()));
        let server = {
            let readiness = readiness.clone();
            tokio::spawn(async move {
                transport::serve(listener, routes, readiness, std::future::pending())
                    .await
                    .unwrap();
            })
        };
        Self {
            service,
            address,
            readiness,
            server,
        }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// Adds the script of the next call that has none yet. Calls without a script finish at once.
    pub(crate) fn script(&self, acts: impl IntoIterator<Item = Act>) {
        let acts = acts.into_iter().collect();
        self.service.scripts.lock().unwrap().push_back(acts);
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.service.calls.lock().unwrap().clone()
    }

    /// Waits until this many streams are open.
    pub(crate) async fn active(&self, streams: usize) {
        let mut active = self.service.active.subscribe();
        let reached = active.wait_for(|&open| open == streams);
        tokio::time::timeout(Duration::from_secs(10), reached)
            .await
            .expect("the number of open verify streams is reached")
            .unwrap();
    }

    /// Waits until a coordinator has seen that it serves.
    pub(crate) async fn known(&self) {
        let mut known = self.service.known.subscribe();
        let reached = known.wait_for(|&known| known);
        tokio::time::timeout(Duration::from_secs(10), reached)
            .await
            .expect("a coordinator asks for the model")
            .unwrap();
    }

    /// Closes the port and every connection, like a process that dies.
    pub(crate) async fn kill(&mut self) {
        self.server.abort();
        let _ = (&mut self.server).await;
    }

    /// Comes back on the same port with the same scripts and memory.
    pub(crate) async fn restart(&mut self) {
        *self = Self::listen(self.service.clone(), self.address).await;
        self.readiness.set_serving().await;
    }
}

impl Drop for FakeVerify {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Counts an open stream for as long as it lives.
struct Open(Arc<watch::Sender<usize>>);

impl Open {
    fn new(active: &Arc<watch::Sender<usize>>) -> Self {
        active.send_modify(|open| *open += 1);
        Self(Arc::clone(active))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

#[tonic::async_trait]
impl VerifyService for Service {
    type GenerateStream =
        Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send + 'static>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let timeout = request
            .metadata()
            .get("grpc-timeout")
            .map(|value| value.to_str().unwrap().to_owned());
        let request = request.into_inner();
        self.calls.lock().unwrap().push(Call { request, timeout });
        let script = self.scripts.lock().unwrap().pop_front();
        let script = script.unwrap_or_else(|| vec![finish(FinishReason::Stop)]);
        let open = Open::new(&self.active);
        let events = stream::iter(script).filter_map(move |act| {
            let _open = &open;
            async move {
                match act {
                    Act::Send(event) => Some(Ok(GenerateResponse { event: Some(event) })),
                    Act::Fail(status) => Some(Err(status)),
                    Act::Await(signal) => {
                        signal.notified().await;
                        None
                    }
                    Act::Hang => std::future::pending().await,
                }
            }
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn get_model_info(
        &self,
        _request: Request<GetModelInfoRequest>,
    ) -> Result<Response<GetModelInfoResponse>, Status> {
        self.known.send_replace(true);
        Ok(Response::new(self.model.clone()))
    }
}

/// The tokens of one step.
pub(crate) fn tokens(ids: &[u32]) -> Act {
    Act::Send(Event::Tokens(CommittedTokens {
        token_ids: ids.to_vec(),
        ..CommittedTokens::default()
    }))
}

pub(crate) fn prefill(done_tokens: u32, total_tokens: u32) -> Act {
    Act::Send(Event::Prefill(PrefillProgress {
        done_tokens,
        total_tokens,
    }))
}

/// The regular end. Its usage is nonsense on purpose: the coordinator counts itself.
pub(crate) fn finish(reason: FinishReason) -> Act {
    Act::Send(Event::Finished(GenerateFinished {
        finish_reason: reason.into(),
        usage: Some(Usage {
            prompt_tokens: 1_000_000,
            completion_tokens: 1_000_000,
            cached_tokens: 3,
        }),
        stats: Some(SpeculationStats {
            steps: 4,
            ..SpeculationStats::default()
        }),
    }))
}
