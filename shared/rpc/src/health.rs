//! grpc.health.v1 for every service: alive from the start, ready once the weights are loaded.

use std::sync::Arc;

use tonic_health::{
    ServingStatus,
    pb::health_server::HealthServer,
    server::{HealthReporter, HealthService},
};

/// Health name of the process: SERVING as long as it answers.
pub const LIVENESS: &str = "liveness";
/// Health name of the readiness of all its services.
pub const READINESS: &str = "readiness";

/// Switches the health of a process. Clones switch the same one.
#[derive(Debug, Clone)]
pub struct Readiness {
    reporter: HealthReporter,
    /// `""`, `readiness` and the full service names.
    names: Arc<[String]>,
}

impl Readiness {
    /// Everything NOT_SERVING except [`LIVENESS`]. Create it before the port is bound: the reporter's own default
    /// for `""` is SERVING, which would let a probe pass while weights load.
    pub async fn new(service_names: &[&str]) -> Self {
        let reporter = HealthReporter::new();
        let names = ["", READINESS]
            .iter()
            .chain(service_names)
            .map(|&name| name.to_owned())
            .collect();
        let readiness = Self { reporter, names };
        readiness.set_not_serving().await;
        readiness
            .reporter
            .set_service_status(LIVENESS, ServingStatus::Serving)
            .await;
        readiness
    }

    /// Reports every name as SERVING.
    pub async fn set_serving(&self) {
        self.set(ServingStatus::Serving).await;
    }

    /// Reports every name except [`LIVENESS`] as NOT_SERVING.
    pub async fn set_not_serving(&self) {
        self.set(ServingStatus::NotServing).await;
    }

    async fn set(&self, status: ServingStatus) {
        for name in self.names.iter() {
            self.reporter.set_service_status(name, status).await;
        }
    }

    /// Full names of the services that it reports for.
    pub fn service_names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().skip(2).map(String::as_str)
    }

    /// The gRPC service that answers probes.
    pub fn server(&self) -> HealthServer<HealthService> {
        HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()))
    }
}
