//! Server reflection, v1 and v1alpha, on every service.

use treespec_testkit::Service;

use crate::models::{FIT, LLAMA, cluster};

/// Lists the services over one version of the protocol.
macro_rules! listed {
    ($version:ident, $service:expr) => {{
        use tonic_reflection::pb::$version::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
        };
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let mut answers = ServerReflectionClient::new($service.channel())
            .server_reflection_info(tokio_stream::iter([request]))
            .await
            .unwrap()
            .into_inner();
        match answers.message().await.unwrap().unwrap().message_response {
            Some(MessageResponse::ListServicesResponse(list)) => {
                list.service.into_iter().map(|s| s.name).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        }
    }};
}

async fn check(service: &Service, name: &str) {
    for (version, listed) in [
        ("v1", listed!(v1, service)),
        ("v1alpha", listed!(v1alpha, service)),
    ] {
        for wanted in [name, "grpc.health.v1.Health"] {
            let found = listed.iter().any(|listed| listed == wanted);
            assert!(found, "{version}: {listed:?} lacks {wanted}");
        }
    }
}

#[tokio::test]
async fn every_service_lists_itself_and_its_health() {
    let cluster = cluster(LLAMA, FIT).start().await;
    check(
        &cluster.coordinator,
        "treespec.coordinator.v1.CoordinatorService",
    )
    .await;
    check(&cluster.verifiers[0], "treespec.verify.v1.VerifyService").await;
    check(&cluster.drafters[0], "treespec.draft.v1.DraftService").await;
}
