//! The wire of treespec: generated gRPC code, conversions between messages and domain types, and one transport
//! profile for every service.

pub mod convert;
pub mod handshake;
pub mod health;
pub mod proto;
pub mod status;
pub mod transport;

pub use status::ServiceError;
