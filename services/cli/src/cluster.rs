//! A cluster of one verifier, one coordinator and, unless the verifier hosts it, one drafter as child processes on
//! loopback.
//!
//! Every service is this same executable. A child reports itself by JSON lines on its stdout ([`Event`]) and ends when
//! its stdin closes, so that no service outlives this process, however it ends.

mod options;
mod process;
mod progress;
mod role;

use std::{collections::HashMap, net::Ipv4Addr, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use tokio::sync::mpsc;
use treespec_telemetry::Event;

pub(crate) use self::{
    options::{ClusterArgs, ClusterOptions},
    role::Role,
};
use self::{
    process::{Report, ServiceProcess},
    progress::LoadDisplay,
};

/// How long a service may take to end after its stdin was closed, before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Running services. Dropping it stops them.
pub(crate) struct Cluster {
    /// In start order. They are stopped in reverse, so that none sees a service that it uses go away.
    processes: Vec<ServiceProcess>,
    endpoints: HashMap<Role, String>,
    reports: mpsc::Receiver<(Role, Report)>,
    reporter: mpsc::Sender<(Role, Report)>,
    display: LoadDisplay,
}

impl Cluster {
    /// Starts the services and waits until all of them serve.
    ///
    /// # Errors
    /// When a service can't be started, fails or ends before it serves; the message is the service's own.
    pub(crate) async fn start(options: &ClusterOptions) -> Result<Self> {
        let (reporter, reports) = mpsc::channel(64);
        let mut cluster = Self {
            processes: Vec::new(),
            endpoints: HashMap::new(),
            reports,
            reporter,
            display: LoadDisplay::new(),
        };
        check_port(options.port)?;
        let models = options.model_services();
        for &role in models {
            cluster.spawn(role, options)?;
        }
        cluster.until_serving(models.len()).await?;
        // Only now: it is ready in a moment, and finds its replicas ready.
        cluster.spawn(Role::Coordinator, options)?;
        cluster.until_serving(1).await?;
        cluster.display.clear();
        Ok(cluster)
    }

    /// Where `role` listens, for example `http://127.0.0.1:7070`; `None` when the cluster has no such service.
    pub(crate) fn endpoint(&self, role: Role) -> Option<&str> {
        self.endpoints.get(&role).map(String::as_str)
    }

    /// Waits until the cluster can't answer any more because a service failed or ended, and says what happened.
    /// Pending while all is well. The end of the drafter is only a warning: the others decode plainly.
    pub(crate) async fn failure(&mut self) -> anyhow::Error {
        loop {
            let (role, event) = self.next_event().await;
            let error = match event {
                Ok(Event::Failed { message }) => anyhow!("{role}: {message}"),
                Ok(_) => continue,
                Err(error) => error,
            };
            if role != Role::Draft {
                return error;
            }
            tracing::warn!("{error}; decoding goes on without drafts");
        }
    }

    /// Stops all services: closes the stdin of each, gives it a few seconds, kills what is left.
    pub(crate) async fn stop(mut self) {
        self.display.clear();
        for process in self.processes.iter_mut().rev() {
            process.stop(STOP_LIMIT).await;
        }
    }

    fn spawn(&mut self, role: Role, options: &ClusterOptions) -> Result<()> {
        let command = options.command(role, &self.endpoints);
        let process =
            ServiceProcess::spawn(role, command, self.reporter.clone(), self.display.bars())
                .with_context(|| format!("cannot start {role}"))?;
        self.processes.push(process);
        Ok(())
    }

    /// Waits until `count` more services serve, and shows how far they are.
    async fn until_serving(&mut self, mut count: usize) -> Result<()> {
        while count > 0 {
            let (role, event) = self.next_event().await;
            match event? {
                Event::Listening { endpoint } => {
                    self.endpoints.insert(role, endpoint);
                }
                Event::Loading {
                    done_bytes,
                    total_bytes,
                } => self.display.update(role, done_bytes, total_bytes),
                Event::Serving => {
                    self.display.finish(role);
                    count -= 1;
                }
                Event::Failed { message } => bail!("{role}: {message}"),
            }
        }
        Ok(())
    }

    /// The next thing that a service says about itself. A service that ends is an error.
    async fn next_event(&mut self) -> (Role, Result<Event>) {
        let (role, report) = self
            .reports
            .recv()
            .await
            .expect("the cluster holds a sender of its own");
        match report {
            Report::Event(event) => (role, Ok(event)),
            Report::OutputClosed => {
                let process = self
                    .processes
                    .iter_mut()
                    .find(|process| process.role() == role)
                    .expect("only spawned processes report");
                (role, Err(process.describe_end().await))
            }
        }
    }
}

/// Fails when nobody could listen on `port`: better now than after the models were loaded.
fn check_port(port: u16) -> Result<()> {
    // The coordinator binds it anew; whoever takes it meanwhile makes that fail.
    std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .map(drop)
        .with_context(|| format!("cannot listen on 127.0.0.1:{port}; choose another --port"))
}

impl Drop for Cluster {
    /// The path of errors and signals during the start; [`Cluster::stop`] leaves nothing to do here.
    fn drop(&mut self) {
        self.display.clear();
        for process in self.processes.iter_mut().rev() {
            process.stop_blocking(STOP_LIMIT);
        }
    }
}

#[cfg(test)]
mod tests;
