use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, ValueEnum};
use treespec_engine::{DeviceChoice, EngineError, Isa, Precision, PrefillMode};
use treespec_rpc::proto::draft::v1 as pb;
use treespec_tree::MAX_BUDGET;

use crate::Error;

/// More rows of KV cache than any machine has memory for.
const MOST_KV_TOKENS: usize = 1 << 28;

/// Who runs the top-k log-prob pass over the vocabulary for the drafter's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum TopkPlacement {
    /// The drafter, with its copy of the head; trees travel.
    #[default]
    Draft,
    /// The verifier, with the target's head; the block's hidden rows travel.
    Verify,
}

impl From<TopkPlacement> for pb::TopkPlacement {
    fn from(placement: TopkPlacement) -> Self {
        match placement {
            TopkPlacement::Draft => Self::Draft,
            TopkPlacement::Verify => Self::Verify,
        }
    }
}

/// Where the drafter of this verifier's sequences runs. Tokens are the same either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum DraftPlacement {
    /// In draft services, which the coordinator leases to sequences.
    #[default]
    Remote,
    /// Here, on the target's device: a step needs no wire, and a request no lease.
    Local,
}

/// Most context rows per sequence, and most contexts, that can be asked of a drafter that is hosted here.
const MAX_CONTEXT_WINDOW: usize = 1 << 20;
const MAX_CONTEXTS: usize = 1 << 16;

/// Settings of a verifier.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct Config {
    /// Address to listen on; port 0 takes a free one.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_LISTEN",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:7072"
    )]
    pub listen: SocketAddr,

    /// Target model: a Hugging Face directory or a GGUF file.
    #[arg(long, env = "TREESPEC_VERIFY_TARGET", value_name = "PATH")]
    pub target: PathBuf,

    /// DFlash drafter of that target, needed for speculation. Only its taps, fc and hidden_norm are read unless
    /// --draft-placement is local.
    #[arg(long, env = "TREESPEC_VERIFY_DRAFTER", value_name = "PATH")]
    pub drafter: Option<PathBuf>,

    /// Where the models run: cpu, or cuda:N for the GPU number N.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_DEVICE",
        value_name = "DEVICE",
        default_value_t
    )]
    pub device: DeviceChoice,

    /// Where the drafter runs: in draft services, or in this process.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_DRAFT_PLACEMENT",
        value_enum,
        default_value_t
    )]
    pub draft_placement: DraftPlacement,

    /// Sequences that a drafter in this process can draft for at a time; others decode plainly meanwhile.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_DRAFTER_CONTEXTS",
        value_name = "N",
        default_value_t = 64
    )]
    pub drafter_contexts: usize,

    /// Threads of a forward; 0 takes one per core.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_THREADS",
        value_name = "N",
        default_value_t = 0
    )]
    pub threads: usize,

    /// Arithmetic of linear layers on a CPU: f32, or quantised (8-bit activations where the weights are quantised).
    /// [default: quantised for a quantised file, f32 otherwise]
    #[arg(long, env = "TREESPEC_CPU_PRECISION", value_name = "PRECISION")]
    pub cpu_precision: Option<Precision>,

    /// Instruction set of the CPU kernels, to compare them. [default: the best that the processor has]
    #[arg(long, env = "TREESPEC_CPU_ISA", value_name = "ISA")]
    pub cpu_isa: Option<Isa>,

    /// Token rows of the KV cache over all sequences.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_KV_TOKENS",
        value_name = "N",
        default_value_t = 16_384
    )]
    pub kv_tokens: usize,

    /// Prompt tokens per forward. [default: 128, with --prefill fast 2048]
    #[arg(long, env = "TREESPEC_VERIFY_PREFILL_CHUNK", value_name = "N")]
    pub prefill_chunk: Option<usize>,

    /// How prompts are computed: exact, or fast on a GPU, by a library's products whose bits depend on the chunk.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_PREFILL",
        value_name = "MODE",
        default_value_t
    )]
    pub prefill: PrefillMode,

    /// Largest tree budget that a request may ask for.
    #[arg(long, env = "TREESPEC_VERIFY_MAX_BUDGET", value_name = "N", default_value_t = MAX_BUDGET)]
    pub max_budget: usize,

    /// Tree budget of requests that name none. The defaults are the best ones measured (docs/benchmarks.md).
    /// [default: 4 on a CPU, 15 on a GPU]
    #[arg(long, env = "TREESPEC_VERIFY_DEFAULT_BUDGET", value_name = "N")]
    pub default_budget: Option<usize>,

    /// Who runs the top-k pass for the drafter's rows.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_TOPK_PLACEMENT",
        value_enum,
        default_value_t
    )]
    pub topk_placement: TopkPlacement,

    /// Feature rows kept per sequence, to prime a drafter again; the context of a drafter in this process.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_FEATURE_WINDOW",
        value_name = "ROWS",
        default_value_t = 2_048
    )]
    pub feature_window: usize,

    /// Sequences that wait for room in the KV cache; more are refused.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_MAX_WAITING",
        value_name = "N",
        default_value_t = 256
    )]
    pub max_waiting: usize,

    /// Print start-up events as JSON lines on stdout.
    #[arg(long, env = "TREESPEC_VERIFY_ANNOUNCE")]
    pub announce: bool,

    /// End when stdin is closed.
    #[arg(long, env = "TREESPEC_VERIFY_EXIT_WITH_STDIN")]
    pub exit_with_stdin: bool,
}

impl Config {
    /// Tree budget of requests that name none.
    pub fn default_budget(&self) -> usize {
        let measured_best = match self.device {
            DeviceChoice::Cpu => 4,
            DeviceChoice::Cuda(_) => 15,
        };
        self.default_budget
            .unwrap_or_else(|| measured_best.min(self.max_budget))
    }

