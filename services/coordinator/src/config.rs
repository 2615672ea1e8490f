use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Args;

use crate::Error;

/// Settings of a coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct Config {
    /// Address to listen on; port 0 takes a free one.
    #[arg(
        long,
        env = "TREESPEC_COORDINATOR_LISTEN",
        value_name = "IP:PORT",
        default_value = "127.0.0.1:7070"
    )]
    pub listen: SocketAddr,

    /// Target model whose tokenizer and chat template are used: a Hugging Face directory or a GGUF file. The weights
    /// are not read.
    #[arg(long, env = "TREESPEC_COORDINATOR_TARGET", value_name = "PATH")]
    pub target: PathBuf,

    /// Verify replicas of that model.
    #[arg(
        long,
        env = "TREESPEC_COORDINATOR_VERIFY",
        value_name = "URL",
        value_delimiter = ',',
        num_args = 1..,
        required = true
    )]
    pub verify: Vec<String>,

    /// Draft services, leased to sequences in turn. Without one, every request is decoded plainly.
    #[arg(
        long,
        env = "TREESPEC_COORDINATOR_DRAFT",
        value_name = "URL",
        value_delimiter = ',',
        num_args = 1..
    )]
    pub draft: Vec<String>,

    /// Requests that run at a time.
    #[arg(
        long,
        env = "TREESPEC_COORDINATOR_MAX_IN_FLIGHT",
        value_name = "N",
        default_value_t = 64
    )]
    pub max_in_flight: usize,

    /// Requests that wait for their turn; more are refused.
    #[arg(
        long,
        env = "TREESPEC_COORDINATOR_MAX_WAITING",
        value_name = "N",
        default_value_t = 256
    )]
    pub max_waiting: usize,

    /// Longest wait of a running request for a verify replica, when the one it had is lost.
    #[arg(
        long,
        env = "TREESPEC_COORDINATOR_FAILOVER_WAIT_MS",
        value_name = "MS",
        default_value_t = 5000
    )]
    pub failover_wait_ms: u64,

    /// Print start-up events as JSON lines on stdout.
    #[arg(long, env = "TREESPEC_COORDINATOR_ANNOUNCE")]
    pub announce: bool,

    /// End when stdin is closed.
    #[arg(long, env = "TREESPEC_COORDINATOR_EXIT_WITH_STDIN")]
    pub exit_with_stdin: bool,
}

impl Config {
    /// Checks what the command line parser cannot. Endpoints are checked when their channels are made.
    ///
    /// # Errors
    /// [`Error::InvalidFlag`] names the flag and the fix.
    pub fn validate(&self) -> Result<(), Error> {
        let invalid = |flag, problem: &str| {
            Err(Error::InvalidFlag {
                flag,
                problem: problem.to_owned(),
            })
        };
        if self.verify.is_empty() {
            return invalid(
                "--verify",
                "is missing: name at least one endpoint, such as http://127.0.0.1:7072",
            );
        }
        if self.max_in_flight == 0 {
            return invalid(
                "--max-in-flight",
                "is 0: no request could ever run, allow at least 1",
            );
        }
        let most = tokio::sync::Semaphore::MAX_PERMITS;
        if self.max_in_flight > most || self.max_waiting > most {
            return invalid(
                "--max-in-flight and --max-waiting",
                &format!("may be {most} at most"),
            );
        }
        Ok(())
    }

    pub(crate) fn failover_wait(&self) -> Duration {
        Duration::from_millis(self.failover_wait_ms)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        config: Config,
    }

    fn parse(flags: &[&str]) -> Result<Config, clap::Error> {
        let required = ["coordinator", "--target", "model"];
        Command::try_parse_from(required.iter().chain(flags)).map(|command| command.config)
    }

    #[test]
    fn endpoints_may_be_repeated_or_separated_by_commas() {
        let config = parse(&[
            "--verify",
            "http://a:1,http://b:1",
            "--verify",
            "http://c:1",
        ])
        .unwrap();
        assert_eq!(config.verify, ["http://a:1", "http://b:1", "http://c:1"]);
        assert!(config.draft.is_empty());
        config.validate().unwrap();
    }

    #[test]
    fn a_verify_endpoint_is_needed() {
        assert!(parse(&[]).is_err());
    }

    #[test]
    fn limits_that_would_admit_nothing_are_refused() {
        let config = parse(&["--verify", "http://a:1", "--max-in-flight", "0"]).unwrap();
        let error = config.validate().unwrap_err();
        assert!(error.to_string().contains("--max-in-flight"), "{error}");

        let most = usize::MAX.to_string();
        let config = parse(&["--verify", "http://a:1", "--max-waiting", &most]).unwrap();
        assert!(config.validate().is_err());
    }
}
