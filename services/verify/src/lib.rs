//! The target: prefill, tree verification, acceptance and KV, as a gRPC service.
//!
//! * [`forward`](forward) owns the model on a thread of its own; all work waiting at one moment goes into one ragged
//!   forward.
//! * [`sequence`](sequence) decodes one request: prefill, then draft, verify, commit until it ends.
//! * `token_choice` moves the rules of one request's tokens on: counts for penalties, and the state of its grammar.
//! * [`drafting`](drafting) talks to drafters. Losing one is never an error of a request.
//! * With `--draft-placement local` the model hosts its drafter, and `forward` runs a whole step in one call.
//!
//! Verify is the only source of truth for committed tokens.

#![cfg_attr(
    test,
    allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")
)]

mod config;
mod drafting;
mod engine;
mod error;
mod forward;
mod grammars;
mod kv_reservation;
mod loading;
mod logprobs;
mod request;
mod sequence;
mod server;
mod service;
mod statistics;
mod token_choice;

pub use config::{Config, DraftPlacement, TopkPlacement};
pub use error::Error;
pub use loading::{LoadedModel, LoadedTarget, load, load_speculator, load_target};
pub use server::{Server, run};
