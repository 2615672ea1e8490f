//! A service that runs as a task of this runtime and can be killed.

use std::fmt::Display;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tonic::Status;
use tonic::transport::Channel;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use treespec_rpc::transport;

use crate::PATIENCE;

/// Time between two looks at a service's health.
const POLL: Duration = Duration::from_millis(5);

/// A service that has its port. `serving` runs it; dropping that future kills it.
pub struct Launched {
    /// With the real port.
    pub address: SocketAddr,
    /// Ends with one line when the service cannot start or fails.
    pub serving: BoxFuture<'static, Result<(), String>>,
}

type Launcher = Box<dyn Fn(SocketAddr) -> BoxFuture<'static, Result<Launched, String>> + Send>;

/// A service on a loopback port. Dropping it kills it.
pub struct Service {
    launch: Launcher,
    address: SocketAddr,
    channel: Channel,
    /// Taken when it is killed.
    task: Option<JoinHandle<Result<(), String>>>,
}

impl Service {
    /// Starts what `launch` makes for an address, with port 0 at first and with the same port on every restart. It
    /// listens when this returns, which does not mean that it serves.
    ///
    /// # Panics
    /// When `launch` fails.
    pub async fn launch<F>(launch: impl Fn(SocketAddr) -> F + Send + 'static) -> Self
    where
        F: Future<Output = Result<Launched, String>> + Send + 'static,
    {
        let launch: Launcher = Box::new(move |address| Box::pin(launch(address)));
        let launched = launch(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            .await
            .unwrap_or_else(|error| panic!("the service does not start: {error}"));
        let endpoint = format!("http://{}", launched.address);
        Self {
            launch,
            address: launched.address,
            channel: transport::channel(&endpoint).unwrap_or_else(|error| panic!("{error}")),
            task: Some(tokio::spawn(launched.serving)),
        }
    }

    /// `http://127.0.0.1:PORT`
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A channel to it; connects anew after a restart.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// What grpc.health.v1 says of a service name, `""` for all of them.
    ///
    /// # Errors
    /// The status of the call: NOT_FOUND for an unknown name, UNAVAILABLE when nobody listens.
    pub async fn health(&self, name: &str) -> Result<ServingStatus, Status> {
        let request = HealthCheckRequest {
            service: name.to_owned(),
        };
        let response = HealthClient::new(self.channel()).check(request).await?;
        Ok(response.into_inner().status())
    }

    /// Waits until the whole service is SERVING.
    ///
    /// # Panics
    /// When the service ends, with its reason, or when it takes too long.
    pub async fn wait_until_serving(&mut self) {
        self.wait_for(ServingStatus::Serving).await;
    }

    /// Waits until its health is `wanted`.
    ///
    /// # Panics
    /// As [`Service::wait_until_serving`].
    pub async fn wait_for(&mut self, wanted: ServingStatus) {
        let reached = async {
            loop {
                if let Some(task) = self.task.take_if(|task| task.is_finished()) {
                    panic!("the service has ended: {:?}", task.await);
                }
                let request = HealthCheckRequest::default();
                let answer = HealthClient::new(self.channel.clone()).check(request).await;
                if answer.is_ok_and(|response| response.into_inner().status() == wanted) {
                    return;
                }
                sleep(POLL).await;
            }
        };
        timeout(PATIENCE, reached)
            .await
            .unwrap_or_else(|_| panic!("the service never became {wanted:?}"));
    }

    /// Waits until it ends by itself. An error is its reason in one line.
    ///
    /// # Panics
    /// When it goes on for too long, or was killed.
    pub async fn wait_for_end(&mut self) -> Result<(), String> {
        let task = self.task.take().expect("the service was not killed");
        match timeout(PATIENCE, task).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => panic!("the service's task failed: {error}"),
            Err(_) => panic!("the service goes on"),
        }
    }

    /// Ends it as a crash would: connections break, nothing is told to anybody. The port is free when this returns.
    pub async fn kill(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            // The outcome is the cancellation just asked for, or an end that came before it.
            let _ = task.await;
        }
    }

    /// Starts it again on the same port and waits until it serves.
    ///
    /// # Panics
    /// When the port is taken or it does not come up.
    pub async fn restart(&mut self) {
        self.kill().await;
        let launched = (self.launch)(self.address)
            .await
            .unwrap_or_else(|error| panic!("the service does not start again: {error}"));
        self.task = Some(tokio::spawn(launched.serving));
        self.wait_until_serving().await;
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// One line of an error, as [`Launched`] wants it.
pub(crate) fn line(error: impl Display) -> String {
    error.to_string()
}
