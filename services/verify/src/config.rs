use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, ValueEnum};
use treespec_rpc::proto::draft::v1 as pb;
use treespec_tree::MAX_BUDGET;

use crate::Error;

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

    /// DFlash drafter of that target. Only its taps, fc and hidden_norm are read; needed for speculation.
    #[arg(long, env = "TREESPEC_VERIFY_DRAFTER", value_name = "PATH")]
    pub drafter: Option<PathBuf>,

    /// Threads of a forward; 0 takes one per core.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_THREADS",
        value_name = "N",
        default_value_t = 0
    )]
    pub threads: usize,

    /// Token rows of the KV cache over all sequences.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_KV_TOKENS",
        value_name = "N",
        default_value_t = 16_384
    )]
    pub kv_tokens: usize,

    /// Prompt tokens per forward.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_PREFILL_CHUNK",
        value_name = "N",
        default_value_t = 128
    )]
    pub prefill_chunk: usize,

    /// Largest tree budget that a request may ask for.
    #[arg(long, env = "TREESPEC_VERIFY_MAX_BUDGET", value_name = "N", default_value_t = MAX_BUDGET)]
    pub max_budget: usize,

    /// Tree budget of requests that name none. The default is the best one measured on a CPU (docs/benchmarks.md).
    #[arg(
        long,
        env = "TREESPEC_VERIFY_DEFAULT_BUDGET",
        value_name = "N",
        default_value_t = 5
    )]
    pub default_budget: usize,

    /// Who runs the top-k pass for the drafter's rows.
    #[arg(
        long,
        env = "TREESPEC_VERIFY_TOPK_PLACEMENT",
        value_enum,
        default_value_t
    )]
    pub topk_placement: TopkPlacement,

    /// Feature rows kept per sequence, to prime a drafter again.
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
    /// Checks the values that clap cannot.
    ///
    /// # Errors
    /// [`Error::InvalidFlag`].
    pub fn validate(&self) -> Result<(), Error> {
        let at_least_one = [
            ("--kv-tokens", self.kv_tokens),
            ("--prefill-chunk", self.prefill_chunk),
            ("--max-budget", self.max_budget),
            ("--default-budget", self.default_budget),
            ("--feature-window", self.feature_window),
        ];
        if let Some((flag, _)) = at_least_one.into_iter().find(|(_, value)| *value == 0) {
            return Err(Error::invalid_flag(flag, "must be at least 1"));
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
        if self.default_budget > self.max_budget {
            return Err(Error::invalid_flag(
                "--default-budget",
                format!(
                    "is {}, above --max-budget {}",
                    self.default_budget, self.max_budget
                ),
            ));
        }
        Ok(())
    }
}
