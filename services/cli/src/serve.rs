//! `treespec coordinator`, `treespec draft` and `treespec verify`: one service in this process.

use anyhow::{Context as _, Result};
use clap::Args;
use tracing::level_filters::LevelFilter;
use treespec_telemetry::{LogFormat, LogGuard};

use crate::signals;

/// Flags of a service: its own, and how it logs.
#[derive(Debug, Clone, Args)]
pub(crate) struct ServiceArgs<Config: Args> {
    #[command(flatten)]
    config: Config,
    /// How log lines on stderr look: pretty or json; TREESPEC_LOG chooses which lines
    #[arg(long, env = "TREESPEC_LOG_FORMAT", default_value_t = LogFormat::Pretty, value_name = "FORMAT")]
    log_format: LogFormat,
}

impl<Config: Args> ServiceArgs<Config> {
    /// Starts logging and hands out what the service needs: its settings and what ends it (Ctrl-C or SIGTERM; with
    /// `--exit-with-stdin` the service itself also ends with its stdin).
    fn prepare(self) -> Result<(Config, impl Future<Output = ()> + Send + 'static, LogGuard)> {
        let logs = treespec_telemetry::init(self.log_format, LevelFilter::INFO)?;
        let shutdown = signals::shutdown().context("cannot listen for signals")?;
        Ok((self.config, shutdown, logs))
    }
}

/// Runs the coordinator.
///
/// # Errors
/// A bad configuration, a port in use, or a failure to load.
pub(crate) async fn coordinator(args: ServiceArgs<treespec_coordinator::Config>) -> Result<()> {
    let (config, shutdown, _logs) = args.prepare()?;
    Ok(treespec_coordinator::run(config, shutdown).await?)
}

/// Runs the drafter.
///
/// # Errors
/// See [`coordinator`].
pub(crate) async fn draft(args: ServiceArgs<treespec_draft::Config>) -> Result<()> {
    let (config, shutdown, _logs) = args.prepare()?;
    Ok(treespec_draft::run(config, shutdown).await?)
}

/// Runs the verifier.
///
/// # Errors
/// See [`coordinator`].
pub(crate) async fn verify(args: ServiceArgs<treespec_verify::Config>) -> Result<()> {
    let (config, shutdown, _logs) = args.prepare()?;
    Ok(treespec_verify::run(config, shutdown).await?)
}
