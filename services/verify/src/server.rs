use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpListener;
use tonic::service::Routes;
use treespec_rpc::health::Readiness;
use treespec_rpc::proto::verify::v1::verify_service_server::SERVICE_NAME;
use treespec_rpc::transport;
use treespec_telemetry::{Announcer, Event, shutdown_with_parent};

use crate::engine::Engine;
use crate::service::Verifier;
use crate::{Config, Error, LoadedTarget, load};

/// Time between the loss of the device and the end of the service.
const FAREWELL: Duration = Duration::from_millis(250);

/// A verifier that has its port. Its weights are loaded by [`Server::serve`].
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    config: Config,
}

impl Server {
    /// Checks the configuration and binds the port.
    ///
    /// # Errors
    /// [`Error`] in one line with the flag at fault.
    pub async fn bind(config: Config) -> Result<Self, Error> {
        config.validate()?;
        let listener = transport::bind(config.listen).await?;
        Ok(Self {
            address: transport::local_addr(&listener)?,
            listener,
            config,
        })
    }

    /// The address it listens on, with the real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Loads the weights and serves until `shutdown`. Health is NOT_SERVING until they are loaded.
    ///
    /// # Errors
    /// [`Error`] when the weights cannot be loaded, the device is lost or the server fails.
    pub async fn serve(
        self,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Error> {
        self.serve_with(load, shutdown).await
    }

    /// Serves any model until `shutdown`. `load` is called where blocking is allowed.
    ///
    /// # Errors
    /// What `load` fails with, and as [`Server::serve`].
    pub async fn serve_with(
        self,
        load: impl FnOnce(&Config, &Announcer) -> Result<LoadedTarget, Error> + Send + 'static,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Error> {
        let readiness = Readiness::new(&[SERVICE_NAME]).await;
        let announcer = Announcer::from_flag(self.config.announce);
        announcer.announce(&Event::Listening {
            endpoint: transport::endpoint(&self.listener)?,
        });
        let verifier = Verifier::default();
        let routes = Routes::new(transport::verify_server(verifier.clone()));
        let engine = {
            let (config, readiness) = (self.config, readiness.clone());
            async move {
                let progress = announcer.clone();
                let (engine, ended) = tokio::task::spawn_blocking(move || {
                    let loaded = load(&config, &progress)?;
                    Engine::start(loaded, &config).map_err(Error::Thread)
                })
                .await
                .map_err(|_| Error::EngineStopped)??;
                verifier.loaded(engine);
                readiness.set_serving().await;
                tracing::info!("verify is serving");
                announcer.announce(&Event::Serving);
                let reason = ended.await;
                readiness.set_not_serving().await;
                match reason {
                    Ok(reason) => {
                        // Those who wait for an answer or watch the health shall still hear of it.
                        tokio::time::sleep(FAREWELL).await;
                        Err::<(), Error>(Error::DeviceLost(reason))
                    }
                    Err(_) => Err(Error::EngineStopped),
                }
            }
        };
        let serving = transport::serve(self.listener, routes, readiness, shutdown);
        // A failed load and a lost engine end the service.
        tokio::select! {
            served = serving => Ok(served?),
            failed = engine => failed,
        }
    }
}

/// Starts a verifier and serves until `shutdown`, or until stdin is closed with `--exit-with-stdin`.
///
/// # Errors
/// [`Error`] when it cannot start or the server fails; with `--announce` the parent process is told too.
pub async fn run(
    config: Config,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let announcer = Announcer::from_flag(config.announce);
    let exit_with_stdin = config.exit_with_stdin;
    let shutdown = shutdown_with_parent(shutdown, exit_with_stdin);
    let served = async {
        let server = Server::bind(config).await?;
        tracing::info!(address = %server.local_addr(), "verify is listening");
        server.serve(shutdown).await
    }
    .await;
    announcer.announce_failure(served)
}
