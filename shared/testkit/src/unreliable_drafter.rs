//! Draft services that no verifier should have to suffer from: one stops answering, one answers nonsense.

use std::future::pending;
use std::pin::Pin;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};
use treespec_rpc::handshake::PROTOCOL_VERSION;
use treespec_rpc::health::Readiness;
use treespec_rpc::proto::draft::v1::{
    self as pb, draft_service_server::DraftService, link_request, link_response,
};
use treespec_rpc::transport;

use crate::Service;
use crate::service::{Launched, line};

/// The first thing that a silent drafter does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Silence {
    /// It accepts the connection and says nothing at all.
    Connection,
    /// The Hello of a link.
    Hello,
    /// The Open of a sequence.
    Open,
    /// The features of the prompt.
    Prime,
    /// A proposal.
    Propose,
}

/// What a lying drafter proposes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// A sound tree of tokens that have nothing to do with the text.
    WrongTokens,
    /// A sound tree of more nodes than were asked for.
    TooManyNodes,
    /// A token outside the vocabulary.
    UnknownToken,
    /// A node that is its own ancestor.
    Cycle,
    /// A draft for another position.
    OtherPosition,
    /// A proposal without a draft.
    Nothing,
    /// Hidden rows of the wrong size.
    ShortHidden,
}

impl Service {
    /// A draft service that agrees with every verifier and answers what comes before `silence`, then nothing.
    ///
    /// # Panics
    /// When it gets no port.
    pub async fn silent_drafter(silence: Silence) -> Self {
        Self::unreliable_drafter(Vice::Silence(silence)).await
    }

    /// A draft service that agrees with every verifier and answers every proposal with a lie.
    ///
    /// # Panics
    /// When it gets no port.
    pub async fn lying_drafter(lie: Lie) -> Self {
        Self::unreliable_drafter(Vice::Lie(lie)).await
    }

    async fn unreliable_drafter(vice: Vice) -> Self {
        Self::launch(move |listen| async move {
            let listener = transport::bind(listen).await.map_err(line)?;
            let address = listener.local_addr().map_err(line)?;
            Ok(Launched {
                address,
                serving: Box::pin(async move {
                    if vice == Vice::Silence(Silence::Connection) {
                        return hold_connections(listener).await.map_err(line);
                    }
                    let readiness = Readiness::new(&[]).await;
                    let routes = Routes::new(transport::draft_server(UnreliableDrafter(vice)));
                    transport::serve(listener, routes, readiness, pending())
                        .await
                        .map_err(line)
                }),
            })
        })
        .await
    }
}

async fn hold_connections(listener: tokio::net::TcpListener) -> std::io::Result<()> {
    let mut held = Vec::new();
    loop {
        held.push(listener.accept().await?);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Vice {
    Silence(Silence),
    Lie(Lie),
}

impl Vice {
    /// Whether it still answers what comes at `point`.
    fn answers(self, point: Silence) -> bool {
        match self {
            Self::Silence(silence) => silence > point,
            Self::Lie(_) => true,
        }
    }
}

struct UnreliableDrafter(Vice);

#[tonic::async_trait]
impl DraftService for UnreliableDrafter {
    type LinkStream = Pin<Box<dyn Stream<Item = Result<pb::LinkResponse, Status>> + Send>>;

    async fn prime(
        &self,
        request: Request<Streaming<pb::PrimeRequest>>,
    ) -> Result<Response<pb::PrimeResponse>, Status> {
        if !self.0.answers(Silence::Prime) {
            pending::<()>().await;
        }
        let mut chunks = request.into_inner();
        let mut ctx_end = 0;
        while let Some(chunk) = chunks.message().await? {
            ctx_end = chunk.rows.map_or(ctx_end, |rows| rows.ctx_end);
        }
        Ok(Response::new(pb::PrimeResponse { ctx_end }))
    }

    async fn link(
        &self,
        request: Request<Streaming<pb::LinkRequest>>,
    ) -> Result<Response<Self::LinkStream>, Status> {
        let vice = self.0;
        let mut requests = request.into_inner();
        let (responses, stream) = mpsc::channel(64);
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                if let Some(message) = request.message.and_then(|m| answer(m, vice)) {
                    let response = pb::LinkResponse {
                        message: Some(message),
                    };
                    if responses.send(Ok(response)).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(
            ReceiverStream::new(stream).chain(tokio_stream::pending()),
        )))
    }

    async fn get_model_info(
        &self,
        _request: Request<pb::GetModelInfoRequest>,
    ) -> Result<Response<pb::GetModelInfoResponse>, Status> {
        pending().await
    }
}

fn answer(message: link_request::Message, vice: Vice) -> Option<link_response::Message> {
    match message {
        link_request::Message::Hello(hello) if vice.answers(Silence::Hello) => {
            Some(link_response::Message::Welcome(pb::Welcome {
                protocol_version: PROTOCOL_VERSION,
                drafter_instance: "unreliable".to_owned(),
                fingerprint: hello.fingerprint,
                context_window: 2_048,
            }))
        }
        link_request::Message::Open(open) if vice.answers(Silence::Open) => {
            Some(link_response::Message::Opened(pb::Opened {
                sequence_id: open.sequence_id,
                epoch: open.epoch,
                ctx_start: 0,
                ctx_end: 0,
            }))
        }
        link_request::Message::Propose(propose) => match vice {
            Vice::Silence(_) => None,
            Vice::Lie(lie) => Some(link_response::Message::Proposal(lie.proposal(&propose))),
        },
        _ => None,
    }
}

impl Lie {
    fn proposal(self, propose: &pb::Propose) -> pb::Proposal {
        use pb::proposal::Draft;
        let chain = |nodes: u32, token: u32| {
            Draft::Tree(pb::Tree {
                token_ids: (0..nodes).map(|node| token + node).collect(),
                parents: (0..nodes).collect(),
                log_probs: (0..nodes).map(|node| -f64::from(node)).collect(),
            })
        };
        let draft = match self {
            Self::WrongTokens | Self::OtherPosition => Some(chain(propose.budget, 1)),
            Self::TooManyNodes => Some(Draft::Tree(pb::Tree {
                token_ids: (1..=200).collect(),
                parents: vec![0; 200],
                log_probs: (0..200).map(|node| -f64::from(node)).collect(),
            })),
            Self::UnknownToken => Some(chain(2, u32::MAX - 2)),
            Self::Cycle => Some(Draft::Tree(pb::Tree {
                token_ids: vec![1, 2],
                parents: vec![2, 1],
                log_probs: vec![-1.0, -2.0],
            })),
            Self::Nothing => None,
            Self::ShortHidden => Some(Draft::BlockHidden(pb::BlockHidden {
                rows: 1,
                data: vec![0; 6].into(),
            })),
        };
        pb::Proposal {
            sequence_id: propose.sequence_id,
            epoch: propose.epoch,
            ctx_end: propose.ctx_end + u32::from(self == Self::OtherPosition),
            draft,
            // Time that nobody can have spent.
            timings: Some(pb::DraftTimings {
                forward_seconds: 1e19,
                head_seconds: f64::NAN,
                tree_seconds: 1e19,
            }),
        }
    }
}
