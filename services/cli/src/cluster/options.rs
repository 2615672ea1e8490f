//! How the child processes of a cluster are started.

use std::{collections::HashMap, env, num::NonZeroUsize, path::PathBuf, process::Command};

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use super::Role;
use crate::models::{ModelArgs, ModelPaths};

/// What the user sets to choose the services' log lines; the first one counts.
const LOG_VARIABLES: [&str; 2] = ["TREESPEC_LOG", "RUST_LOG"];

/// The flags of commands that bring up their own cluster.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Own cluster")]
pub(crate) struct ClusterArgs {
    #[command(flatten)]
    pub models: ModelArgs,
    /// Who runs the top-k pass over the vocabulary for the drafter's rows [default: draft]
    #[arg(long, value_enum, value_name = "WHERE", conflicts_with = "no_drafter")]
    pub topk_placement: Option<TopkPlacement>,
}

/// Where the top-k log-prob pass for the drafter's rows runs. Tokens and trees are the same either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopkPlacement {
    /// On the drafter, which sends trees.
    Draft,
    /// On the verifier, which gets hidden rows and builds the tree.
    Verify,
}

impl TopkPlacement {
    fn name(self) -> &'static str {
        match self {
            Self::Draft => "draft",
            Self::Verify => "verify",
        }
    }
}

/// A cluster to start: one verifier, one coordinator and, with a drafter checkpoint, one drafter.
#[derive(Debug, Clone)]
pub(crate) struct ClusterOptions {
    /// The executable that has the services as subcommands.
    pub program: PathBuf,
    /// What the services load. Without a drafter there is no draft service, and decoding is plain.
    pub models: ModelPaths,
    /// Port of the coordinator on loopback, 0 for any free one.
    pub port: u16,
    /// Compute threads of each model service; `None` leaves it to the service.
    pub threads: Option<NonZeroUsize>,
    /// Who runs the top-k pass; `None` leaves it to the verifier.
    pub topk_placement: Option<TopkPlacement>,
    /// The least severe log level of the services that is shown, unless the user's environment says another.
    pub log_level: &'static str,
}

impl ClusterArgs {
    /// This executable as the services, with the models that the flags, the environment or the defaults name.
    ///
    /// # Errors
    /// When a model is missing.
    pub(crate) fn options(&self, port: u16, log_level: &'static str) -> Result<ClusterOptions> {
        Ok(ClusterOptions {
            program: env::current_exe().context("cannot find the path of this executable")?,
            models: self.models.resolve()?,
            port,
            threads: self.models.threads,
            topk_placement: self.topk_placement,
            log_level,
        })
    }
}

impl ClusterOptions {
    /// The command line of `role`. The coordinator's names the model services in `endpoints`.
    pub(super) fn command(&self, role: Role, endpoints: &HashMap<Role, String>) -> Command {
        let mut command = Command::new(&self.program);
        let port = if role == Role::Coordinator {
            self.port
        } else {
            0
        };
        command
            .arg(role.name())
            .args(["--listen", &format!("127.0.0.1:{port}")])
            .args(["--announce", "--exit-with-stdin"])
            .arg("--target")
            .arg(&self.models.target);
        match role {
            Role::Coordinator => {
                for (service, flag) in [(Role::Verify, "--verify"), (Role::Draft, "--draft")] {
                    if let Some(endpoint) = endpoints.get(&service) {
                        command.args([flag, endpoint]);
                    }
                }
            }
            Role::Draft | Role::Verify => self.add_model_flags(role, &mut command),
        }
        if LOG_VARIABLES
            .iter()
            .all(|variable| env::var_os(variable).is_none())
        {
            command.env(LOG_VARIABLES[0], self.log_level);
        }
        command
    }

    fn add_model_flags(&self, role: Role, command: &mut Command) {
        if let Some(drafter) = &self.models.drafter {
            command.arg("--drafter").arg(drafter);
        }
        if let Some(threads) = self.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        match (role, self.topk_placement) {
            (Role::Verify, Some(placement)) => {
                command.args(["--topk-placement", placement.name()]);
            }
            // The head is the largest tensor of a drafter that never uses it.
            (Role::Draft, Some(TopkPlacement::Verify)) => {
                command.arg("--no-head");
            }
            _ => {}
        }
    }
}
