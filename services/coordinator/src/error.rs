use treespec_checkpoint::CheckpointError;
use treespec_rpc::transport::TransportError;

/// Why a coordinator cannot start or go on.
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
    /// An endpoint that is none.
    #[error("{flag}: {source}")]
    Endpoint {
        /// The flag.
        flag: &'static str,
        /// What is wrong with its value.
        source: TransportError,
    },
    /// The tokenizer or the chat template cannot be read.
    #[error("--target: {0}")]
    Target(#[from] CheckpointError),
    /// The port cannot be had, or the server failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
}
