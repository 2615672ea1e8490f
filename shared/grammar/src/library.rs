//! Where the grammar library's failures become errors of ours.

use std::fmt::Display;
use std::panic::AssertUnwindSafe;

use crate::GrammarError;

/// Most characters of the library's messages and of quoted sources that are shown.
const SHOWN: usize = 200;

/// Runs `call`, whose panics become errors. The library hooks the panics below its own guard, so that nothing is
/// printed.
pub(crate) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, GrammarError> {
    llguidance::panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(call())))
        .map_err(|error| failed(&error))
}

/// The error for a grammar that could be compiled but not followed.
pub(crate) fn failed(error: &dyn Display) -> GrammarError {
    let reason = one_line(error);
    // The library's name for a state in which nothing is legal.
    if reason == "NoExtensionBias" {
        return GrammarError::DeadEnd;
    }
    GrammarError::Failed { reason }
}

/// The first line of a message, shortened: backtraces, excerpts of grammars and parser states follow in others. Errors
/// of regular expressions have their reason in the last.
pub(crate) fn one_line(message: &dyn Display) -> String {
    let message = message.to_string();
    let first = message.lines().next().unwrap_or_default();
    let last = message.lines().next_back();
    let reason = last.and_then(|line| line.strip_prefix("error: "));
    shortened(reason.unwrap_or(first).trim_end())
}

/// The start of a text from outside.
pub(crate) fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_short_line() {
        assert_eq!(one_line(&"a b \nc"), "a b");
        assert_eq!(one_line(&""), "");
        assert_eq!(
            one_line(&"parse error:\n  (\n  ^\nerror: unclosed"),
            "unclosed"
        );
        let long = "é".repeat(SHOWN + 1);
        assert_eq!(one_line(&long).chars().count(), SHOWN + 3);
        assert_eq!(shortened(&long[..2 * SHOWN]), long[..2 * SHOWN]);
    }

    #[test]
    fn panics_are_errors() {
        let error = guarded(|| panic!("no\nluck")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the grammar cannot be followed further: panic: no"
        );
        assert_eq!(guarded(|| 3), Ok(3));
    }
}
