//! One Link stream: the handshake, then messages about sequences until one side ends it.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};
use treespec_rpc::{
    ServiceError, convert,
    handshake::{self, Fingerprint, PROTOCOL_VERSION},
    proto::draft::v1::{Hello, LinkRequest, LinkResponse, link_request, link_response},
};

use crate::{
    engine_thread::{EngineHandle, Job, Reply, SequenceRequest},
    proposal::ProposalRequest,
    service::Identity,
    sessions::{LinkId, SequenceKey},
};

/// Longest name of a verifier instance, in bytes.
const MAX_INSTANCE_NAME: usize = 128;

pub(crate) struct Link {
    pub(crate) id: LinkId,
    pub(crate) identity: Arc<Identity>,
    pub(crate) engine: EngineHandle,
    pub(crate) requests: Streaming<LinkRequest>,
    pub(crate) responses: mpsc::Sender<Result<LinkResponse, Status>>,
}

impl Link {
    /// Serves the link until the verifier ends it, breaks the protocol of the link itself, opens another link, or the
    /// service stops. Its contexts are freed in every case.
    pub(crate) async fn run(mut self, stopping: CancellationToken) {
        let responses = self.responses.clone();
        let outcome = tokio::select! {
            outcome = self.serve() => outcome,
            () = responses.closed() => Ok(()),
            () = stopping.cancelled() => Err(ServiceError::unavailable("the drafter is shutting down")),
        };
        match outcome {
            Ok(()) => tracing::info!(link = self.id.0, "link ended"),
            Err(error) => {
                tracing::info!(link = self.id.0, %error, "link ended");
                // The verifier may be gone already.
                let _ = responses.send(Err(error.into())).await;
            }
        }
    }

    async fn serve(&mut self) -> Result<(), ServiceError> {
        let Some(first) = self.next_request().await else {
            return Ok(());
        };
        let Some(link_request::Message::Hello(hello)) = first.message else {
            return Err(ServiceError::precondition(
                "hello",
                "the first message of a link must be a Hello",
            ));
        };
        self.shake_hands(&hello)?;

        let (ended, replaced) = oneshot::channel();
        let _detach = Attachment::new(&self.engine, self.id, hello.verifier_instance, ended)?;
        let welcome = link_response::Message::Welcome(self.identity.welcome());
        let welcome = LinkResponse {
            message: Some(welcome),
        };
        if self.responses.send(Ok(welcome)).await.is_err() {
            return Ok(());
        }
        tokio::select! {
            outcome = self.forward() => outcome,
            error = replaced => Err(error.unwrap_or_else(|_| EngineHandle::stopped())),
        }
    }

    fn shake_hands(&self, hello: &Hello) -> Result<(), ServiceError> {
        handshake::compare_versions(hello.protocol_version, PROTOCOL_VERSION)?;
        let length = hello.verifier_instance.len();
        if !(1..=MAX_INSTANCE_NAME).contains(&length) {
            return Err(ServiceError::invalid(
                "hello.verifier_instance",
                format!("{length} bytes, allowed are 1..={MAX_INSTANCE_NAME}"),
            ));
        }
        let verifier = Fingerprint::from_proto(hello.fingerprint.clone(), "hello.fingerprint")?;
        handshake::compare(&verifier, &self.identity.fingerprint)?;
        tracing::info!(link = self.id.0, verifier = %hello.verifier_instance, "link opened");
        Ok(())
    }

    /// Passes messages on in order.
    async fn forward(&mut self) -> Result<(), ServiceError> {
        loop {
            let Ok(reply) = self.responses.clone().reserve_owned().await else {
                return Ok(());
            };
            let Some(request) = self.next_request().await else {
                return Ok(());
            };
            self.engine.send(self.job(request, reply)?)?;
        }
    }

    /// The next message; `None` when the verifier has ended the stream or its connection broke.
    async fn next_request(&mut self) -> Option<LinkRequest> {
        self.requests.message().await.unwrap_or_else(|status| {
            tracing::debug!(link = self.id.0, %status, "the verifier's stream broke");
            None
        })
    }

    /// # Errors
    /// Only for messages that name no sequence: those end the link.
    fn job(&self, request: LinkRequest, reply: Reply) -> Result<Job, ServiceError> {
        use link_request::Message;
        let spec = &self.identity.spec;
        let (id, epoch, request) = match request.message {
            Some(Message::Open(open)) => (open.sequence_id, open.epoch, Ok(SequenceRequest::Open)),
            Some(Message::Context(context)) => (
                context.sequence_id,
                context.epoch,
                convert::features_from_proto(context.rows, spec.hidden_size)
                    .map(SequenceRequest::Context),
            ),
            Some(Message::Propose(propose)) => (
                propose.sequence_id,
                propose.epoch,
                ProposalRequest::from_proto(&propose, spec.vocab_size)
                    .map(SequenceRequest::Propose),
            ),
            Some(Message::Close(close)) => {
                return Ok(Job::Close {
                    link: self.id,
                    id: close.sequence_id,
                });
            }
            Some(Message::Hello(_)) => {
                return Err(ServiceError::precondition(
                    "hello",
                    "this link has had its Hello already",
                ));
            }
            None => {
                return Err(ServiceError::invalid(
                    "message",
                    "absent, or of a kind that this version does not know",
                ));
            }
        };
        Ok(Job::Sequence {
            link: self.id,
            key: SequenceKey { id, epoch },
            request: request.unwrap_or_else(SequenceRequest::Refuse),
            reply,
        })
    }
}

/// A link that the engine thread knows; dropping it frees the link's contexts.
struct Attachment {
    engine: EngineHandle,
    link: LinkId,
}

impl Attachment {
    fn new(
        engine: &EngineHandle,
        link: LinkId,
        verifier: String,
        ended: oneshot::Sender<ServiceError>,
    ) -> Result<Self, ServiceError> {
        engine.send(Job::Attach {
            link,
            verifier,
            ended,
        })?;
        Ok(Self {
            engine: engine.clone(),
            link,
        })
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // A thread that has ended holds no contexts any more.
        let _ = self.engine.send(Job::Detach { link: self.link });
    }
}
