//! The CPU engine against the f32 reference: forwards of trees, drafter slots, trees node by node, and row
//! invariance by bits.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod distribution;
mod drafter_reference;
mod harness;
mod row_invariance;
mod sampled_steps;
mod steps;
mod target_reference;
mod tree_properties;
