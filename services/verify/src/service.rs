//! The gRPC surface: thin handlers over [`Engine`].

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};

use futures_util::FutureExt;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use treespec_rpc::proto::verify::v1 as pb;
use treespec_rpc::proto::verify::v1::verify_service_server::VerifyService;
use treespec_rpc::{ServiceError, transport};

use crate::engine::Engine;
use crate::request::GenerationRequest;
use crate::sequence;

/// Events of a sequence that may wait for a slow reader before the sequence waits too.
const EVENT_BUFFER: usize = 64;

/// The service; answers UNAVAILABLE until the engine is loaded.
#[derive(Clone, Default)]
pub(crate) struct Verifier {
    engine: Arc<OnceLock<Engine>>,
}

impl Verifier {
    /// Opens the service. Only the first call has an effect.
    pub(crate) fn loaded(&self, engine: Engine) {
        let _ = self.engine.set(engine);
    }

    fn engine(&self) -> Result<&Engine, ServiceError> {
        self.engine
            .get()
            .ok_or_else(|| ServiceError::unavailable("the target's weights are still loading"))
    }
}

#[tonic::async_trait]
impl VerifyService for Verifier {
    type GenerateStream = ReceiverStream<Result<pb::GenerateResponse, Status>>;

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request =
            GenerationRequest::from_proto(request.into_inner(), &self.engine()?.limits())?;
        if let Some(endpoint) = &request.drafter {
            check_endpoint(endpoint)?;
        }
        let (events, stream) = mpsc::channel(EVENT_BUFFER);
        let verifier = self.clone();
        tokio::spawn(async move {
            let Ok(engine) = verifier.engine() else {
                return;
            };
            let decoded = tokio::select! {
                decoded = AssertUnwindSafe(sequence::decode(engine, request, &events)).catch_unwind() => {
                    // The panic hook has logged it; the client must not take the end of the stream for an answer.
                    decoded.unwrap_or_else(|_| Err(ServiceError::internal("decoding panicked; see the log of verify")))
                }
                // The client is gone: stop at once, whatever the sequence waits for.
                () = events.closed() => return,
            };
            if let Err(error) = decoded {
                let _ = events.send(Err(error.into())).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn get_model_info(
        &self,
        _request: Request<pb::GetModelInfoRequest>,
    ) -> Result<Response<pb::GetModelInfoResponse>, Status> {
        Ok(Response::new(self.engine()?.info.clone()))
    }
}

/// A lease that names no address is a mistake of the coordinator, not a drafter that is away.
fn check_endpoint(endpoint: &str) -> Result<(), ServiceError> {
    const FIELD: &str = "drafter.endpoint";
    const LONGEST: usize = 512;
    if endpoint.len() > LONGEST {
        let problem = format!("{} bytes, more than {LONGEST}", endpoint.len());
        return Err(ServiceError::invalid(FIELD, problem));
    }
    transport::channel(endpoint)
        .map(drop)
        .map_err(|error| ServiceError::invalid(FIELD, error.to_string()))
}
