//! Reference cases of `tests/fixtures` (see the README there), read once and typed.

mod default_models;
mod malformed;
mod reference;
mod tokenizer;

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

pub use default_models::{DefaultModelsReference, ReferenceAnswer};
pub use malformed::{Malformed, MalformedCase};
pub use reference::{
    DraftPosition, DraftTree, DrafterExpected, DrafterMeta, Expected, ExpectedPrompt, Round, Run,
    TopTokens, TreeForward,
};
pub use tokenizer::{ChatCase, ChatTurn, EncodeCase, TokenizerCases};

/// Cases whose architecture this build runs.
pub const DENSE_CASES: [&str; 2] = ["01_llama_gqa_tied", "03_qwen3_headdim"];

/// Largest difference of a log-probability to the f32 reference.
pub const TOLERANCE: f32 = 1e-3;

/// A path below `tests/fixtures`.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(path)
}

/// A path below `tests/fixtures/cases/<case>`.
pub fn case_path(case: &str, file: &str) -> PathBuf {
    fixture("cases").join(case).join(file)
}

/// A JSON file of a case.
///
/// # Panics
/// When it is missing or has another form.
pub fn case_json<T: DeserializeOwned>(case: &str, file: &str) -> T {
    read_json(&case_path(case, file))
}

/// Any JSON file.
///
/// # Panics
/// When it is missing or has another form.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> T {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
