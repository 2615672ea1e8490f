//! Start-up events between a service and the process that started it: one JSON object per line on stdout.

use std::{
    fmt,
    io::{self, Write},
    sync::{Arc, Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

/// Longest line that a parent tries to read as an event, in bytes.
const MAX_LINE: usize = 64 << 10;

/// A step in the life of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The port is bound; calls are answered, health is NOT_SERVING.
    Listening {
        /// `http://HOST:PORT` with the real port.
        endpoint: String,
    },
    /// Weights are being read.
    Loading {
        /// Bytes read so far.
        done_bytes: u64,
        /// Bytes to read.
        total_bytes: u64,
    },
    /// Ready for requests.
    Serving,
    /// The service ends because of an error.
    Failed {
        /// One line that says what and, where possible, how to fix it.
        message: String,
    },
}

/// A line on a service's stdout that is not an event.
#[derive(Debug, thiserror::Error)]
pub enum EventError {
    /// Longer than any event.
    #[error("a line of {0} bytes is no start-up event")]
    TooLong(usize),
    /// Not JSON, or not an event.
    #[error("{line:?} is no start-up event: {source}")]
    Malformed {
        /// Start of the line.
        line: String,
        /// What the parser says.
        source: serde_json::Error,
    },
}

impl Event {
    /// Reads one line of a service's stdout.
    ///
    /// # Errors
    /// [`EventError`] when the line is something else.
    pub fn parse(line: &str) -> Result<Self, EventError> {
        if line.len() > MAX_LINE {
            return Err(EventError::TooLong(line.len()));
        }
        serde_json::from_str(line.trim()).map_err(|source| EventError::Malformed {
            line: line.trim().chars().take(120).collect(),
            source,
        })
    }
}

/// Sends [`Event`]s to the parent process, or nowhere. Clones share one output.
#[derive(Clone)]
pub struct Announcer {
    output: Option<Arc<Mutex<dyn Write + Send>>>,
}

impl Announcer {
    /// Announces on stdout.
    pub fn stdout() -> Self {
        Self::to(io::stdout())
    }

    /// Announces nothing.
    pub fn silent() -> Self {
        Self { output: None }
    }

    /// On stdout when the service was started with `--announce`.
    pub fn from_flag(announce: bool) -> Self {
        if announce {
            Self::stdout()
        } else {
            Self::silent()
        }
    }

    /// Announces to any writer, one line per event, flushed.
    pub fn to(output: impl Write + Send + 'static) -> Self {
        Self {
            output: Some(Arc::new(Mutex::new(output))),
        }
    }

    /// True when somebody listens.
    pub fn is_active(&self) -> bool {
        self.output.is_some()
    }

    /// Sends an event. A parent that is gone is no error of the service: it is logged and ignored.
    pub fn announce(&self, event: &Event) {
        let Some(output) = &self.output else { return };
        // A writer that panicked half-way leaves no state worth protecting.
        let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = write_line(&mut *output, event) {
            tracing::debug!(%error, ?event, "the parent does not read start-up events");
        }
    }

    /// Announces the failure of a service that ends, and passes its outcome on.
    pub fn announce_failure<E: fmt::Display>(&self, outcome: Result<(), E>) -> Result<(), E> {
        if let Err(error) = &outcome {
            self.announce(&Event::Failed {
                message: error.to_string(),
            });
        }
        outcome
    }
}

fn write_line(output: &mut dyn Write, event: &Event) -> io::Result<()> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

impl fmt::Debug for Announcer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Announcer")
            .field("active", &self.is_active())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_lines_of_the_protocol() {
        let cases = [
            (
                Event::Listening {
                    endpoint: "http://127.0.0.1:7071".into(),
                },
                r#"{"event":"listening","endpoint":"http://127.0.0.1:7071"}"#,
            ),
            (
                Event::Loading {
                    done_bytes: 1,
                    total_bytes: 2,
                },
                r#"{"event":"loading","done_bytes":1,"total_bytes":2}"#,
            ),
            (Event::Serving, r#"{"event":"serving"}"#),
            (
                Event::Failed {
                    message: "no\nfile".into(),
                },
                r#"{"event":"failed","message":"no\nfile"}"#,
            ),
        ];
        for (event, line) in cases {
            let (read, write) = io::pipe().expect("pipe");
            let announcer = Announcer::to(write);
            announcer.announce(&event);
            drop(announcer);
            let written = io::read_to_string(read).expect("utf-8");
            assert_eq!(written, format!("{line}\n"));
            assert_eq!(Event::parse(&written).expect("event"), event);
        }
    }

    #[test]
    fn other_lines_are_errors_that_quote_them() {
        for line in [
            "",
            "hello",
            "{}",
            r#"{"event":"exploded"}"#,
            r#"{"event":"loading"}"#,
        ] {
            let text = Event::parse(line).expect_err("not an event").to_string();
            assert!(text.contains(&format!("{line:?}")), "{text}");
        }
        assert!(matches!(
            Event::parse(&"x".repeat(MAX_LINE + 1)),
            Err(EventError::TooLong(_))
        ));
    }

    #[test]
    fn a_parent_that_is_gone_is_ignored() {
        let (read, write) = io::pipe().expect("pipe");
        drop(read);
        Announcer::to(write).announce(&Event::Serving);
        Announcer::silent().announce(&Event::Serving);
    }
}
