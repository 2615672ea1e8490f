use treespec_checkpoint::CheckpointError;
use treespec_engine::EngineError;
use treespec_rpc::{ServiceError, transport::TransportError};

/// Why the draft service cannot start or has ended. Messages are one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting that cannot work.
    #[error("--{setting} {problem}")]
    Config {
        /// Name of the flag.
        setting: &'static str,
        /// The value, what is wrong with it, and what would work.
        problem: String,
    },
    /// The port, or the gRPC server.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The checkpoint of the drafter or of the target.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The drafter could not be loaded.
    #[error("cannot load the drafter: {0}")]
    Engine(#[from] EngineError),
    /// The operating system refused the engine thread.
    #[error("cannot start the engine thread: {0}")]
    Thread(#[source] std::io::Error),
    /// The engine thread ended while the service was running, which is a fault of the program.
    #[error("the engine thread has stopped; see the log for its panic")]
    EngineStopped,
    /// The device failed for good while the service was running.
    #[error("{0}; restart the service")]
    DeviceLost(String),
}

/// What a verifier is told about a fault of the drafter.
pub(crate) fn service_error(error: &EngineError) -> ServiceError {
    let text = error.to_string();
    match error {
        EngineError::UnknownToken { .. } => ServiceError::invalid("token", text),
        EngineError::ContextOverflow { .. } => ServiceError::invalid("rows.ctx_end", text),
        EngineError::ContextGap { .. } => ServiceError::precondition("rows.ctx_start", text),
        EngineError::NoHead => ServiceError::precondition("propose.placement", text),
        EngineError::OutOfContexts(_) | EngineError::OutOfBlocks { .. } => {
            ServiceError::ResourceExhausted {
                what: text,
                retry_after: None,
            }
        }
        EngineError::OutOfDeviceMemory { .. } => ServiceError::ResourceExhausted {
            what: format!("device memory: {text}"),
            retry_after: None,
        },
        EngineError::DeviceLost(_) => ServiceError::unavailable(text),
        EngineError::Checkpoint(_)
        | EngineError::Device(_)
        | EngineError::DeviceNotBuilt(_)
        | EngineError::InvalidBatch(_)
        | EngineError::TooManyThreads { .. }
        | EngineError::UnavailableIsa(_)
        | EngineError::WeightMemory(_)
        | EngineError::Thread(_)
        | EngineError::UnknownContext(_)
        | EngineError::NonFiniteLogits { .. } => ServiceError::internal(text),
    }
}
