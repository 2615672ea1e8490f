use std::{
    net::SocketAddr,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use clap::builder::FalseyValueParser;
use treespec_engine::{DeviceChoice, EngineError, Isa, Precision};

use crate::Error;

/// Settings of the draft service.
#[derive(Debug, Clone, clap::Args)]
pub struct Config {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, env = "TREESPEC_DRAFT_LISTEN", default_value = "127.0.0.1:7071")]
    pub listen: SocketAddr,
    /// Drafter checkpoint: a directory with config.json and *.safetensors
    #[arg(long, env = "TREESPEC_DRAFT_DRAFTER", value_name = "PATH")]
    pub drafter: PathBuf,
    /// Target checkpoint, for its embeddings, head and vocabulary: a Hugging Face directory or a *.gguf file
    #[arg(long, env = "TREESPEC_DRAFT_TARGET", value_name = "PATH")]
    pub target: PathBuf,
    /// Threads of a forward [default: all cores]
    #[arg(long, env = "TREESPEC_DRAFT_THREADS")]
    pub threads: Option<NonZeroUsize>,
    /// Arithmetic of linear layers on a CPU: f32, or quantised (8-bit weights and activations) [default: quantised for a
    /// quantised target, f32 otherwise]
    #[arg(long, env = "TREESPEC_CPU_PRECISION", value_name = "PRECISION")]
    pub cpu_precision: Option<Precision>,
    /// Instruction set of the CPU kernels, to compare them [default: the best that the processor has]
    #[arg(long, env = "TREESPEC_CPU_ISA", value_name = "ISA")]
    pub cpu_isa: Option<Isa>,
    /// Where the drafter runs: cpu, or cuda:N for the GPU number N
    #[arg(
        long,
        env = "TREESPEC_DRAFT_DEVICE",
        value_name = "DEVICE",
        default_value_t
    )]
    pub device: DeviceChoice,
    /// Context rows kept per sequence; older ones cost acceptance, never correctness
    #[arg(long, env = "TREESPEC_DRAFT_CONTEXT_WINDOW", default_value_t = 2048)]
    pub context_window: usize,
    /// Sequences open at once, over all verifiers
    #[arg(long, env = "TREESPEC_DRAFT_MAX_SEQUENCES", default_value_t = 64)]
    pub max_sequences: usize,
    /// Do not load the head; the verifier must then run the top-k pass (--topk-placement verify)
    #[arg(long, env = "TREESPEC_DRAFT_NO_HEAD", value_parser = FalseyValueParser::new())]
    pub no_head: bool,
    /// Print start-up events as JSON lines on stdout, for a parent process
    #[arg(long, env = "TREESPEC_DRAFT_ANNOUNCE", value_parser = FalseyValueParser::new())]
    pub announce: bool,
    /// End when stdin is closed, which happens when the parent process ends
    #[arg(long, env = "TREESPEC_DRAFT_EXIT_WITH_STDIN", value_parser = FalseyValueParser::new())]
    pub exit_with_stdin: bool,
}

/// Most context rows per sequence that can be asked for.
const MAX_CONTEXT_WINDOW: usize = 1 << 20;
/// Most sequences that can be asked for.
const MAX_SEQUENCES: usize = 1 << 16;

impl Config {
    /// Checks the settings before anything is bound or loaded.
    ///
    /// # Errors
    /// [`Error::Config`] names the flag, its value and what would work.
    pub fn validate(&self) -> Result<(), Error> {
        in_range("context-window", self.context_window, MAX_CONTEXT_WINDOW)?;
        in_range("max-sequences", self.max_sequences, MAX_SEQUENCES)?;
        is_built(self.device)?;
        exists("drafter", &self.drafter)?;
        exists("target", &self.target)
    }
}

fn in_range(setting: &'static str, value: usize, max: usize) -> Result<(), Error> {
    if (1..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::Config {
        setting,
        problem: format!("{value} is outside 1..={max}"),
    })
}

fn is_built(device: DeviceChoice) -> Result<(), Error> {
    if device == DeviceChoice::Cpu || cfg!(feature = "cuda") {
        return Ok(());
    }
    Err(Error::Config {
        setting: "device",
        problem: EngineError::DeviceNotBuilt(device).to_string(),
    })
}

fn exists(setting: &'static str, path: &Path) -> Result<(), Error> {
    if path.exists() {
        return Ok(());
    }
    Err(Error::Config {
        setting,
        problem: format!(
            "{} does not exist; give the path of a checkpoint (make models fetches the default ones)",
            path.display()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        config: Config,
    }

    fn parse(extra: &[&str]) -> Result<Config, clap::Error> {
        let paths = ["draft", "--drafter", "/", "--target", "/"];
        Cli::try_parse_from(paths.iter().chain(extra)).map(|cli| cli.config)
    }

    #[test]
    fn defaults_are_valid() {
        let config = parse(&[]).unwrap();
        assert!(config.validate().is_ok());
        assert_eq!(config.context_window, 2048);
        assert_eq!(config.max_sequences, 64);
        assert!(!config.no_head && !config.announce && !config.exit_with_stdin);
    }

    #[test]
    fn bad_settings_are_named() {
        let cases: &[(&[&str], &str)] = &[
            (&["--context-window", "0"], "--context-window 0"),
            (&["--context-window", "1048577"], "1..=1048576"),
            (&["--max-sequences", "0"], "--max-sequences 0"),
            (&["--max-sequences", "65537"], "--max-sequences 65537"),
            #[cfg(not(feature = "cuda"))]
            (
                &["--device", "cuda:1"],
                "--device cuda:1 needs a build with CUDA: rebuild with `--features cuda`",
            ),
        ];
        for (arguments, part) in cases {
            let text = parse(arguments)
                .unwrap()
                .validate()
                .unwrap_err()
                .to_string();
            assert!(text.contains(part), "{text} lacks {part}");
        }
        assert!(parse(&["--threads", "0"]).is_err());
        assert!(parse(&["--listen", "localhost"]).is_err());
        assert!(parse(&["--device", "gpu"]).is_err());
    }

    #[test]
    fn a_missing_checkpoint_is_named_with_the_fix() {
        let mut config = parse(&[]).unwrap();
        config.drafter = PathBuf::from("/no/such/drafter");
        let text = config.validate().unwrap_err().to_string();
        for part in ["--drafter", "/no/such/drafter", "make models"] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
    }
}
