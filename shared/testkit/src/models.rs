//! Where the default models are.

use std::env;
use std::path::{Path, PathBuf};

/// The default target: `TREESPEC_TARGET`, or the file that `make models` fetches. It may be missing.
pub fn default_target() -> PathBuf {
    env::var_os("TREESPEC_TARGET").map_or_else(
        || repository("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    )
}

/// The drafter of the default target; it is part of the repository.
pub fn default_drafter() -> PathBuf {
    repository("deploy/models/smollm2-135m-instruct-dflash")
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// False, with the reason printed, when the target has not been fetched. CI allows no skips.
///
/// # Panics
/// When it is missing under CI.
#[expect(clippy::print_stderr, reason = "a skipped test says so")]
pub fn is_there(target: &Path) -> bool {
    if target.exists() {
        return true;
    }
    let reason = format!("{} is missing: make models fetches it", target.display());
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{reason}");
    eprintln!("skipped: {reason}");
    false
}
