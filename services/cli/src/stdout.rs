//! Results on stdout.

use std::io::{self, Write as _};

use anyhow::{Context as _, Result};

/// The reader of stdout is gone, as in `treespec … | head`. Nobody needs to be told.
#[derive(Debug, thiserror::Error)]
#[error("stdout is closed")]
pub(crate) struct Closed;

/// Prints `text` now.
///
/// # Errors
/// [`Closed`], or why stdout can't be written.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Closed.into()),
        other => other.context("cannot write to stdout"),
    }
}

/// Prints `value` as one line of JSON.
///
/// # Errors
/// See [`print`].
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let mut line = serde_json::to_string(value).context("cannot write the result as JSON")?;
    line.push('\n');
    print(&line)
}
