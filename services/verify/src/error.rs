use std::time::Duration;

use treespec_checkpoint::CheckpointError;
use treespec_engine::EngineError;
use treespec_rpc::{ServiceError, transport::TransportError};

/// Why a verifier cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag has a value that cannot work.
    #[error("{flag} {problem}")]
    InvalidFlag {
        /// The flag.
        flag: &'static str,
        /// What is wrong and how to fix it.
        problem: String,
    },
    /// The target cannot be read.
    #[error("--target: {0}")]
    Target(CheckpointError),
    /// The drafter cannot be read or was made for another target.
    #[error("--drafter: {0}")]
    Drafter(CheckpointError),
    /// The weights cannot be loaded.
    #[error("cannot load the model: {0}")]
    Load(#[from] EngineError),
    /// The operating system gives no thread to the engine.
    #[error("cannot start the engine thread: {0}")]
    Thread(std::io::Error),
    /// The engine thread panicked; the log says where.
    #[error("the engine has stopped; see the log, and report it with the request that was running")]
    EngineStopped,
    /// The device failed for good while the service was running.
    #[error("{0}; restart the service")]
    DeviceLost(String),
    /// The port cannot be had, or the server failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

impl Error {
    pub(crate) fn invalid_flag(flag: &'static str, problem: impl Into<String>) -> Self {
        Self::InvalidFlag {
            flag,
            problem: problem.into(),
        }
    }
}

/// Requests are validated before they reach the engine, so what it reports is mostly the service's own fault.
pub(crate) fn engine_fault(error: &EngineError) -> ServiceError {
    match error {
        EngineError::UnknownToken { .. } => ServiceError::invalid("token_ids", error.to_string()),
        EngineError::ContextOverflow { .. } => {
            ServiceError::invalid("token_ids", error.to_string())
        }
        EngineError::OutOfDeviceMemory { .. } => ServiceError::ResourceExhausted {
            what: format!("device memory: {error}"),
            retry_after: Some(Duration::from_secs(1)),
        },
        EngineError::DeviceLost(_) => ServiceError::unavailable(error.to_string()),
        _ => ServiceError::internal(error.to_string()),
    }
}
