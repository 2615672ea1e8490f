//! Random legal tokens until the answer ends: whatever comes out follows the source.

use std::ops::Range;

use proptest::prelude::*;
use serde_json::Value;
use treespec_grammar::{GrammarError, GrammarSource};
use treespec_sampling::TokenMask;

use crate::vocabularies::{Model, fixture, smollm};

const PERSON: &str = r##"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/home"}
    },
    "required": ["name", "age", "home"],
    "additionalProperties": false,
    "$defs": {"home": {"anyOf": [{"type": "null"}, {
        "type": "object",
        "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "flat": {"type": "boolean"}},
        "required": ["zip"],
        "additionalProperties": false
    }]}}
}"##;

/// Tokens of a mask.
pub(crate) fn legal(mask: &TokenMask) -> Vec<u32> {
    let words = mask.words().len() as u32;
    (0..words * 32)
        .filter(|&token| mask.contains(token))
        .collect()
}

/// A legal answer, chosen uniformly among the legal tokens at every step.
fn walk(model: &Model, source: &GrammarSource, seed: u64) -> String {
    let mut grammar = model.compile(source);
    let mut random = seed;
    let mut ids = Vec::new();
    while !grammar.is_finished() {
        let legal = legal(&grammar.mask().unwrap());
        assert!(!legal.is_empty() && ids.len() < 2000);
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let token = legal[(random >> 33) as usize % legal.len()];
        grammar.accept(token).unwrap();
        ids.push(token);
    }
    assert!(model.eos.contains(ids.last().unwrap()));
    model.text(&ids)
}

/// Walks over the fixture's vocabulary, and over the default model's where it is there.
fn answers(source: &GrammarSource, seed: u64) -> impl Iterator<Item = String> {
    [Some(fixture()), smollm()]
        .into_iter()
        .flatten()
        .map(move |model| walk(model, source, seed))
}

fn is_person(person: &Value) -> bool {
    let known = ["name", "age", "tags", "home"];
    let entries = person.as_object().unwrap();
    let length = person["name"].as_str().unwrap().chars().count();
    let tags = person
        .get("tags")
        .map_or(&[][..], |tags| tags.as_array().unwrap());
    entries.keys().all(|key| known.contains(&key.as_str()))
        && has_length(length, 1..13)
        && person["age"].as_u64().unwrap() <= 120
        && tags.len() <= 3
        && tags
            .iter()
            .all(|tag| ["red", "green", "blue"].contains(&tag.as_str().unwrap()))
        && is_home(&person["home"])
}

fn has_length(length: usize, allowed: Range<usize>) -> bool {
    allowed.contains(&length)
}

fn is_home(home: &Value) -> bool {
    let Some(entries) = home.as_object() else {
        return home.is_null();
    };
    let zip = home["zip"].as_str().unwrap();
    entries.keys().all(|key| key == "zip" || key == "flat")
        && zip.len() == 5
        && zip.bytes().all(|digit| digit.is_ascii_digit())
        && home.get("flat").is_none_or(Value::is_boolean)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn json_is_valid_and_has_no_superfluous_space(seed in any::<u64>()) {
        for text in answers(&GrammarSource::JsonSchema(PERSON.to_owned()), seed) {
            let person: Value = serde_json::from_str(&text).unwrap();
            prop_assert!(is_person(&person), "{}", text);
            prop_assert!(text.starts_with("{\"name\": \"") && text.contains(", \"age\": "), "{}", text);
        }
    }

    #[test]
    fn a_regex_matches_the_whole_answer(seed in any::<u64>()) {
        let source = GrammarSource::Regex("^(?:[a-c]{2,4}-)?[0-9]{1,3}é?$".to_owned());
        for text in answers(&source, seed) {
            let rest = text.strip_suffix('é').unwrap_or(&text);
            let (letters, digits) = rest.rsplit_once('-').unwrap_or(("ab", rest));
            prop_assert!((2..=4).contains(&letters.len()) && letters.bytes().all(|b| (b'a'..=b'c').contains(&b)));
            prop_assert!((1..=3).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit()));
        }
    }

    #[test]
    fn a_choice_is_one_of_them(seed in any::<u64>()) {
        let choices = ["yes", "no", "\"quoted\\\"", "//\n\t", "yes, but", "\u{7f}\u{0}", "漢字 😀", "/a|b/ # c"];
        let choices: Vec<String> = choices.map(str::to_owned).to_vec();
        for text in answers(&GrammarSource::Choices(choices.clone()), seed) {
            prop_assert!(choices.contains(&text), "{:?}", text);
        }
    }

    #[test]
    fn lark_rules_are_followed(seed in any::<u64>()) {
        let source = GrammarSource::Lark("start: NUMBER (OPERATOR NUMBER)~1..3\nNUMBER: /[0-9]{1,2}/\nOPERATOR: \"+\" | \"*\"\n".to_owned());
        for text in answers(&source, seed) {
            let numbers: Vec<&str> = text.split(['+', '*']).collect();
            prop_assert!((2..=4).contains(&numbers.len()), "{}", text);
            prop_assert!(numbers.iter().all(|number| number.parse::<u8>().is_ok_and(|value| value < 100)));
        }
    }
}

