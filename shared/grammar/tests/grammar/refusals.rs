//! Every refusal is one line that names what is wrong.

use std::path::Path;

use treespec_checkpoint::TextTokenizer;
use treespec_grammar::{GrammarCompiler, GrammarSource, MAX_CHOICES, MAX_SOURCE_BYTES};

use crate::vocabularies::fixture;

fn json(text: &str) -> GrammarSource {
    GrammarSource::JsonSchema(text.to_owned())
}

fn regex(text: &str) -> GrammarSource {
    GrammarSource::Regex(text.to_owned())
}

fn lark(text: &str) -> GrammarSource {
    GrammarSource::Lark(text.to_owned())
}

fn choices(texts: &[&str]) -> GrammarSource {
    GrammarSource::Choices(texts.iter().map(|&text| text.to_owned()).collect())
}

#[test]
fn sources_are_refused_by_what_is_wrong_with_them() {
    let long = "a".repeat(MAX_SOURCE_BYTES + 1);
    let cases = [
        (
            json("{"),
            "the JSON schema cannot be compiled: EOF while parsing",
        ),
        (json("3"), "3 is neither an object nor a boolean"),
        (json("false"), "false matches nothing"),
        (json(r#"{"type": "text"}"#), "Invalid type: text"),
        (json(r#"{"not": {}}"#), "Unimplemented keys: [\"not\"]"),
        (
            json(r#"{"$ref": "https://example.com/x.json"}"#),
            "$ref \"https://example.com/x.json\" leads out",
        ),
        (json(r##"{"$ref": "#/$defs/x"}"##), "#/$defs/x"),
        (json(r#"{"x-guidance": 1}"#), "x-guidance is not an object"),
        (
            json(r#"{"x-guidance": {"spacing": 1}}"#),
            "unknown field `spacing`",
        ),
        (
            json(r#"{"type": "number", "multipleOf": 9999991}"#),
            "multipleOf have a product above 100000",
        ),
        (
            json(r#"{"allOf": [{"multipleOf": 1009}, {"multipleOf": 10.07}]}"#),
            "multipleOf have a product above 100000",
        ),
        (
            json(r#"{"type": "string", "minLength": 3, "maxLength": 2}"#),
            "minLength (3)",
        ),
        (
            json(&long),
            "the JSON schema has 65537 bytes, at most 65536",
        ),
        (
            regex("a("),
            "the regular expression cannot be compiled: unclosed group",
        ),
        (regex("a\\"), "incomplete escape sequence"),
        (regex("a^b"), "lookarounds not supported"),
        (
            regex("[^\\s\\S]"),
            "no token of the vocabulary can continue",
        ),
        (
            regex(&long),
            "the regular expression has 65537 bytes, at most 8192",
        ),
        (choices(&[]), "there are no choices"),
        (choices(&["a", ""]), "choice 1 is empty"),
        (
            choices(&["a", "b", "a"]),
            "choice 2 repeats choice 0: \"a\"",
        ),
        (choices(&[&long]), "the list of choices has 65537 bytes"),
        (
            GrammarSource::Choices(vec!["a".to_owned(); MAX_CHOICES + 1]),
            "there are 4097 choices, at most 4096",
        ),
        (
            lark(""),
            "the Lark grammar cannot be compiled: no start rule",
        ),
        (lark("start: \"a\" other\n"), "unknown name: \"other\""),
        (lark("start: \"a\n"), "lexer error"),
        (
            lark("start: <|tool|>\n"),
            "unknown special token: \"<|tool|>\"",
        ),
        (
            lark("start: %json {\"$ref\": \"file:///x\"}\n"),
            "$ref \"file:///x\" leads out",
        ),
        (lark(&long), "the Lark grammar has 65537 bytes"),
    ];
    for (source, expected) in cases {
        let message = fixture().compiler.compile(&source).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        assert!(!message.contains('\n') && message.len() < 400, "{message}");
    }
}

#[test]
fn models_without_an_end_are_refused() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/cases/03_qwen3_headdim/model"
    );
    let tokenizer = TextTokenizer::open(Path::new(path)).unwrap();
    let refusal = |vocab_size: usize, eos: &[u32]| {
        let refused = GrammarCompiler::new(&tokenizer, vocab_size, eos);
        refused.unwrap_err().to_string()
    };
    assert!(refusal(832, &[]).contains("no end-of-sequence token"));
    assert!(refusal(832, &[7, 832]).contains("token id 832 is outside the vocabulary of 832"));
    assert!(refusal(1 << 24, &[7]).contains("16777216 ids"));
}
