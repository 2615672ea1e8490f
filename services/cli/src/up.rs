//! `treespec up`: the three services on this machine until Ctrl-C.

use anyhow::{Context as _, Result};

use crate::{
    cluster::{Cluster, ClusterArgs, Role},
    connection::Interrupted,
    signals, stderr, stdout,
};

/// Flags of `treespec up`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct UpArgs {
    /// Port of the coordinator on 127.0.0.1, 0 for any free one
    #[arg(
        long,
        env = "TREESPEC_PORT",
        default_value_t = 7070,
        value_name = "PORT"
    )]
    pub port: u16,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Runs `treespec up` until Ctrl-C or SIGTERM, which is its normal end.
///
/// # Errors
/// When a service can't start, or ends by itself.
pub(crate) async fn run(args: UpArgs) -> Result<()> {
    let interrupt = signals::shutdown().context("cannot listen for signals")?;
    tokio::pin!(interrupt);
    let options = args.cluster.options(args.port, "info")?;
    let mut cluster = tokio::select! {
        started = Cluster::start(&options) => started?,
        () = &mut interrupt => return Err(Interrupted.into()),
    };
    print_endpoints(&cluster)?;

    let outcome = tokio::select! {
        error = cluster.failure() => Err(error),
        () = &mut interrupt => Ok(()),
    };
    stderr::print_line("stopping");
    cluster.stop().await;
    outcome
}

fn print_endpoints(cluster: &Cluster) -> Result<()> {
    let mut text = String::new();
    for role in [Role::Coordinator, Role::Verify, Role::Draft] {
        if let Some(endpoint) = cluster.endpoint(role) {
            text.push_str(&format!("{role:<11} {endpoint}\n"));
        }
    }
    if let Some(endpoint) = cluster.endpoint(Role::Coordinator) {
        text.push_str(&format!(
            "\ntry: treespec generate --endpoint {endpoint} --prompt \"Why is the sky blue?\"\n"
        ));
    }
    stdout::print(&text)
}
