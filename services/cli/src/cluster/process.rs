//! One service as a child process: its events, its log lines, its end.

use std::{
    collections::VecDeque,
    process::{Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use indicatif::MultiProgress;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, BufReader},
    process::{Child, ChildStdin},
    sync::mpsc,
    task::JoinHandle,
};
use treespec_telemetry::Event;

use super::role::Role;
use crate::stderr::print_line;

/// Log lines kept for the message of a service that ends without saying why.
const KEPT_LINES: usize = 20;
/// How this executable prints the error that it ends with.
const ERROR_PREFIX: &str = "error: ";
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// What a service's stdout says.
#[derive(Debug)]
pub(super) enum Report {
    /// A step in its life.
    Event(Event),
    /// The stream ended: the process has ended or is about to.
    OutputClosed,
}

type LogTail = Arc<Mutex<VecDeque<String>>>;

/// A child process. It is killed when this is dropped while it still runs.
pub(super) struct ServiceProcess {
    role: Role,
    child: Child,
    input: Option<ChildStdin>,
    log_reader: Option<JoinHandle<()>>,
    log_tail: LogTail,
}

impl ServiceProcess {
    /// Starts `command` with piped standard streams. Its events go to `reports`, its log lines to this process's
    /// stderr above the progress `bars`, marked with the role.
    pub(super) fn spawn(
        role: Role,
        command: Command,
        reports: mpsc::Sender<(Role, Report)>,
        bars: MultiProgress,
    ) -> Result<Self> {
        let program = command.get_program().to_owned();
        let mut command = tokio::process::Command::from(command);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // An own group: Ctrl-C reaches this process only, which then stops its services in order.
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot run {}", program.display()))?;

        let input = child.stdin.take();
        let log_tail = LogTail::default();
        let log_reader = child
            .stderr
            .take()
            .map(|stderr| tokio::spawn(forward_log(role, stderr, log_tail.clone(), bars.clone())));
        if let Some(stdout) = child.stdout.take() {
            tokio::spawn(forward_events(role, stdout, reports));
        }
        Ok(Self {
            role,
            child,
            input,
            log_reader,
            log_tail,
        })
    }

    /// Which service it is.
    pub(super) fn role(&self) -> Role {
        self.role
    }

    /// Asks the child to end by closing its stdin, and kills it when it still runs after `limit`.
    pub(super) async fn stop(&mut self, limit: Duration) {
        self.input = None;
        if tokio::time::timeout(limit, self.child.wait())
            .await
            .is_err()
        {
            tracing::warn!(
                service = self.role.name(),
                "did not end in time and is killed"
            );
            // The only error is that it has ended in the meantime.
            let _ = self.child.kill().await;
        }
    }

    /// [`Self::stop`] for a destructor, which can't await.
    pub(super) fn stop_blocking(&mut self, limit: Duration) {
        self.input = None;
        let deadline = Instant::now() + limit;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= deadline {
                let _ = self.child.start_kill();
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits for a child whose stdout has closed and tells how it ended, with its last words.
    pub(super) async fn describe_end(&mut self) -> anyhow::Error {
        let status = self.child.wait().await;
        if let Some(reader) = self.log_reader.take() {
            // It ends with the child's stderr; a panic in it only costs the last words.
            let _ = reader.await;
        }
        let tail = self.log_tail.lock().unwrap_or_else(PoisonError::into_inner);
        let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        match last_words(&tail) {
            Some(words) => anyhow::anyhow!("{} ended ({how}): {words}", self.role),
            None => anyhow::anyhow!("{} ended ({how}) without a message", self.role),
        }
    }
}

/// The line that most likely says why the process ended: its last `error:` line, else its last line.
fn last_words(lines: &VecDeque<String>) -> Option<&str> {
    let mut said = lines
        .iter()
        .rev()
        .map(|line| line.trim())
        .filter(|line| !line.is_empty());
    let last = said.clone().next();
    said.find_map(|line| line.strip_prefix(ERROR_PREFIX))
        .or(last)
}

async fn forward_events(
    role: Role,
    stdout: impl AsyncRead + Unpin,
    reports: mpsc::Sender<(Role, Report)>,
) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match Event::parse(&line) {
            Ok(event) => {
                if reports.send((role, Report::Event(event))).await.is_err() {
                    return;
                }
            }
            Err(error) => tracing::warn!(service = role.name(), %error, "unexpected output"),
        }
    }
    // Nobody listens any more when this fails: the cluster is being dropped.
    let _ = reports.send((role, Report::OutputClosed)).await;
}

async fn forward_log(
    role: Role,
    stderr: impl AsyncRead + Unpin,
    tail: LogTail,
    bars: MultiProgress,
) {
    let mut lines = BufReader::new(stderr).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // The reason of a service's end is not a log line: it comes back as this process's own error.
        if !line.starts_with(ERROR_PREFIX) {
            // `suspend` also prints while no bar is drawn.
            bars.suspend(|| print_line(&format!("{role:>11} | {line}")));
        }
        let mut kept = tail.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT_LINES {
            kept.pop_front();
        }
        kept.push_back(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_line_is_preferred() {
        let words = |lines: &[&str]| {
            last_words(&lines.iter().map(|&line| line.to_owned()).collect()).map(str::to_owned)
        };
        assert_eq!(words(&["a", "error: b", "c", ""]), Some("b".into()));
        assert_eq!(words(&["a", "c", " "]), Some("c".into()));
        assert_eq!(words(&[]), None);
    }
}
