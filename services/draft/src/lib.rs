//! The draft service: keeps a context of target features per sequence and answers with token trees.
//!
//! One thread owns the drafter ([`treespec_engine::Drafter`]) and all bookkeeping; the gRPC side only checks messages
//! and passes them on. Losing this service costs a verifier speed, never correctness.

mod config;
mod engine_thread;
mod error;
mod link;
mod loading;
mod proposal;
#[cfg(test)]
#[path = "../tests/draft_service/scripted.rs"]
mod scripted;
mod service;
mod sessions;

use std::time::Duration;

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use treespec_rpc::{
    health::Readiness, proto::draft::v1::draft_service_server::SERVICE_NAME, transport,
};
use treespec_telemetry::{Announcer, Event, shutdown_with_parent};

pub use config::Config;
pub use error::Error;
pub use loading::{LoadedDrafter, load, load_drafter};

use crate::{engine_thread::EngineThread, service::DraftServer};

/// Time between the loss of the device and the end of the service.
const FAREWELL: Duration = Duration::from_millis(250);

/// Runs the service until `shutdown`, or until its parent is gone when the configuration says so.
///
/// # Errors
/// A setting, the port, or the checkpoints; with `--announce` the parent is told, too.
pub async fn run(
    config: Config,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let announcer = Announcer::from_flag(config.announce);
    let outcome = run_announced(config, announcer.clone(), shutdown).await;
    announcer.announce_failure(outcome)
}

async fn run_announced(
    config: Config,
    announcer: Announcer,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    config.validate()?;
    let listener = transport::bind(config.listen).await?;
    let exit_with_stdin = config.exit_with_stdin;
    let max_sequences = config.max_sequences;
    let load = {
        let announcer = announcer.clone();
        move || load(&config, &announcer)
    };
    let shutdown = shutdown_with_parent(shutdown, exit_with_stdin);
    run_with(load, max_sequences, listener, announcer, shutdown).await
}

/// Runs the service on a bound listener with any drafter. `load` is called on the engine thread; until it returns,
/// health is NOT_SERVING and every call is answered UNAVAILABLE.
///
/// # Errors
/// What `load` fails with, [`Error::Transport`], [`Error::DeviceLost`], and [`Error::EngineStopped`] when the drafter
/// panics.
pub async fn run_with(
    load: impl FnOnce() -> Result<LoadedDrafter, Error> + Send + 'static,
    max_sequences: usize,
    listener: TcpListener,
    announcer: Announcer,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let readiness = Readiness::new(&[SERVICE_NAME]).await;
    let endpoint = transport::endpoint(&listener)?;
    let EngineThread {
        handle,
        loaded,
        ended,
    } = engine_thread::spawn(load, max_sequences)?;
    let stopping = CancellationToken::new();
    let service = DraftServer::new(handle, stopping.clone());
    tracing::info!(%endpoint, "draft service is listening");
    announcer.announce(&Event::Listening { endpoint });

    let server = transport::serve(
        listener,
        Routes::new(transport::draft_server(service.clone())),
        readiness.clone(),
        {
            let stopping = stopping.clone();
            async move {
                shutdown.await;
                stopping.cancel();
            }
        },
    );
    let engine = async {
        match loaded.await {
            Ok(Ok(loaded)) => service.set_loaded(loaded),
            Ok(Err(error)) => return error,
            Err(_) => return Error::EngineStopped,
        }
        if !stopping.is_cancelled() {
            readiness.set_serving().await;
            tracing::info!("draft service is serving");
            announcer.announce(&Event::Serving);
        }
        let reason = ended.await;
        readiness.set_not_serving().await;
        match reason {
            Ok(reason) => {
                // Those who wait for an answer or watch the health shall still hear of it.
                tokio::time::sleep(FAREWELL).await;
                Error::DeviceLost(reason)
            }
            Err(_) => Error::EngineStopped,
        }
    };
    tokio::select! {
        served = server => Ok(served?),
        error = engine => Err(error),
    }
}
