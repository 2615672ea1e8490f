//! Logs on stderr, filtered by `TREESPEC_LOG` or `RUST_LOG`.

use std::{env, fmt, str::FromStr};

use tracing::level_filters::LevelFilter;
use tracing_appender::non_blocking::WorkerGuard;
use tracing_subscriber::{EnvFilter, fmt::time::SystemTime, util::SubscriberInitExt};

/// Filter variables; the first that is set counts.
const FILTER_VARIABLES: [&str; 2] = ["TREESPEC_LOG", "RUST_LOG"];

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// For people.
    #[default]
    Pretty,
    /// One JSON object per line.
    Json,
}

/// Why logging cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// Text that names no format.
    #[error("log format {0:?} is unknown; use pretty or json")]
    UnknownFormat(String),
    /// A filter variable that cannot be read.
    #[error("{variable}={value:?} is no log filter: {problem}; try info or treespec_draft=debug")]
    InvalidFilter {
        /// The environment variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What the parser says.
        problem: String,
    },
    /// Something else in the process has set up logging already.
    #[error("logging is already set up")]
    AlreadyInitialized,
}

impl FromStr for LogFormat {
    type Err = LogError;

    fn from_str(text: &str) -> Result<Self, LogError> {
        match text {
            "pretty" => Ok(Self::Pretty),
            "json" => Ok(Self::Json),
            other => Err(LogError::UnknownFormat(other.to_owned())),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Pretty => "pretty",
            Self::Json => "json",
        })
    }
}

/// Writes out what is still buffered when it is dropped: hold it until the process ends.
#[must_use = "log lines that are still buffered are lost when this is dropped early"]
#[derive(Debug)]
pub struct LogGuard {
    _worker: WorkerGuard,
}

/// Sends the process's logs to stderr, from a thread of its own: a terminal that is paused or a pipe that nobody reads
/// costs log lines, never a request. What is logged: `TREESPEC_LOG`, else `RUST_LOG`, else everything from `default_level` up.
///
/// # Errors
/// [`LogError`] for a filter that cannot be read, or a second call.
pub fn init(format: LogFormat, default_level: LevelFilter) -> Result<LogGuard, LogError> {
    let filter = filter(|name| env::var(name).ok(), default_level)?;
    let (writer, guard) = tracing_appender::non_blocking(std::io::stderr());
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_timer(SystemTime)
        .with_writer(writer);
    match format {
        LogFormat::Pretty => {
            use std::io::IsTerminal;
            subscriber
                .with_ansi(std::io::stderr().is_terminal())
                .finish()
                .try_init()
        }
        LogFormat::Json => subscriber.json().flatten_event(true).finish().try_init(),
    }
    .map_err(|_| LogError::AlreadyInitialized)?;
    Ok(LogGuard { _worker: guard })
}

fn filter(
    variable: impl Fn(&str) -> Option<String>,
    default_level: LevelFilter,
) -> Result<EnvFilter, LogError> {
    let set = FILTER_VARIABLES
        .iter()
        .find_map(|&name| variable(name).map(|value| (name, value)));
    let Some((variable, value)) = set else {
        return Ok(EnvFilter::default().add_directive(default_level.into()));
    };
    EnvFilter::builder()
        .parse(&value)
        .map_err(|error| LogError::InvalidFilter {
            variable,
            problem: error.to_string(),
            value,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_named() {
        for format in [LogFormat::Pretty, LogFormat::Json] {
            assert_eq!(
                format.to_string().parse::<LogFormat>().expect("format"),
                format
            );
        }
        let text = "yaml"
            .parse::<LogFormat>()
            .expect_err("unknown")
            .to_string();
        assert!(text.contains("yaml") && text.contains("json"), "{text}");
    }

    #[test]
    fn the_first_variable_that_is_set_counts() {
        let read = |ours: Option<&str>, rust: Option<&str>| {
            let variable = |name: &str| match name {
                "TREESPEC_LOG" => ours.map(str::to_owned),
                _ => rust.map(str::to_owned),
            };
            filter(variable, LevelFilter::INFO).map(|filter| filter.to_string())
        };
        assert_eq!(read(None, None).expect("filter"), "info");
        assert_eq!(read(None, Some("warn")).expect("filter"), "warn");
        assert_eq!(read(Some("debug"), Some("warn")).expect("filter"), "debug");
        let text = read(Some("a=b=c"), None)
            .expect_err("malformed")
            .to_string();
        assert!(text.contains("TREESPEC_LOG=\"a=b=c\""), "{text}");
    }
}
