//! The coordinator against a scripted verify service on loopback.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod bad_input;
mod deadlines;
mod endings;
mod failover;
mod fake_verify;
mod harness;
mod health;
mod saturation;
mod streams;
