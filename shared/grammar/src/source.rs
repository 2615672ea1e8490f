//! What an answer may be asked to follow.

use std::collections::HashMap;
use std::fmt;

use llguidance::api::TopLevelGrammar;
use llguidance::derivre::RegexBuilder;
use serde_json::Value;

use crate::{GrammarError, library, schema};

/// Most bytes of a source; of choices, all together. The cost of compiling a hostile source grows faster than its length.
pub const MAX_SOURCE_BYTES: usize = 64 << 10;

/// Most bytes of a regular expression. A step through `a?a?a?...` takes time and memory with the square of its length.
pub const MAX_REGEX_BYTES: usize = 8 << 10;

/// Most choices.
pub const MAX_CHOICES: usize = 4096;

/// What an answer must follow.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum GrammarSource {
    /// A JSON schema. Between tokens of JSON there is no white space but one space after `,` and `:`, unless the schema
    /// has an `x-guidance` object that says otherwise (`whitespace_flexible`, `item_separator`, `key_separator`, ...).
    JsonSchema(String),
    /// A regular expression in Rust's syntax that the whole answer matches; `^` and `$` at its ends are allowed.
    Regex(String),
    /// The answer is one of these texts.
    Choices(Vec<String>),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
}

/// The kinds of [`GrammarSource`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrammarKind {
    /// A JSON schema.
    JsonSchema,
    /// A regular expression.
    Regex,
    /// A list of texts.
    Choices,
    /// A Lark grammar.
    Lark,
}

impl fmt::Display for GrammarKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::JsonSchema => "JSON schema",
            Self::Regex => "regular expression",
            Self::Choices => "list of choices",
            Self::Lark => "Lark grammar",
        })
    }
}

impl GrammarSource {
    /// The kind.
    pub fn kind(&self) -> GrammarKind {
        match self {
            Self::JsonSchema(_) => GrammarKind::JsonSchema,
            Self::Regex(_) => GrammarKind::Regex,
            Self::Choices(_) => GrammarKind::Choices,
            Self::Lark(_) => GrammarKind::Lark,
        }
    }

    /// The source as the library takes it.
    pub(crate) fn to_grammar(&self) -> Result<TopLevelGrammar, GrammarError> {
        self.check_size()?;
        match self {
            Self::JsonSchema(text) => {
                let schema = serde_json::from_str(text).map_err(|error| self.invalid(&error))?;
                schema::check(&schema)?;
                let schema =
                    schema::with_compact_default(schema).map_err(|at| self.invalid(&at))?;
                Ok(TopLevelGrammar::from_json_schema(schema))
            }
            Self::Regex(regex) => {
                let regex = unanchored(regex);
                // The library's own conversion drops a backslash at the end, and its error starts with the expression.
                let parsed = library::guarded(|| RegexBuilder::new().mk_regex(regex))?;
                parsed.map_err(|error| self.invalid(&error))?;
                Ok(TopLevelGrammar::from_regex(regex))
            }
            Self::Choices(choices) => {
                check_choices(choices)?;
                Ok(TopLevelGrammar::from_lark(choices_as_lark(choices)))
            }
            Self::Lark(text) => {
                for schema in embedded_schemas(text) {
                    schema::check(&schema)?;
                }
                Ok(TopLevelGrammar::from_lark(text.clone()))
            }
        }
    }

    /// How much the lexer's expressions may cost, in the library's units (50,000 take a millisecond). A Lark grammar can
    /// double a terminal line by line, to costs that only this limits; its own words and patterns are few.
    pub(crate) fn lexer_fuel(&self) -> u64 {
        match self {
            Self::Lark(_) => 25_000,
            Self::JsonSchema(_) | Self::Regex(_) | Self::Choices(_) => 300_000,
        }
    }

    /// The error that names this source and, shortened to one line, the reason.
    pub(crate) fn invalid(&self, reason: &dyn fmt::Display) -> GrammarError {
        GrammarError::Invalid {
            kind: self.kind(),
            reason: library::one_line(reason),
        }
    }

    fn check_size(&self) -> Result<(), GrammarError> {
        let bytes = match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choices(choices) => choices.iter().map(String::len).sum(),
        };
        let limit = match self {
            Self::Regex(_) => MAX_REGEX_BYTES,
            _ => MAX_SOURCE_BYTES,
        };
        if bytes > limit {
            let kind = self.kind();
            return Err(GrammarError::SourceTooLarge { kind, bytes, limit });
        }
        Ok(())
    }
}

/// The expression without the anchors that say what holds anyway: it matches the whole answer.
fn unanchored(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        // An odd number of backslashes before it makes the dollar sign a character.
        Some(rest) if (rest.len() - rest.trim_end_matches('\\').len()) % 2 == 0 => rest,
        _ => regex,
    }
}

fn check_choices(choices: &[String]) -> Result<(), GrammarError> {
    if choices.is_empty() {
        return Err(GrammarError::NoChoices);
    }
    if choices.len() > MAX_CHOICES {
        return Err(GrammarError::TooManyChoices {
            count: choices.len(),
        });
    }
    let mut seen = HashMap::with_capacity(choices.len());
    for (index, choice) in choices.iter().enumerate() {
        if choice.is_empty() {
            return Err(GrammarError::EmptyChoice { index });
        }
        if let Some(first) = seen.insert(choice, index) {
            return Err(GrammarError::RepeatedChoice {
                index,
                first,
                choice: library::shortened(choice),
            });
        }
    }
    Ok(())
}

/// One terminal, so that the lexer sees all choices at once. Characters that Lark's strings cannot hold are escaped.
fn choices_as_lark(choices: &[String]) -> String {
    let literals: Vec<String> = choices
        .iter()
        .map(|choice| {
            Value::from(choice.as_str())
                .to_string()
                .replace('\u{7F}', "\\u007f")
        })
        .collect();
    format!("start: CHOICE\nCHOICE: {}\n", literals.join(" | "))
}

/// The JSON schemas inside a Lark grammar. They follow the keyword at once, wherever it stands; what is no JSON there is
/// left to the compiler to refuse.
fn embedded_schemas(lark: &str) -> impl Iterator<Item = Value> + '_ {
    const KEYWORD: &str = "%json";
    lark.match_indices(KEYWORD).filter_map(|(at, _)| {
        let rest = &lark[at + KEYWORD.len()..];
        let mut values = serde_json::Deserializer::from_str(rest).into_iter();
        values.next()?.ok()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn anchors_at_the_ends_are_dropped_and_nothing_else() {
        for (regex, expected) in [
            ("^a$", "a"),
            ("a", "a"),
            ("^", ""),
            (r"a\$", r"a\$"),
            (r"a\\$", r"a\\"),
            (r"\^a$", r"\^a"),
            ("", ""),
        ] {
            assert_eq!(unanchored(regex), expected);
        }
    }

    #[test]
    fn schemas_inside_lark_are_found() {
        let lark = r#"start: a b // %json comment
            a: %json {"title": "%json", "type": "null"} "x"
            b: %json {"type":"#;
        let found: Vec<Value> = embedded_schemas(lark).collect();
        let expected = [json!({"title": "%json", "type": "null"}), json!(", ")];
        assert_eq!(found, expected);
    }
}
