//! One transport profile for every service: limits, windows, keepalive, health, reflection and shutdown.

mod channel;
mod connection;
mod server;

use std::time::Duration;

use tonic::transport::Channel;

use crate::proto::{
    coordinator::v1::{
        coordinator_service_client::CoordinatorServiceClient,
        coordinator_service_server::{CoordinatorService, CoordinatorServiceServer},
    },
    draft::v1::{
        draft_service_client::DraftServiceClient,
        draft_service_server::{DraftService, DraftServiceServer},
    },
    verify::v1::{
        verify_service_client::VerifyServiceClient,
        verify_service_server::{VerifyService, VerifyServiceServer},
    },
};

pub use channel::channel;
pub use server::{DRAIN, bind, endpoint, local_addr, serve};

/// Largest message, in either direction: 32 MiB carry 2,048 feature rows of 4,096 floats.
pub const MAX_MESSAGE_BYTES: usize = 32 << 20;
/// HTTP/2 flow-control window of a stream: a proposal or a chunk of features goes out without waiting for an update.
const STREAM_WINDOW: u32 = 4 << 20;
/// HTTP/2 flow-control window of a connection.
const CONNECTION_WINDOW: u32 = 8 << 20;
/// How often an idle peer is asked whether it is still there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// How long it may take to answer.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a service cannot listen or a channel cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// Text that is not an endpoint.
    #[error("endpoint {endpoint:?} is {problem}; expected http://HOST:PORT")]
    InvalidEndpoint {
        /// The text.
        endpoint: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The port cannot be had.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address asked for.
        address: std::net::SocketAddr,
        /// The reason of the operating system.
        source: std::io::Error,
    },
    /// The operating system does not tell the port that was bound.
    #[error("cannot read the address that was bound: {0}")]
    LocalAddress(#[source] std::io::Error),
    /// The descriptor set built into the program cannot be served.
    #[error("server reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The server stopped on its own.
    #[error("gRPC server: {0}")]
    Server(#[from] tonic::transport::Error),
}

/// Mounts a coordinator under the message limits of the profile.
pub fn coordinator_server<S: CoordinatorService>(service: S) -> CoordinatorServiceServer<S> {
    CoordinatorServiceServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Mounts a drafter under the message limits of the profile.
pub fn draft_server<S: DraftService>(service: S) -> DraftServiceServer<S> {
    DraftServiceServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Mounts a verifier under the message limits of the profile.
pub fn verify_server<S: VerifyService>(service: S) -> VerifyServiceServer<S> {
    VerifyServiceServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Calls a coordinator under the message limits of the profile.
pub fn coordinator_client(channel: Channel) -> CoordinatorServiceClient<Channel> {
    CoordinatorServiceClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Calls a drafter under the message limits of the profile.
pub fn draft_client(channel: Channel) -> DraftServiceClient<Channel> {
    DraftServiceClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Calls a verifier under the message limits of the profile.
pub fn verify_client(channel: Channel) -> VerifyServiceClient<Channel> {
    VerifyServiceClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}
