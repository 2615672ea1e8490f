//! Tokenizers: the fixtures' cases, vocabularies from GGUF metadata, errors.

use treespec_checkpoint::{CheckpointError, TextTokenizer};

use crate::fixtures;
use crate::gguf_targets::tiny;
use crate::gguf_writer::{Gguf, Meta, text};

#[test]
fn fixture_texts_are_encoded_and_decoded() {
    for case in fixtures::CASES {
        let tokenizer = TextTokenizer::open(&fixtures::model(case)).unwrap();
        for expected in fixtures::tokenizer_cases(case)["encode"]
            .as_array()
            .unwrap()
        {
            let text = expected["text"].as_str().unwrap();
            let with = fixtures::ids(&expected["ids_with_special"]);
            let without = fixtures::ids(&expected["ids_without_special"]);
            assert_eq!(
                tokenizer.encode(text, true).unwrap(),
                with,
                "{case}: {text:?}"
            );
            assert_eq!(
                tokenizer.encode(text, false).unwrap(),
                without,
                "{case}: {text:?}"
            );
            let keep = tokenizer.decode(&without, false).unwrap();
            let skip = tokenizer.decode(&without, true).unwrap();
            assert_eq!(keep, expected["decoded_keep_special"].as_str().unwrap());
            assert_eq!(skip, expected["decoded_skip_special"].as_str().unwrap());
        }
    }
}

#[test]
fn padding_ids_are_empty_and_unknown_ids_an_error() {
    let tokenizer = TextTokenizer::open(&fixtures::model("03_qwen3_headdim")).unwrap();
    assert_eq!(tokenizer.vocab_size(), 800);
    assert_eq!(tokenizer.decode(&[800, 39, 831], false).unwrap(), "H");
    let error = tokenizer.decode(&[39, 832], false).unwrap_err();
    assert!(
        matches!(
            error,
            CheckpointError::UnknownToken {
                id: 832,
                vocab_size: 832
            }
        ),
        "{error}"
    );
    assert!(
        tokenizer.is_special(798) && !tokenizer.is_special(39) && !tokenizer.is_special(u32::MAX)
    );
    assert_eq!(tokenizer.token_id("<|im_end|>"), Some(798));
}

#[test]
fn a_gguf_vocabulary_equals_its_hugging_face_twin() {
    let gguf = TextTokenizer::open(&fixtures::path("malformed/_control_ok/model.gguf")).unwrap();
    let directory = TextTokenizer::open(&fixtures::path("malformed/_control_ok/model")).unwrap();
    assert_eq!(gguf.fingerprint(), directory.fingerprint());
    for text in [
        "Hello, world! It's 12345.",
        "naïve café — 漢字 😀",
        "   a  b\n\n\tc ",
        "x</s>y[INST]",
        "",
    ] {
        for add_special in [false, true] {
            let ids = directory.encode(text, add_special).unwrap();
            assert_eq!(gguf.encode(text, add_special).unwrap(), ids, "{text:?}");
            assert_eq!(
                gguf.decode(&ids, false).unwrap(),
                directory.decode(&ids, false).unwrap()
            );
        }
    }
    let other = TextTokenizer::open(&fixtures::model("01_llama_gqa_tied")).unwrap();
    assert_ne!(other.fingerprint(), directory.fingerprint());
}

/// A vocabulary of all printable ASCII characters and space, plus the tokens "12", "123", " a" and two added ones.
fn ascii(pre: &str) -> Gguf {
    let mut tokens: Vec<String> = ('!'..='~').map(String::from).collect();
    tokens.extend(["Ġ", "12", "123", "Ġa", "<|end|>", "<think>"].map(str::to_owned));
    let mut types = vec![1; tokens.len() - 2];
    types.extend([3, 4]);
    let mut gguf = tiny("llama");
    gguf.set("tokenizer.ggml.pre", text(pre));
    gguf.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    gguf.set("tokenizer.ggml.token_type", Meta::I32s(types));
    let merges = ["1 2", "12 3", "Ġ a"].map(str::to_owned).to_vec();
    gguf.set("tokenizer.ggml.merges", Meta::Texts(merges));
    gguf
}

fn pieces(gguf: &Gguf, text: &str, add_special: bool) -> Vec<String> {
    let file = gguf.save();
    let tokenizer = TextTokenizer::open(file.path()).unwrap();
    let ids = tokenizer.encode(text, add_special).unwrap();
    ids.iter()
        .map(|&id| tokenizer.decode(&[id], false).unwrap())
        .collect()
}

