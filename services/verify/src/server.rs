use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tonic::service::Routes;
use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint, TextTokenizer};
use treespec_engine::{Backend, CpuTarget, TargetOptions};
use treespec_rpc::handshake::Fingerprint;
use treespec_rpc::health::Readiness;
use treespec_rpc::proto::verify::v1 as pb;
use treespec_rpc::proto::verify::v1::verify_service_server::SERVICE_NAME;
use treespec_rpc::transport::{self, TransportError};
use treespec_telemetry::{Announcer, Event, LoadReporter, shutdown_with_parent};

use crate::drafting::{DrafterIdentity, Links};
use crate::engine::Engine;
use crate::forward::ForwardQueue;
use crate::kv_reservation::KvAdmission;
use crate::service::Verifier;
use crate::{Config, Error};

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
        let address = listener
            .local_addr()
            .map_err(|source| TransportError::Bind {
                address: config.listen,
                source,
            })?;
        Ok(Self {
            listener,
            address,
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
    /// [`Error`] when the weights cannot be loaded or the server fails.
    pub async fn serve(
        self,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Error> {
        let readiness = Readiness::new(&[SERVICE_NAME]).await;
        let announcer = Announcer::from_flag(self.config.announce);
        announcer.announce(&Event::Listening {
            endpoint: format!("http://{}", self.address),
        });
        let verifier = Verifier::default();
        let routes = Routes::new(transport::verify_server(verifier.clone()));
        let engine = {
            let (config, readiness) = (self.config, readiness.clone());
            async move {
                let progress = announcer.clone();
                let (engine, ended) = tokio::task::spawn_blocking(move || load(&config, progress))
                    .await
                    .map_err(|_| Error::EngineStopped)??;
                verifier.loaded(engine);
                readiness.set_serving().await;
                tracing::info!("verify is serving");
                announcer.announce(&Event::Serving);
                // The sender is never used: an error is the end of the thread.
                let _ = ended.await;
                Err::<(), Error>(Error::EngineStopped)
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

/// Loads the target. The receiver resolves when the engine's thread ends, which it does only by a panic.
fn load(config: &Config, announcer: Announcer) -> Result<(Engine, oneshot::Receiver<()>), Error> {
    let target = TargetCheckpoint::open(&config.target).map_err(Error::Target)?;
    let tokenizer = TextTokenizer::open(&config.target).map_err(Error::Target)?;
    let drafter = config
        .drafter
        .as_deref()
        .map(DrafterCheckpoint::open)
        .transpose()
        .map_err(Error::Drafter)?;
    if let Some(drafter) = &drafter {
        drafter
            .check_target(&target.config)
            .map_err(Error::Drafter)?;
    }
    let mut reporter = LoadReporter::new(announcer, "target");
    let options = TargetOptions {
        threads: config.threads,
        kv_tokens: config.kv_tokens,
        isa: None,
    };
    let backend = CpuTarget::load(&target, drafter.as_ref(), &options, &mut |progress| {
        reporter.update(progress.done_bytes, progress.total_bytes);
    })?;
    let instance_id = format!("{:016x}", rand::random::<u64>());
    let spec = backend.spec().clone();
    let links = drafter
        .as_ref()
        .map(|drafter| {
            Ok::<_, Error>(Links::new(DrafterIdentity {
                verifier_instance: instance_id.clone(),
                fingerprint: Fingerprint::of(drafter, &target, &tokenizer)
                    .map_err(Error::Drafter)?,
            }))
        })
        .transpose()?;
    let (queue, ended) = ForwardQueue::start(Box::new(backend)).map_err(Error::Thread)?;
    let engine = Engine {
        queue,
        kv: KvAdmission::new(spec.num_blocks, config.max_waiting),
        links,
        vocab_size: spec.vocab_size,
        context_length: spec.context_length,
        prefill_chunk: config.prefill_chunk,
        default_budget: config.default_budget,
        topk_placement: config.topk_placement,
        feature_window: config.feature_window,
        info: pb::GetModelInfoResponse {
            architecture: spec.architecture.to_owned(),
            vocab_size: spec.vocab_size as u32,
            hidden_size: spec.hidden_size as u32,
            num_layers: spec.num_layers as u32,
            context_length: spec.context_length as u32,
            eos_token_ids: target.config.eos_token_ids.clone(),
            tokenizer_hash: tokenizer.fingerprint().to_owned(),
            numerics_profile: spec.numerics_profile.clone(),
            instance_id,
            max_budget: config.max_budget as u32,
            block_size: drafter.as_ref().map_or(0, |d| d.config.block_size as u32),
            default_budget: config.default_budget as u32,
        },
    };
    Ok((engine, ended))
}
