//! Stop strings, found across the borders of tokens and deltas.

/// Looks for the strings that end an answer in text that comes in pieces. How it is cut into pieces makes no difference.
///
/// Text that may be the beginning of a stop string is held back until it is clear.
#[derive(Debug, Clone, Default)]
pub(crate) struct StopStrings {
    strings: Vec<String>,
    /// The text goes up to the end of the string, not to its beginning.
    include: bool,
    /// The end of the text so far, which is a beginning of some stop string.
    held: String,
}

/// What a piece of text did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Scan {
    /// Text that can be given out now.
    pub(crate) text: String,
    /// The string that ends the answer.
    pub(crate) stopped: Option<String>,
}

impl StopStrings {
    /// None of the strings is empty.
    pub(crate) fn new(strings: Vec<String>, include: bool) -> Self {
        Self {
            strings,
            include,
            held: String::new(),
        }
    }

    /// True when the text ends by itself only.
    pub(crate) fn is_empty(&self) -> bool {
        self.strings.is_empty()
    }

    /// Takes the next piece of the text. The string that is complete first ends it, the longest of those that are complete
    /// at the same place; with `may_stop` false it passes as text.
    pub(crate) fn push(&mut self, piece: &str, may_stop: bool) -> Scan {
        let mut text = std::mem::take(&mut self.held);
        let held = text.len();
        text.push_str(piece);
        if may_stop && let Some((start, string)) = self.first_match(&text, held) {
            let string = string.to_owned();
            let end = start + string.len();
            text.truncate(if self.include { end } else { start });
            return Scan {
                text,
                stopped: Some(string),
            };
        }
        self.held = text.split_off(text.len() - self.beginning(&text));
        Scan {
            text,
            stopped: None,
        }
    }

    /// The text ends here: what was held back is text after all.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The string that is complete first among those that are not complete in the first `before` bytes of the text.
    fn first_match(&self, text: &str, before: usize) -> Option<(usize, &str)> {
        let matches = self.strings.iter().filter_map(|string| {
            let earliest = (before + 1).saturating_sub(string.len());
            let from = (earliest..=text.len()).find(|&start| text.is_char_boundary(start))?;
            let start = from + text[from..].find(string.as_str())?;
            Some((start, string.as_str()))
        });
        matches.min_by_key(|(start, string)| (start + string.len(), *start))
    }

    /// Bytes of the longest end of `text` that is a beginning of a stop string, not all of it.
    fn beginning(&self, text: &str) -> usize {
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0);
        let first = text.len().saturating_sub(longest.saturating_sub(1));
        (first..text.len())
            .filter(|&start| text.is_char_boundary(start))
            .map(|start| &text[start..])
            .find(|end| {
                let begins = |string: &String| string.len() > end.len() && string.starts_with(end);
                self.strings.iter().any(begins)
            })
            .map_or(0, str::len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(strings: &[String], include: bool, pieces: &[&str]) -> (String, Option<String>) {
        let mut stops = StopStrings::new(strings.to_vec(), include);
        let mut text = String::new();
        for piece in pieces {
            let scan = stops.push(piece, true);
            text += &scan.text;
            if scan.stopped.is_some() {
                return (text, scan.stopped);
            }
        }
        text += &stops.finish();
        (text, None)
    }

    fn strings(strings: &[&str]) -> Vec<String> {
        strings.iter().map(|&string| string.to_owned()).collect()
    }

    #[test]
    fn a_string_across_pieces_ends_the_text_before_it_or_behind_it() {
        let stops = strings(&["\n\nUser:"]);
        let pieces = ["Yes.\n", "\nUs", "er: more"];
        let stopped = Some("\n\nUser:".to_owned());
        assert_eq!(
            run(&stops, false, &pieces),
            ("Yes.".to_owned(), stopped.clone())
        );
        assert_eq!(
            run(&stops, true, &pieces),
            ("Yes.\n\nUser:".to_owned(), stopped)
        );
        let apart = ["Yes.\n", "\nUs", "ers"];
        assert_eq!(
            run(&stops, false, &apart),
            ("Yes.\n\nUsers".to_owned(), None)
        );
    }

    #[test]
    fn the_string_that_is_complete_first_wins_and_the_longest_of_those() {
        let stops = strings(&["abcd", "bc", "c"]);
        assert_eq!(
            run(&stops, false, &["xabcd"]),
            ("xa".to_owned(), Some("bc".to_owned()))
        );
    }

    #[test]
    fn a_match_that_may_not_stop_passes_and_a_later_one_may_overlap_it() {
        let mut stops = StopStrings::new(strings(&["aa"]), false);
        assert_eq!(stops.push("xaa", false).text, "xa");
        let scan = stops.push("a", true);
        assert_eq!(
            (scan.text.as_str(), scan.stopped.as_deref()),
            ("", Some("aa"))
        );
    }

    #[test]
    fn a_match_that_passed_is_not_found_again_in_text_that_is_held() {
        let mut stops = StopStrings::new(strings(&["a", "aab"]), false);
        assert_eq!(stops.push("aa", false).text, "");
        assert_eq!(stops.push("b", true).stopped.as_deref(), Some("aab"));
    }

    /// The definition: the shortest beginning of the text that ends with a stop string.
    fn by_definition(strings: &[String], include: bool, text: &str) -> (String, Option<String>) {
        for (end, _) in text.char_indices().skip(1).chain([(text.len(), ' ')]) {
            let before = &text[..end];
            let longest = strings
                .iter()
                .filter(|string| before.ends_with(string.as_str()))
                .max_by_key(|string| string.len());
            if let Some(string) = longest {
                let kept = if include { end } else { end - string.len() };
                return (text[..kept].to_owned(), Some(string.clone()));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(
            stops in prop::collection::vec("[abü]{1,4}", 0..4),
            text in "[abcü]{0,30}",
            cuts in prop::collection::vec(0usize..30, 0..8),
            include in any::<bool>(),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|&cut| text.is_char_boundary(cut)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(run(&stops, include, &pieces), by_definition(&stops, include, &text));
        }
    }
}
