//! The draft service over real gRPC on loopback, with a scripted drafter.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod handshake;
mod lifecycle;
mod proposals;
mod real_drafter;
mod scripted;
mod verifier;
mod violations;
