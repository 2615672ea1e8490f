//! A coordinator to talk to: the one that the user names, or the command's own cluster.

use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::{
    cluster::{Cluster, ClusterArgs, Role},
    signals,
};

/// Least severe log level of an own cluster's services: their life is not what the user asked to see.
const OWN_CLUSTER_LOG_LEVEL: &str = "warn";

/// How much later than a broken call the end of the service behind it may be noticed.
const FAILURE_DELAY: Duration = Duration::from_millis(50);

/// Where a command sends its requests.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ConnectionArgs {
    /// Coordinator to use, for example http://127.0.0.1:7070 [default: bring up an own cluster for this call]
    #[arg(
        long,
        value_name = "URL",
        env = "TREESPEC_ENDPOINT",
        conflicts_with_all = [
            "target", "drafter", "no_drafter", "threads", "cpu_precision", "cpu_isa", "device", "topk_placement", "draft_placement", "draft_device",
            "prefill",
        ]
    )]
    pub endpoint: Option<String>,
    /// How to bring up an own cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// The user pressed Ctrl-C or the process got SIGTERM.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted;

impl ConnectionArgs {
    /// Runs `work` with the coordinator's endpoint. An own cluster is stopped afterwards, whatever happens.
    ///
    /// # Errors
    /// What `work` returns, [`Interrupted`], or why the own cluster could not start or go on.
    pub(crate) async fn run<T>(&self, work: impl AsyncFnOnce(&str) -> Result<T>) -> Result<T> {
        let interrupt = signals::shutdown().context("cannot listen for signals")?;
        let interrupted = async {
            interrupt.await;
            anyhow::Error::from(Interrupted)
        };
        match &self.endpoint {
            Some(endpoint) => {
                let endpoint = with_scheme(endpoint);
                tokio::select! {
                    result = work(&endpoint) => result,
                    error = interrupted => Err(error),
                }
            }
            None => self.run_on_own_cluster(work, interrupted).await,
        }
    }

    async fn run_on_own_cluster<T>(
        &self,
        work: impl AsyncFnOnce(&str) -> Result<T>,
        interrupted: impl Future<Output = anyhow::Error>,
    ) -> Result<T> {
        tokio::pin!(interrupted);
        let options = self.cluster.options(0, OWN_CLUSTER_LOG_LEVEL)?;
        let mut cluster = tokio::select! {
            started = Cluster::start(&options) => started?,
            error = &mut interrupted => return Err(error),
        };
        let endpoint = cluster
            .endpoint(Role::Coordinator)
            .context("the coordinator serves but did not say where")?
            .to_owned();
        let outcome = tokio::select! {
            result = work(&endpoint) => match result {
                Ok(value) => Ok(value),
                Err(error) => Err(with_cause(error, &mut cluster).await),
            },
            error = cluster.failure() => Err(error),
            error = &mut interrupted => Err(error),
        };
        cluster.stop().await;
        outcome
    }
}

/// The end of a service says more than the call that broke with it, but may be noticed a moment later.
async fn with_cause(error: anyhow::Error, cluster: &mut Cluster) -> anyhow::Error {
    match tokio::time::timeout(FAILURE_DELAY, cluster.failure()).await {
        Ok(failure) => error.context(failure.to_string()),
        Err(_) => error,
    }
}

/// `host:port` alone means plain HTTP/2.
fn with_scheme(endpoint: &str) -> String {
    if endpoint.contains("://") {
        endpoint.to_owned()
    } else {
        format!("http://{endpoint}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheme_is_added_only_where_none_is() {
        assert_eq!(with_scheme("127.0.0.1:7070"), "http://127.0.0.1:7070");
        assert_eq!(with_scheme("https://host"), "https://host");
    }
}
