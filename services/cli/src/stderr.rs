//! Remarks for a person on stderr. Unlike `eprintln!`, a closed or full stderr is no reason to panic: the remark is lost.

use std::io::{self, Write as _};

/// Writes `text` as it is.
pub(crate) fn print(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr
        .write_all(text.as_bytes())
        .and_then(|()| stderr.flush());
}

/// Writes `text` and a line break.
pub(crate) fn print_line(text: &str) {
    print(&format!("{text}\n"));
}
