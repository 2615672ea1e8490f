use std::{
    sync::{Arc, atomic::Ordering, mpsc},
    time::Duration,
};

use tokio::time::timeout;
use tonic::Code;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use treespec_draft::{Error, LoadedDrafter};
use treespec_rpc::transport;

use crate::{
    scripted::{Probe, ScriptedDrafter},
    verifier::{SOON, Service, Verifier, features, fingerprint, propose},
};

async fn health(service: &Service, name: &str) -> ServingStatus {
    HealthClient::new(service.channel.clone())
        .check(HealthCheckRequest {
            service: name.to_owned(),
        })
        .await
        .unwrap()
        .into_inner()
        .status()
}

const NAMES: [&str; 3] = ["", "readiness", "treespec.draft.v1.DraftService"];

#[tokio::test]
async fn nothing_is_served_before_the_weights_are_loaded() {
    let probe = Arc::new(Probe::default());
    let drafter = ScriptedDrafter::new(&probe, true);
    let (release, loading) = mpsc::channel::<()>();
    let load = move || {
        loading.recv().unwrap();
        Ok(LoadedDrafter {
            drafter: Box::new(drafter),
            fingerprint: fingerprint(),
        })
    };
    let service = Service::loading(probe, load).await;
    for name in NAMES {
        assert_eq!(
            health(&service, name).await,
            ServingStatus::NotServing,
            "{name:?}"
        );
    }
    assert_eq!(health(&service, "liveness").await, ServingStatus::Serving);
    let info = service.model_info().await.unwrap_err();
    let prime = service.prime("v", 1, 0, &[(0, features(0, 1))]).await;
    let link = transport::draft_client(service.channel.clone())
        .link(tokio_stream::pending())
        .await
        .unwrap_err();
    assert_eq!(info.code(), Code::Unavailable);
    assert!(info.to_string().contains("loading"), "{info}");
    assert_eq!(prime.unwrap_err().code(), Code::Unavailable);
    assert_eq!(link.code(), Code::Unavailable);

    release.send(()).unwrap();
    timeout(SOON, async {
        while health(&service, "").await != ServingStatus::Serving {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    assert!(service.model_info().await.is_ok());
    for name in NAMES {
        assert_eq!(
            health(&service, name).await,
            ServingStatus::Serving,
            "{name:?}"
        );
    }
}

#[tokio::test]
async fn a_failed_load_ends_the_service_with_its_reason() {
    let load = || {
        Err(Error::Config {
            setting: "drafter",
            problem: "is broken".to_owned(),
        })
    };
    let mut service = Service::loading(Arc::default(), load).await;
    let ended = timeout(SOON, &mut service.task).await.unwrap().unwrap();
    assert_eq!(ended.unwrap_err().to_string(), "--drafter is broken");
}

#[tokio::test]
async fn a_panicking_load_ends_the_service() {
    let mut service = Service::loading(Arc::default(), || panic!("expected by this test")).await;
    let ended = timeout(SOON, &mut service.task).await.unwrap().unwrap();
    assert!(matches!(ended, Err(Error::EngineStopped)));
}

#[tokio::test]
async fn a_dropped_link_frees_its_contexts_and_no_others() {
    let service = Service::start().await;
    let mut lost = Verifier::connect(&service, "lost").await;
    let mut kept = Verifier::connect(&service, "kept").await;
    for sequence in 0..5 {
        lost.open(sequence, 0).await;
        kept.open(sequence, 0).await;
    }
    service.wait_open_contexts(10).await;
    drop(lost);
    service.wait_open_contexts(5).await;
    kept.assert_alive(0, 0, 0).await;
}

#[tokio::test]
async fn a_second_link_of_a_verifier_replaces_the_first() {
    let service = Service::start().await;
    let mut first = Verifier::connect(&service, "v").await;
    first.open(1, 0).await;
    let mut second = Verifier::connect(&service, "v").await;
    let error = first.receive().await.unwrap_err();
    assert_eq!(error.code(), Code::Aborted);
    assert!(error.to_string().contains("replaced"), "{error}");
    service.wait_open_contexts(0).await;
    second.open(1, 0).await;
    drop(first);
    second.assert_alive(1, 0, 0).await;
    service.wait_open_contexts(1).await;
}

#[tokio::test]
async fn shutdown_ends_links_at_once() {
    let mut service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    verifier.open(1, 0).await;
    service.shutdown.take().unwrap().send(()).unwrap();
    let error = verifier.receive().await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.to_string().contains("shutting down"), "{error}");
    drop(verifier);
    let ended = timeout(Duration::from_secs(5), &mut service.task).await;
    ended.unwrap().unwrap().unwrap();
    service.wait_open_contexts(0).await;
}

#[tokio::test]
async fn shutdown_during_the_load_does_not_wait_for_it() {
    let (_never, loading) = mpsc::channel::<()>();
    let load = move || {
        let _ = loading.recv_timeout(SOON);
        Err(Error::EngineStopped)
    };
    let mut service = Service::loading(Arc::default(), load).await;
    service.shutdown.take().unwrap().send(()).unwrap();
    let ended = timeout(Duration::from_secs(5), &mut service.task).await;
    assert!(ended.unwrap().unwrap().is_ok());
}

#[tokio::test]
async fn a_killed_service_breaks_its_links() {
    let service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    verifier.open(1, 0).await;
    let probe = service.probe.clone();
    drop(service);
    let error = verifier.receive().await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    timeout(SOON, async {
        // The engine thread ends with the last handle, and the drafter with it.
        while Arc::strong_count(&probe) > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_lost_device_ends_the_service_with_its_reason() {
    let mut service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    verifier.open(1, 0).await;
    verifier.context(1, 0, 0, 4).await;
    service.probe.lost.store(true, Ordering::SeqCst);
    verifier.send_propose(propose(1, 0, 4)).await;
    let failure = verifier.failure().await;
    assert_eq!(Code::from_i32(failure.code), Code::Unavailable);
    assert!(failure.message.contains("Xid 79"), "{failure:?}");
    // Whoever probes before the process ends is told not to come here.
    let probe = async {
        let mut client = HealthClient::new(service.channel.clone());
        while let Ok(health) = client.check(HealthCheckRequest::default()).await {
            if health.into_inner().status() == ServingStatus::NotServing {
                return true;
            }
        }
        false
    };
    assert!(timeout(SOON, probe).await.unwrap());
    let ended = timeout(Duration::from_secs(5), &mut service.task).await;
    let error = ended.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, Error::DeviceLost(_)), "{error}");
    let text = error.to_string();
    assert!(text.contains("device is lost: Xid 79"), "{text}");
}
