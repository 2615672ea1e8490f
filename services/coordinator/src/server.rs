use std::{net::SocketAddr, path::Path, sync::Arc};

use tokio::{net::TcpListener, task::JoinSet};
use tonic::service::Routes;
use treespec_rpc::{
    health::Readiness, proto::coordinator::v1::coordinator_service_server::SERVICE_NAME, transport,
};
use treespec_telemetry::{Announcer, Event, shutdown_with_parent};

use crate::{
    Config, Error, admission::Admission, drafters::Drafters, in_flight::InFlight,
    replicas::Replicas, service::Coordinator, text::TextCodec,
};

/// A coordinator that has its port and its tokenizer.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    coordinator: Coordinator,
    announcer: Announcer,
}

impl Server {
    /// Reads the tokenizer, starts to follow the verify replicas and binds the port, in this order.
    ///
    /// # Errors
    /// [`Error`] in one line with the flag at fault.
    pub async fn bind(config: &Config) -> Result<Self, Error> {
        config.validate()?;
        let text = TextCodec::open(&config.target)?;
        for endpoint in &config.draft {
            transport::channel(endpoint).map_err(|source| Error::Endpoint {
                flag: "--draft",
                source,
            })?;
        }
        let replicas = Replicas::follow(&config.verify, text.fingerprint(), config.failover_wait())
            .map_err(|source| Error::Endpoint {
                flag: "--verify",
                source,
            })?;
        let listener = transport::bind(config.listen).await?;
        Ok(Self {
            address: transport::local_addr(&listener)?,
            listener,
            coordinator: Coordinator {
                model_name: model_name(&config.target),
                text: Arc::new(text),
                replicas,
                drafters: Arc::new(Drafters::new(config.draft.clone())),
                admission: Admission::new(config.max_in_flight, config.max_waiting),
                in_flight: InFlight::default(),
            },
            announcer: Announcer::from_flag(config.announce),
        })
    }

    /// The address it listens on, with the real port.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`. Health is SERVING as long as a verify replica serves.
    ///
    /// # Errors
    /// [`Error::Transport`] when the server fails.
    pub async fn serve(
        self,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Error> {
        let readiness = Readiness::new(&[SERVICE_NAME]).await;
        self.announcer.announce(&Event::Listening {
            endpoint: transport::endpoint(&self.listener)?,
        });
        let mut follower = JoinSet::new();
        follower.spawn(follow_readiness(
            Arc::clone(&self.coordinator.replicas),
            readiness.clone(),
            self.announcer,
        ));
        let shutdown = async move {
            shutdown.await;
            // Nobody may report SERVING again while the server drains.
            follower.shutdown().await;
        };
        let routes = Routes::new(transport::coordinator_server(self.coordinator));
        Ok(transport::serve(self.listener, routes, readiness, shutdown).await?)
    }
}

/// Starts a coordinator and serves until `shutdown`, or until stdin is closed with `--exit-with-stdin`.
///
/// # Errors
/// [`Error`] when it cannot start or the server fails; with `--announce` the parent process is told too.
pub async fn run(
    config: Config,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let exit_with_stdin = config.exit_with_stdin;
    let shutdown = shutdown_with_parent(shutdown, exit_with_stdin);
    let served = async {
        let server = Server::bind(&config).await?;
        tracing::info!(address = %server.local_addr(), "coordinator is listening");
        server.serve(shutdown).await
    }
    .await;
    Announcer::from_flag(config.announce).announce_failure(served)
}

/// Reports SERVING while at least one replica serves.
async fn follow_readiness(replicas: Arc<Replicas>, readiness: Readiness, announcer: Announcer) {
    let mut changes = replicas.changes();
    let mut was_serving = false;
    let mut announced = false;
    loop {
        let serving = replicas.model().is_ok();
        if serving && !was_serving {
            readiness.set_serving().await;
            tracing::info!("coordinator is serving");
        } else if was_serving && !serving {
            readiness.set_not_serving().await;
            tracing::warn!("no verify replica serves, coordinator is not serving");
        }
        was_serving = serving;
        if serving && !announced {
            announced = true;
            announcer.announce(&Event::Serving);
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Name of the model for display: its directory, or its file without the extension.
fn model_name(target: &Path) -> String {
    let name = if target.is_dir() {
        target.file_name()
    } else {
        target.file_stem()
    };
    name.unwrap_or(target.as_os_str())
        .to_string_lossy()
        .into_owned()
}