#[test]
fn the_declared_pre_tokenizer_decides_about_digits() {
    for (pre, expected) in [
        ("gpt-2", vec!["x", "123", "4", " a"]),
        ("default", vec!["x", "123", "4", " a"]),
        ("smollm", vec!["x", "1", "2", "3", "4", " a"]),
        ("qwen2", vec!["x", "1", "2", "3", "4", " a"]),
        ("llama-bpe", vec!["x", "123", "4", " a"]),
        ("llama3", vec!["x", "123", "4", " a"]),
    ] {
        let mut gguf = ascii(pre);
        gguf.set("tokenizer.ggml.add_bos_token", Meta::Bool(false));
        assert_eq!(pieces(&gguf, "x1234 a", true), expected, "{pre}");
    }
}

#[test]
fn bos_is_added_when_the_file_says_so() {
    let mut gguf = ascii("gpt-2");
    gguf.set("tokenizer.ggml.bos_token_id", Meta::U32(98));
    assert_eq!(pieces(&gguf, "a", true), ["a"]);
    gguf.set("tokenizer.ggml.add_bos_token", Meta::Bool(true));
    assert_eq!(pieces(&gguf, "a", true), ["<|end|>", "a"]);
    assert_eq!(pieces(&gguf, "a", false), ["a"]);
    gguf.set("tokenizer.ggml.add_eos_token", Meta::Bool(true));
    gguf.set("tokenizer.ggml.eos_token_id", Meta::U32(98));
    assert_eq!(pieces(&gguf, "a", true), ["<|end|>", "a", "<|end|>"]);
}

#[test]
fn control_tokens_are_special_and_user_defined_ones_are_text() {
    let file = ascii("gpt-2").save();
    let tokenizer = TextTokenizer::open(file.path()).unwrap();
    let ids = tokenizer.encode("a<think>b<|end|>", false).unwrap();
    assert_eq!(ids.len(), 4);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "a<think>b");
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "a<think>b<|end|>");
}

#[test]
fn unknown_vocabularies_are_refused_by_name() {
    let cases = [
        (
            "tokenizer.ggml.model",
            text("llama"),
            "tokenizer.ggml.model = 'llama'",
        ),
        (
            "tokenizer.ggml.pre",
            text("tekken"),
            "tokenizer.ggml.pre = 'tekken'",
        ),
        (
            "tokenizer.ggml.token_type",
            Meta::I32s(vec![1]),
            "tokenizer.ggml.token_type is an array of 1",
        ),
        (
            "tokenizer.ggml.merges",
            Meta::Texts(vec!["ab".to_owned()]),
            "tokenizer.ggml.merges",
        ),
        (
            "tokenizer.ggml.merges",
            Meta::Texts(vec!["é é".to_owned()]),
            "é",
        ),
        (
            "tokenizer.ggml.tokens",
            Meta::Texts(vec!["a".to_owned(), "a".to_owned()]),
            "\"a\" twice",
        ),
    ];
    for (key, value, expected) in cases {
        let mut gguf = ascii("gpt-2");
        gguf.set(key, value);
        let file = gguf.save();
        let message = TextTokenizer::open(file.path()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_missing_tokenizer_is_named() {
    let directory = tempfile::TempDir::new().unwrap();
    let error = TextTokenizer::open(directory.path()).unwrap_err();
    assert!(
        matches!(error, CheckpointError::NotFound { .. })
            && error.to_string().contains("tokenizer.json"),
        "{error}"
    );
}

#[test]
fn contents_that_the_library_panics_on_are_an_error() {
    let source = fixtures::model("01_llama_gqa_tied");
    let directory = fixtures::edited(&source, "tokenizer.json", |tokenizer| {
        tokenizer["model"]["vocab"] = serde_json::json!({"a": 0, "b": 1});
        tokenizer["model"]["merges"] = serde_json::json!([["a", "b"]]);
    });
    let message = TextTokenizer::open(directory.path())
        .unwrap_err()
        .to_string();
    assert!(message.contains("tokenizer.json: tokenizer: "), "{message}");
}

#[test]
fn damaged_json_is_named_as_such() {
    let directory = tempfile::TempDir::new().unwrap();
    std::fs::write(directory.path().join("tokenizer.json"), "{\"model\": ").unwrap();
    let error = TextTokenizer::open(directory.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::Json { .. }), "{error}");
}
