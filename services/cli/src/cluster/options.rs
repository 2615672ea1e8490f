//! How the child processes of a cluster are started.

use std::{collections::HashMap, env, num::NonZeroUsize, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::ValueEnum;
use treespec_engine::{DeviceChoice, Isa, Precision, PrefillMode};
use treespec_verify::DraftPlacement;

use super::Role;
use crate::models::{ISA_VARIABLE, ModelArgs, ModelPaths, PRECISION_VARIABLE};

/// What the user sets to choose the services' log lines; the first one counts.
const LOG_VARIABLES: [&str; 2] = ["TREESPEC_LOG", "RUST_LOG"];

/// The verifier's variable, which decides about the draft service as well.
const PLACEMENT_VARIABLE: &str = "TREESPEC_VERIFY_DRAFT_PLACEMENT";

/// The flags of commands that bring up their own cluster.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Own cluster")]
pub(crate) struct ClusterArgs {
    #[command(flatten)]
    pub models: ModelArgs,
    /// Who runs the top-k pass over the vocabulary for the drafter's rows [default: draft]
    #[arg(long, value_enum, value_name = "WHERE", conflicts_with = "no_drafter")]
    pub topk_placement: Option<TopkPlacement>,
    /// Where the drafter runs: in a service of its own (remote) or in the verifier (local) [env:
    /// TREESPEC_VERIFY_DRAFT_PLACEMENT] [default: remote]
    #[arg(long, value_enum, value_name = "WHERE", conflicts_with = "no_drafter")]
    pub draft_placement: Option<DraftPlacement>,
    /// Where the drafter's service runs, like --device [default: the device of the target]
    #[arg(long, value_name = "DEVICE", conflicts_with = "no_drafter")]
    pub draft_device: Option<DeviceChoice>,
    /// How prompts are computed: exact, or fast on a GPU, whose bits depend on the chunk [env: TREESPEC_VERIFY_PREFILL]
    /// [default: exact]
    #[arg(long, value_name = "MODE")]
    pub prefill: Option<PrefillMode>,
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
    /// Arithmetic of the model services on a CPU; `None` leaves it to the service, here and below.
    pub cpu_precision: Option<Precision>,
    /// Instruction set of their CPU kernels.
    pub cpu_isa: Option<Isa>,
    /// Who runs the top-k pass; `None` leaves it to the verifier.
    pub topk_placement: Option<TopkPlacement>,
    /// Where the drafter runs. Local means that there is no draft service.
    pub draft_placement: DraftPlacement,
    /// Where the verifier's models run; `None` leaves it to the service, here and below.
    pub device: Option<DeviceChoice>,
    /// Where the draft service's model runs.
    pub draft_device: Option<DeviceChoice>,
    /// How the verifier computes prompts; `None` leaves it to the service.
    pub prefill: Option<PrefillMode>,
    /// The least severe log level of the services that is shown, unless the user's environment says another.
    pub log_level: &'static str,
}

impl ClusterArgs {
    /// This executable as the services, with the models that the flags, the environment or the defaults name.
    ///
    /// # Errors
    /// When a model is missing, or flags contradict each other.
    pub(crate) fn options(&self, port: u16, log_level: &'static str) -> Result<ClusterOptions> {
        let models = self.models.resolve()?;
        let cpu = self.models.cpu()?;
        let draft_placement = self.draft_placement(&models)?;
        let device = self.models.device;
        if draft_placement == DraftPlacement::Local {
            ensure!(
                self.topk_placement.is_none(),
                "--topk-placement is for a drafter in a service of its own: leave it out with --draft-placement local"
            );
            ensure!(
                self.draft_device.is_none() || self.draft_device == device,
                "--draft-device is for a drafter in a service of its own: with --draft-placement local it runs on --device"
            );
        }
        Ok(ClusterOptions {
            program: env::current_exe().context("cannot find the path of this executable")?,
            models,
            draft_placement,
            device,
            draft_device: self.draft_device.or(device),
            prefill: self.prefill,
            port,
            threads: self.models.threads,
            cpu_precision: cpu.precision,
            cpu_isa: cpu.isa,
            topk_placement: self.topk_placement,
            log_level,
        })
    }

    /// The flag before the verifier's own environment variable, so that cluster and verifier agree.
    fn draft_placement(&self, models: &ModelPaths) -> Result<DraftPlacement> {
        let Some(_) = models.drafter else {
            ensure!(
                self.draft_placement != Some(DraftPlacement::Local),
                "--draft-placement local needs a drafter: give --drafter PATH"
            );
            return Ok(DraftPlacement::Remote);
        };
        if let Some(placement) = self.draft_placement {
            return Ok(placement);
        }
        match env::var(PLACEMENT_VARIABLE) {
            Ok(value) if !value.is_empty() => DraftPlacement::from_str(&value, false)
                .map_err(|_| anyhow!("{PLACEMENT_VARIABLE} is {value:?}: use remote or local")),
            _ => Ok(DraftPlacement::default()),
        }
    }
}

impl ClusterOptions {
    /// The services that load models.
    pub(super) fn model_services(&self) -> &'static [Role] {
        match (&self.models.drafter, self.draft_placement) {
            (Some(_), DraftPlacement::Remote) => &[Role::Draft, Role::Verify],
            _ => &[Role::Verify],
        }
    }

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
        // What they say is in the flags by now; a service of its own reads them more strictly.
        command
            .env_remove(PRECISION_VARIABLE)
            .env_remove(ISA_VARIABLE);
        if let Some(precision) = self.cpu_precision {
            command.args(["--cpu-precision", precision.name()]);
        }
        if let Some(isa) = self.cpu_isa {
            command.args(["--cpu-isa", isa.name()]);
        }
        let device = match role {
            Role::Draft => self.draft_device,
            _ => self.device,
        };
        if let Some(device) = device {
            command.args(["--device", &device.to_string()]);
        }
        if role == Role::Verify {
            let placement = match self.draft_placement {
                DraftPlacement::Remote => "remote",
                DraftPlacement::Local => "local",
            };
            command.args(["--draft-placement", placement]);
            if let Some(prefill) = self.prefill {
                command.args(["--prefill", &prefill.to_string()]);
            }
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
