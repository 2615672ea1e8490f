//! Coordinator, verifiers and drafters over gRPC, with the fixtures' models and with the default ones.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod bad_requests;
mod cancellation;
mod concurrency;
mod constraints;
mod default_models;
mod drafter_loss;
mod endings;
mod fuzzing;
mod greedy;
mod health;
mod local_drafter;
mod logprobs;
mod lossless;
mod malformed;
mod models;
mod reflection;
mod rounds;
mod rules;
mod text;
mod verifier_loss;