/// What the source allows and what it does not, token by token.
fn check(model: &Model, source: &GrammarSource, right: &[&str], wrong: &[&str]) {
    for (text, expected) in right
        .iter()
        .map(|&text| (text, true))
        .chain(wrong.iter().map(|&text| (text, false)))
    {
        let mut grammar = model.compile(source);
        let mut accepted = true;
        for token in model.ids(text).into_iter().chain([model.eos[0]]) {
            let mask = grammar.mask().unwrap();
            let is_legal = mask.contains(token);
            match grammar.accept(token) {
                // A piece of forced text is no choice, but nothing wrong either.
                Ok(()) => assert!(is_legal || legal(&mask).len() == 1, "{text:?}: {token}"),
                Err(error) => {
                    assert_eq!(error, GrammarError::Refused { token });
                    assert!(!is_legal, "{text:?}: {token}");
                    accepted = false;
                    break;
                }
            }
        }
        assert_eq!(accepted, expected, "{text:?}");
        assert_eq!(grammar.is_finished(), expected);
    }
}

#[test]
fn every_kind_accepts_what_it_should_and_refuses_the_rest() {
    for model in [Some(fixture()), smollm()].into_iter().flatten() {
        check(
            model,
            &GrammarSource::JsonSchema(PERSON.to_owned()),
            &[
                r#"{"name": "Ada", "age": 36, "home": null}"#,
                r#"{"name": "é", "age": 0, "tags": ["red", "blue"], "home": {"zip": "12345"}}"#,
            ],
            &[
                r#"{"name":"Ada", "age": 36, "home": null}"#,
                r#"{"name": "Ada", "age": 121, "home": null}"#,
                r#"{"name": "Ada", "age": 36}"#,
                r#"{"name": "Ada", "age": 36, "home": null} "#,
                r#"{"name": "Ada", "age": 36, "home": {"zip": "1234"}}"#,
            ],
        );
        let regex = GrammarSource::Regex("a+b?|c/d".to_owned());
        check(
            model,
            &regex,
            &["a", "aaab", "c/d"],
            &["", "b", "ab ", "xa", "c/"],
        );
        let choices = GrammarSource::Choices(vec!["no".to_owned(), "none".to_owned()]);
        check(
            model,
            &choices,
            &["no", "none"],
            &["", "n", "non", "nones", "No"],
        );
        let lark = GrammarSource::Lark("start: \"(\" start \")\" | \"x\"\n".to_owned());
        check(model, &lark, &["x", "((x))"], &["(x", "x)", "()"]);
    }
}

#[test]
fn the_schemas_own_spacing_wins() {
    let compact = r#"{"type": "array", "items": {"type": "integer"},
        "x-guidance": {"item_separator": ","}}"#;
    let source = GrammarSource::JsonSchema(compact.to_owned());
    check(fixture(), &source, &["[1,2]", "[]"], &["[1, 2]", "[ 1]"]);
    let flexible = r#"{"type": "array", "items": {"type": "integer"},
        "x-guidance": {"item_separator": ",", "whitespace_flexible": true}}"#;
    let source = GrammarSource::JsonSchema(flexible.to_owned());
    check(fixture(), &source, &["[1,2]", "[ 1 ,  2 ]"], &["[1 2]"]);
    let anything = GrammarSource::JsonSchema("true".to_owned());
    check(
        fixture(),
        &anything,
        &["[1, {}]", "\"x\"", "null"],
        &["[1,2]", "nul"],
    );
}
