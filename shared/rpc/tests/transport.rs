//! The transport profile over real connections on loopback.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{net::SocketAddr, pin::Pin, time::Duration};

use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle, time::timeout};
use tokio_stream::{Stream, StreamExt};
use tonic::{Code, Request, Response, Status, Streaming, service::Routes, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use treespec_rpc::{
    ServiceError,
    health::Readiness,
    proto::draft::v1::{
        FeatureRows, GetModelInfoRequest, GetModelInfoResponse, LinkRequest, LinkResponse,
        PrimeRequest, PrimeResponse, draft_service_client::DraftServiceClient,
        draft_service_server::DraftService,
    },
    transport::{self, MAX_MESSAGE_BYTES, TransportError, channel},
};

const SERVICE: &str = "treespec.draft.v1.DraftService";
const SOON: Duration = Duration::from_secs(5);

/// Counts the bytes of Prime and holds every Link open for ever.
struct Stub;

#[tonic::async_trait]
impl DraftService for Stub {
    type LinkStream = Pin<Box<dyn Stream<Item = Result<LinkResponse, Status>> + Send>>;

    async fn prime(
        &self,
        request: Request<Streaming<PrimeRequest>>,
    ) -> Result<Response<PrimeResponse>, Status> {
        let mut chunks = request.into_inner();
        let mut bytes = 0;
        while let Some(chunk) = chunks.message().await? {
            bytes += chunk.rows.map_or(0, |rows| rows.data.len());
        }
        Ok(Response::new(PrimeResponse {
            ctx_end: bytes as u32,
        }))
    }

    async fn link(
        &self,
        _request: Request<Streaming<LinkRequest>>,
    ) -> Result<Response<Self::LinkStream>, Status> {
        Ok(Response::new(Box::pin(tokio_stream::pending())))
    }

    async fn get_model_info(
        &self,
        _request: Request<GetModelInfoRequest>,
    ) -> Result<Response<GetModelInfoResponse>, Status> {
        Err(ServiceError::unavailable("loading").into())
    }
}

struct Server {
    channel: Channel,
    readiness: Readiness,
    shutdown: oneshot::Sender<()>,
    task: JoinHandle<Result<(), TransportError>>,
}

async fn start() -> Server {
    let readiness = Readiness::new(&[SERVICE]).await;
    let listener: TcpListener = transport::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .await
        .unwrap();
    let endpoint = transport::endpoint(&listener).unwrap();
    let (shutdown, stop) = oneshot::channel::<()>();
    let task = tokio::spawn(transport::serve(
        listener,
        Routes::new(transport::draft_server(Stub)),
        readiness.clone(),
        async {
            let _ = stop.await;
        },
    ));
    Server {
        channel: channel(&endpoint).unwrap(),
        readiness,
        shutdown,
        task,
    }
}

async fn health(channel: &Channel, service: &str) -> Result<ServingStatus, Code> {
    HealthClient::new(channel.clone())
        .check(HealthCheckRequest {
            service: service.to_owned(),
        })
        .await
        .map(|response| response.into_inner().status())
        .map_err(|status| status.code())
}

#[tokio::test]
async fn health_starts_not_serving_and_follows_the_readiness() {
    let server = start().await;
    for name in ["", "readiness", SERVICE] {
        let status = health(&server.channel, name).await;
        assert_eq!(status, Ok(ServingStatus::NotServing), "{name:?}");
    }
    assert_eq!(
        health(&server.channel, "liveness").await,
        Ok(ServingStatus::Serving)
    );
    assert_eq!(health(&server.channel, "other").await, Err(Code::NotFound));

    server.readiness.set_serving().await;
    for name in ["", "readiness", "liveness", SERVICE] {
        let status = health(&server.channel, name).await;
        assert_eq!(status, Ok(ServingStatus::Serving), "{name:?}");
    }
}

#[tokio::test]
async fn reflection_lists_what_is_mounted_in_both_versions() {
    macro_rules! listed {
        ($version:ident, $channel:expr) => {{
            use tonic_reflection::pb::$version::{
                ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
                server_reflection_request::MessageRequest,
                server_reflection_response::MessageResponse,
            };
            let ask = |request| ServerReflectionRequest {
                host: String::new(),
                message_request: Some(request),
            };
            let requests = tokio_stream::iter([
                ask(MessageRequest::ListServices(String::new())),
                ask(MessageRequest::FileContainingSymbol(SERVICE.to_owned())),
            ]);
            let mut answers = ServerReflectionClient::new($channel)
                .server_reflection_info(requests)
                .await
                .unwrap()
                .into_inner();
            let first = answers.message().await.unwrap().unwrap().message_response;
            let Some(MessageResponse::ListServicesResponse(list)) = first else {
                panic!("{first:?}");
            };
            let second = answers.message().await.unwrap().unwrap().message_response;
            assert!(
                matches!(&second, Some(MessageResponse::FileDescriptorResponse(_))),
                "{second:?}"
            );
            let mut names: Vec<String> = list.service.into_iter().map(|s| s.name).collect();
            names.sort();
            names
        }};
    }
    let server = start().await;
    let expected = |version: &str| {
        vec![
            "grpc.health.v1.Health".to_owned(),
            format!("grpc.reflection.{version}.ServerReflection"),
            SERVICE.to_owned(),
        ]
    };
    assert_eq!(listed!(v1, server.channel.clone()), expected("v1"));
    assert_eq!(
        listed!(v1alpha, server.channel.clone()),
        expected("v1alpha")
    );
}

#[tokio::test]
async fn messages_may_be_32_mib_and_no_larger() {
    let server = start().await;
    let send = async |mut client: DraftServiceClient<Channel>, bytes: usize| {
        let chunk = PrimeRequest {
            rows: Some(FeatureRows {
                data: vec![0; bytes].into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        client
            .prime(tokio_stream::iter([chunk]))
            .await
            .map(|response| response.into_inner().ctx_end as usize)
            .map_err(|status| status.code())
    };
    let ours = || transport::draft_client(server.channel.clone());
    let fits = MAX_MESSAGE_BYTES - 64;
    assert_eq!(send(ours(), fits).await, Ok(fits));
    // Our own client does not even send it.
    assert!(send(ours(), MAX_MESSAGE_BYTES).await.is_err());
    let unlimited = DraftServiceClient::new(server.channel.clone());
    let refused = send(unlimited, MAX_MESSAGE_BYTES).await;
    assert_eq!(refused, Err(Code::OutOfRange));
    assert_eq!(send(ours(), 8).await, Ok(8));
}

#[tokio::test]
async fn a_service_error_arrives_as_it_was_made() {
    let server = start().await;
    let status = transport::draft_client(server.channel)
        .get_model_info(GetModelInfoRequest {})
        .await
        .unwrap_err();
    assert_eq!(
        ServiceError::from_status(&status),
        ServiceError::unavailable("loading")
    );
}

#[tokio::test]
async fn nobody_listening_is_unavailable() {
    let listener = transport::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .await
        .unwrap();
    let endpoint = transport::endpoint(&listener).unwrap();
    drop(listener);
    let status = transport::draft_client(channel(&endpoint).unwrap())
        .get_model_info(GetModelInfoRequest {})
        .await
        .unwrap_err();
    let error = ServiceError::from_status(&status);
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.to_string().contains("refused"), "{error}");
}

#[tokio::test]
async fn the_endpoint_of_a_wildcard_address_is_loopback() {
    let listener = transport::bind(SocketAddr::from(([0, 0, 0, 0], 0)))
        .await
        .unwrap();
    let endpoint = transport::endpoint(&listener).unwrap();
    assert!(endpoint.starts_with("http://127.0.0.1:"), "{endpoint}");
    assert!(channel(&endpoint).is_ok());
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let listener = transport::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    let text = transport::bind(address).await.unwrap_err().to_string();
    assert!(text.contains(&address.to_string()), "{text}");
}

async fn open_link(server: &Server) -> Streaming<LinkResponse> {
    transport::draft_client(server.channel.clone())
        .link(tokio_stream::pending())
        .await
        .unwrap()
        .into_inner()
}

#[tokio::test]
async fn dropping_the_server_breaks_open_streams() {
    let server = start().await;
    let mut link = open_link(&server).await;
    server.task.abort();
    let status = timeout(SOON, link.message()).await.unwrap().unwrap_err();
    assert_eq!(ServiceError::from_status(&status).code(), Code::Unavailable);
}

#[tokio::test]
async fn shutdown_reports_not_serving_and_ends_without_open_streams() {
    let server = start().await;
    server.readiness.set_serving().await;
    let mut watch = HealthClient::new(server.channel.clone())
        .watch(HealthCheckRequest {
            service: SERVICE.to_owned(),
        })
        .await
        .unwrap()
        .into_inner();
    let serving = watch.next().await.unwrap().unwrap();
    assert_eq!(serving.status(), ServingStatus::Serving);
    server.shutdown.send(()).unwrap();
    let stopped = watch.next().await.unwrap().unwrap();
    assert_eq!(stopped.status(), ServingStatus::NotServing);
    drop(watch);
    timeout(SOON, server.task).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn shutdown_closes_streams_that_outlast_the_drain() {
    let server = start().await;
    let mut link = open_link(&server).await;
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    server.shutdown.send(()).unwrap();
    server.task.await.unwrap().unwrap();
    assert!(started.elapsed() >= transport::DRAIN);
    assert!(link.message().await.is_err());
}
