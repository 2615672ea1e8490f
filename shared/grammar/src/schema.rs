//! What is checked and set in a JSON schema before it is compiled.

use serde_json::{Map, Value, json};

use crate::{GrammarError, GrammarKind, library, schema_weight};

/// Most `patternProperties` of a schema, all objects together: the compiler compares the patterns of an object pair by
/// pair, and each comparison may take a fraction of a millisecond.
const MAX_PATTERNS: usize = 32;

/// Most bytes of all patterns: a derivative of an expression may hold as many parts as the expression has bytes.
const MAX_PATTERN_BYTES: usize = 8 << 10;

/// Most that a schema may become when its parts are merged; each unit takes the compiler some hundred bytes.
const MAX_WEIGHT: u64 = 4_000_000;

/// Most that a `multipleOf` may be when its decimal point is left out, and the product of all of a schema: the lexer has a
/// state for every remainder, and searches the products of those that meet. 100,000 take it 0.7 s.
const MAX_MULTIPLE: f64 = 100_000.0;

/// Where the library looks for its options.
const OPTIONS: &str = "x-guidance";

/// Refuses references to other documents, and schemas that would take the compiler too much time or memory.
pub(crate) fn check(schema: &Value) -> Result<(), GrammarError> {
    let mut patterns = 0;
    let mut pattern_bytes = 0;
    let mut multiples = 1.0;
    let mut open = vec![schema];
    while let Some(value) = open.pop() {
        match value {
            Value::Object(entries) => {
                if let Some(reference) = entries.get("$ref").and_then(Value::as_str)
                    && !reference.starts_with('#')
                {
                    return Err(GrammarError::ExternalReference {
                        reference: library::shortened(reference),
                    });
                }
                let pattern = entries.get("pattern").and_then(Value::as_str);
                pattern_bytes += pattern.map_or(0, str::len);
                if let Some(Value::Object(properties)) = entries.get("patternProperties") {
                    patterns += properties.len();
                    pattern_bytes += properties.keys().map(String::len).sum::<usize>();
                }
                multiples *= written_multiple(entries);
                if multiples > MAX_MULTIPLE {
                    return Err(too_large(format!(
                        "its values of multipleOf have a product above {MAX_MULTIPLE} without decimal points"
                    )));
                }
                let schemas = entries
                    .iter()
                    .filter(|(key, _)| !is_data(key))
                    .map(|(_, value)| value);
                open.extend(schemas);
            }
            Value::Array(values) => open.extend(values),
            _ => {}
        }
    }
    if patterns > MAX_PATTERNS {
        return Err(GrammarError::TooManyPatterns {
            count: patterns,
            limit: MAX_PATTERNS,
        });
    }
    if pattern_bytes > MAX_PATTERN_BYTES {
        return Err(too_large(format!(
            "its patterns have {pattern_bytes} bytes, at most {MAX_PATTERN_BYTES} are allowed"
        )));
    }
    if schema_weight::weight(schema) > MAX_WEIGHT {
        return Err(too_large(
            "allOf and unions with siblings multiply it beyond what is compiled".to_owned(),
        ));
    }
    Ok(())
}

/// A `multipleOf` without its decimal point; 1 where there is none.
fn written_multiple(entries: &Map<String, Value>) -> f64 {
    let Some(Value::Number(multiple)) = entries.get("multipleOf") else {
        return 1.0;
    };
    let digits: String = multiple
        .to_string()
        .chars()
        .take_while(|character| !matches!(character, 'e' | 'E'))
        .filter(char::is_ascii_digit)
        .collect();
    // Digits alone always parse.
    let written: f64 = digits.parse().unwrap_or(f64::INFINITY);
    written
        .max(multiple.as_f64().unwrap_or(f64::INFINITY))
        .max(1.0)
}

fn too_large(reason: String) -> GrammarError {
    GrammarError::Invalid {
        kind: GrammarKind::JsonSchema,
        reason,
    }
}

/// Keywords whose values are no schemas.
fn is_data(keyword: &str) -> bool {
    matches!(keyword, "const" | "default" | "enum" | "examples")
}

/// The schema with white space as Python's `json.dumps` writes it, so that most of it is forced and a sampled answer
/// cannot run into endless spaces. Options that the schema sets itself stay. The error is what is no schema.
pub(crate) fn with_compact_default(schema: Value) -> Result<Value, String> {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        // What the engine takes for true, with a place for options.
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => return Err("false matches nothing".to_owned()),
        other => {
            return Err(format!(
                "{} is neither an object nor a boolean",
                library::shortened(&other.to_string())
            ));
        }
    };
    let mut options = json!({
        "item_separator": ", ",
        "key_separator": ": ",
        "whitespace_flexible": false,
    });
    match schema.remove(OPTIONS) {
        None => {}
        Some(Value::Object(own)) => {
            for (option, value) in own {
                options[option] = value;
            }
        }
        Some(_) => return Err(format!("{OPTIONS} is not an object")),
    }
    schema.insert(OPTIONS.to_owned(), options);
    Ok(Value::Object(schema))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_checked_where_they_are_references() {
        let inside =
            json!({"properties": {"$ref": {"$ref": "#/$defs/a"}}, "enum": [{"$ref": "x"}]});
        assert_eq!(check(&inside), Ok(()));
        let outside = json!({"anyOf": [true, {"items": {"$ref": "https://example.com/a.json"}}]});
        let error = check(&outside).unwrap_err();
        assert!(matches!(error, GrammarError::ExternalReference { .. }));
    }

    #[test]
    fn patterns_are_counted_over_all_objects() {
        let patterns = |prefix: &str| -> Map<String, Value> {
            let names = 0..MAX_PATTERNS / 2 + 1;
            names
                .map(|name| (format!("{prefix}{name}"), json!(true)))
                .collect()
        };
        let one = json!({"patternProperties": patterns("a")});
        assert_eq!(check(&one), Ok(()));
        let two = json!({"items": one, "patternProperties": patterns("b")});
        let error = check(&two).unwrap_err();
        assert!(matches!(
            error,
            GrammarError::TooManyPatterns { count: 34, .. }
        ));
    }

    #[test]
    fn options_of_the_schema_win() {
        let schema = json!({"type": "null", "x-guidance": {"item_separator": ","}});
        let options = &with_compact_default(schema).unwrap()[OPTIONS];
        assert_eq!(options["item_separator"], ",");
        assert_eq!(options["key_separator"], ": ");
        assert_eq!(options["whitespace_flexible"], false);
    }
}