    /// Prompt tokens per forward.
    pub fn prefill_chunk(&self) -> usize {
        self.prefill_chunk.unwrap_or(match self.prefill {
            PrefillMode::Exact => 128,
            PrefillMode::Fast => 2_048,
        })
    }

    /// Checks the values that clap cannot.
    ///
    /// # Errors
    /// [`Error::InvalidFlag`].
    pub fn validate(&self) -> Result<(), Error> {
        let at_least_one = [
            ("--kv-tokens", self.kv_tokens),
            ("--prefill-chunk", self.prefill_chunk()),
            ("--max-budget", self.max_budget),
            ("--default-budget", self.default_budget()),
            ("--feature-window", self.feature_window),
            ("--drafter-contexts", self.drafter_contexts),
        ];
        if let Some((flag, _)) = at_least_one.into_iter().find(|(_, value)| *value == 0) {
            return Err(Error::invalid_flag(flag, "must be at least 1"));
        }
        if self.kv_tokens > MOST_KV_TOKENS {
            return Err(Error::invalid_flag(
                "--kv-tokens",
                format!("is {}, above {MOST_KV_TOKENS}", self.kv_tokens),
            ));
        }
        if self.max_budget > MAX_BUDGET {
            return Err(Error::invalid_flag(
                "--max-budget",
                format!(
                    "is {}, but a tree has at most {MAX_BUDGET} nodes below the root",
                    self.max_budget
                ),
            ));
        }
        if self.default_budget() > self.max_budget {
            return Err(Error::invalid_flag(
                "--default-budget",
                format!(
                    "is {}, above --max-budget {}",
                    self.default_budget(),
                    self.max_budget
                ),
            ));
        }
        if self.device != DeviceChoice::Cpu && cfg!(not(feature = "cuda")) {
            let problem = EngineError::DeviceNotBuilt(self.device).to_string();
            return Err(Error::invalid_flag("--device", problem));
        }
        if self.prefill == PrefillMode::Fast && self.device == DeviceChoice::Cpu {
            return Err(Error::invalid_flag(
                "--prefill",
                "fast needs a GPU: give --device cuda:N, or leave it out",
            ));
        }
        match self.draft_placement {
            DraftPlacement::Remote => Ok(()),
            DraftPlacement::Local => self.validate_local_drafter(),
        }
    }

    fn validate_local_drafter(&self) -> Result<(), Error> {
        if self.drafter.is_none() {
            return Err(Error::invalid_flag(
                "--draft-placement",
                "local needs the drafter: give --drafter PATH",
            ));
        }
        if self.topk_placement == TopkPlacement::Verify {
            return Err(Error::invalid_flag(
                "--topk-placement",
                "verify is for drafters elsewhere: leave it out with --draft-placement local",
            ));
        }
        for (flag, value, most) in [
            ("--feature-window", self.feature_window, MAX_CONTEXT_WINDOW),
            ("--drafter-contexts", self.drafter_contexts, MAX_CONTEXTS),
        ] {
            if value > most {
                let problem = format!("is {value}, above the limit of {most}");
                return Err(Error::invalid_flag(flag, problem));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        config: Config,
    }

    fn parse(extra: &[&str]) -> Result<Config, clap::Error> {
        let required = ["verify", "--target", "/"];
        Cli::try_parse_from(required.iter().chain(extra)).map(|cli| cli.config)
    }

    #[test]
    fn the_drafter_is_elsewhere_and_the_device_the_cpu_by_default() {
        let config = parse(&[]).unwrap();
        config.validate().unwrap();
        assert_eq!(config.draft_placement, DraftPlacement::Remote);
        assert_eq!(config.device, DeviceChoice::Cpu);
    }

    #[test]
    fn a_local_drafter_is_checked_before_anything_is_loaded() {
        let local = |extra: &[&str]| {
            let flags = [&["--draft-placement", "local"], extra].concat();
            parse(&flags).unwrap().validate()
        };
        local(&["--drafter", "/"]).unwrap();
        let cases: [(&[&str], &str); 4] = [
            (&[], "--draft-placement local needs the drafter"),
            (
                &["--drafter", "/", "--topk-placement", "verify"],
                "--topk-placement verify",
            ),
            (
                &["--drafter", "/", "--drafter-contexts", "0"],
                "--drafter-contexts must be at least 1",
            ),
            (
                &["--drafter", "/", "--feature-window", "1048577"],
                "--feature-window is 1048577",
            ),
        ];
        for (flags, part) in cases {
            let text = local(flags).unwrap_err().to_string();
            assert!(text.contains(part), "{text} lacks {part}");
        }
    }

    #[test]
    fn a_fast_prefill_takes_long_chunks_and_a_device_for_them() {
        let fast = parse(&["--prefill", "fast"]).unwrap();
        assert_eq!(fast.prefill_chunk(), 2_048);
        assert_eq!(
            fast.validate().unwrap_err().to_string(),
            "--prefill fast needs a GPU: give --device cuda:N, or leave it out"
        );
        let exact = parse(&[]).unwrap();
        assert_eq!(exact.prefill, PrefillMode::Exact);
        assert_eq!(exact.prefill_chunk(), 128);
        assert!(parse(&["--prefill", "faster"]).is_err());
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_device_that_is_not_built_in_is_named_with_the_fix() {
        let config = parse(&["--device", "cuda:0"]).unwrap();
        assert_eq!(
            config.validate().unwrap_err().to_string(),
            "--device cuda:0 needs a build with CUDA: rebuild with `--features cuda`"
        );
        assert!(parse(&["--device", "gpu"]).is_err());
    }
}
