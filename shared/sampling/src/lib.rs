//! How the next token is chosen: parameters with their ranges, and greedy choice.
//!
//! Pure: no I/O, no tensors, no async.

mod greedy;
mod params;

pub use greedy::{ScoredToken, greedy};
pub use params::{SamplingError, SamplingParams};
