//! The three services as [`Service`]s, each from its own configuration.

use std::future::pending;

use treespec_rpc::transport;
use treespec_telemetry::Announcer;
use treespec_verify::LoadedTarget;

use crate::Service;
use crate::service::{Launched, line};

impl Service {
    /// A verifier; its weights are loading when this returns.
    ///
    /// # Panics
    /// When the configuration is wrong or the port cannot be had.
    pub async fn verifier(config: treespec_verify::Config) -> Self {
        Self::verifier_with(config, treespec_verify::load).await
    }

    /// A verifier of any model.
    ///
    /// # Panics
    /// As [`Service::verifier`].
    pub async fn verifier_with<L>(config: treespec_verify::Config, load: L) -> Self
    where
        L: Fn(&treespec_verify::Config, &Announcer) -> Result<LoadedTarget, treespec_verify::Error>,
        L: Clone + Send + 'static,
    {
        Self::launch(move |listen| {
            let load = load.clone();
            let config = treespec_verify::Config {
                listen,
                ..config.clone()
            };
            async move {
                let server = treespec_verify::Server::bind(config).await.map_err(line)?;
                Ok(Launched {
                    address: server.local_addr(),
                    serving: Box::pin(async {
                        server.serve_with(load, pending()).await.map_err(line)
                    }),
                })
            }
        })
        .await
    }

    /// A drafter; its weights are loading when this returns.
    ///
    /// # Panics
    /// As [`Service::verifier`].
    pub async fn drafter(config: treespec_draft::Config) -> Self {
        Self::launch(move |listen| {
            let config = config.clone();
            async move {
                config.validate().map_err(line)?;
                let listener = transport::bind(listen).await.map_err(line)?;
                let address = listener.local_addr().map_err(line)?;
                let max_sequences = config.max_sequences;
                let load = move || treespec_draft::load(&config, &Announcer::silent());
                let serving = treespec_draft::run_with(
                    load,
                    max_sequences,
                    listener,
                    Announcer::silent(),
                    pending(),
                );
                Ok(Launched {
                    address,
                    serving: Box::pin(async { serving.await.map_err(line) }),
                })
            }
        })
        .await
    }

    /// A coordinator; it serves as soon as one of its verifiers does.
    ///
    /// # Panics
    /// As [`Service::verifier`].
    pub async fn coordinator(config: treespec_coordinator::Config) -> Self {
        Self::launch(move |listen| {
            let config = treespec_coordinator::Config {
                listen,
                ..config.clone()
            };
            async move {
                let server = treespec_coordinator::Server::bind(&config)
                    .await
                    .map_err(line)?;
                Ok(Launched {
                    address: server.local_addr(),
                    serving: Box::pin(async { server.serve(pending()).await.map_err(line) }),
                })
            }
        })
        .await
    }
}
