//! Nothing is SERVING before its weights are loaded.

use std::future::pending;
use std::sync::{Arc, Mutex, mpsc};

use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use treespec_rpc::proto::{coordinator, draft, verify};
use treespec_rpc::transport;
use treespec_telemetry::Announcer;
use treespec_testkit::{Ask, Client, Launched, Mode, Service};

use crate::models::{FIT, LLAMA, cluster};

const VERIFY: &str = verify::v1::verify_service_server::SERVICE_NAME;
const DRAFT: &str = draft::v1::draft_service_server::SERVICE_NAME;
const COORDINATOR: &str = coordinator::v1::coordinator_service_server::SERVICE_NAME;

async fn assert_health(service: &Service, name: &str, wanted: ServingStatus) {
    for name in ["", "readiness", name] {
        assert_eq!(service.health(name).await.unwrap(), wanted, "{name:?}");
    }
    let alive = service.health("liveness").await.unwrap();
    assert_eq!(alive, ServingStatus::Serving);
    let unknown = service.health("no.such.Service").await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

/// A runtime whose only thread for blocking work, where verify loads, is busy until the sender is used or dropped.
fn runtime_that_cannot_load() -> (tokio::runtime::Runtime, mpsc::Sender<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    let (release, busy) = mpsc::channel::<()>();
    runtime.spawn_blocking(move || {
        let _ = busy.recv();
    });
    (runtime, release)
}

#[test]
fn verify_and_coordinator_do_not_serve_before_the_weights_are_loaded() {
    let (runtime, release) = runtime_that_cannot_load();
    runtime.block_on(async {
        let builder = cluster(LLAMA, FIT);
        let mut verifier = Service::verifier(builder.verify_config()).await;
        let config = builder.coordinator_config(vec![verifier.endpoint()], Vec::new());
        let mut coordinator = Service::coordinator(config).await;
        assert_health(&verifier, VERIFY, ServingStatus::NotServing).await;
        assert_health(&coordinator, COORDINATOR, ServingStatus::NotServing).await;

        let request = verify::v1::GenerateRequest {
            token_ids: vec![40],
            ..Default::default()
        };
        let mut verify = transport::verify_client(verifier.channel());
        let status = verify.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        assert!(status.message().contains("loading"), "{status:?}");
        let ask = || Ask::tokens(&[40]).mode(Mode::Ar).max_tokens(4);
        let client = Client::new(coordinator.channel());
        let status = client.generate(ask()).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status:?}");
        // Still: neither call made anybody believe that the weights are there.
        assert_health(&verifier, VERIFY, ServingStatus::NotServing).await;
        assert_health(&coordinator, COORDINATOR, ServingStatus::NotServing).await;

        release.send(()).unwrap();
        verifier.wait_until_serving().await;
        coordinator.wait_until_serving().await;
        assert_health(&verifier, VERIFY, ServingStatus::Serving).await;
        assert_health(&coordinator, COORDINATOR, ServingStatus::Serving).await;
        assert_eq!(client.generate(ask()).await.unwrap().token_ids.len(), 4);
    });
}

#[tokio::test]
async fn draft_does_not_serve_before_the_weights_are_loaded() {
    let config = cluster(LLAMA, FIT).draft_config().unwrap();
    let (release, held) = mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(Some(held)));
    let mut drafter = Service::launch(move |listen| {
        let (config, held) = (config.clone(), held.lock().unwrap().take());
        async move {
            let listener = transport::bind(listen).await.map_err(|e| e.to_string())?;
            let load = move || {
                if let Some(held) = held {
                    let _ = held.recv();
                }
                treespec_draft::load(&config, &Announcer::silent())
            };
            let address = listener.local_addr().map_err(|e| e.to_string())?;
            let serving =
                treespec_draft::run_with(load, 8, listener, Announcer::silent(), pending());
            Ok(Launched {
                address,
                serving: Box::pin(async { serving.await.map_err(|e| e.to_string()) }),
            })
        }
    })
    .await;
    assert_health(&drafter, DRAFT, ServingStatus::NotServing).await;
    let mut client = transport::draft_client(drafter.channel());
    let question = draft::v1::GetModelInfoRequest {};
    let status = client.get_model_info(question).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert_health(&drafter, DRAFT, ServingStatus::NotServing).await;

    release.send(()).unwrap();
    drafter.wait_until_serving().await;
    assert_health(&drafter, DRAFT, ServingStatus::Serving).await;
    client.get_model_info(question).await.unwrap();
}
