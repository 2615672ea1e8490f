//! Checkpoints that must not load.

use serde::Deserialize;

/// `malformed/malformed.json`
#[derive(Debug, Deserialize)]
pub struct Malformed {
    /// Broken inputs.
    pub cases: Vec<MalformedCase>,
}

/// One broken input. Paths are relative to `malformed/`.
#[derive(Debug, Deserialize)]
pub struct MalformedCase {
    /// For example `01_missing_tensor`.
    pub name: String,
    /// `target`, `gguf` or `drafter`.
    pub kind: String,
    /// Target.
    pub model: String,
    /// Drafter, where that is what is broken.
    pub drafter: Option<String>,
    /// What the error must name.
    pub should_mention: Vec<String>,
}
