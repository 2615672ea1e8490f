//! The bytes of a text's tokens are the bytes of the text.

use std::fs;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::json;
use treespec_checkpoint::TextTokenizer;

use crate::fixtures;

/// The fixtures' byte-level tokenizers, and one like Llama 2's.
fn tokenizers() -> &'static [TextTokenizer] {
    static TOKENIZERS: OnceLock<Vec<TextTokenizer>> = OnceLock::new();
    TOKENIZERS.get_or_init(|| {
        let fixtures = fixtures::CASES.map(|case| TextTokenizer::open(&fixtures::model(case)));
        fixtures
            .into_iter()
            .map(Result::unwrap)
            .chain([sentence_piece()])
            .collect()
    })
}

/// Spaces are `▁`, every byte is a token, `AB` and `▁A` are merged, and one added token is not special.
fn sentence_piece() -> TextTokenizer {
    let mut vocabulary = serde_json::Map::new();
    let pieces = ["<unk>", "</s>", "<think>", "▁", "A", "B", "é", "AB", "▁A"];
    let bytes = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>"));
    for token in pieces.map(str::to_owned).into_iter().chain(bytes) {
        vocabulary.insert(token, json!(vocabulary.len()));
    }
    let added = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "special": special, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false})
    };
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [added(1, "</s>", true), added(2, "<think>", false)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["A", "B"], ["▁", "A"]],
            "unk_token": "<unk>", "byte_fallback": true},
    });
    let directory = tempfile::TempDir::new().unwrap();
    let file = directory.path().join("tokenizer.json");
    fs::write(file, tokenizer.to_string()).unwrap();
    TextTokenizer::open(directory.path()).unwrap()
}

fn bytes(tokenizer: &TextTokenizer, ids: &[u32]) -> Vec<u8> {
    ids.iter()
        .flat_map(|&id| tokenizer.token_bytes(id).unwrap())
        .collect()
}

proptest! {
    /// Composed characters only: some of the tokenizers normalise to NFC.
    #[test]
    fn bytes_of_a_texts_ids_are_the_text(text in "([ -~\n]|[éß漢字😀€]|<think>|AB){0,40}") {
        for tokenizer in tokenizers() {
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(bytes(tokenizer, &ids), text.as_bytes());
        }
    }

    #[test]
    fn bytes_of_any_ids_are_what_decoding_gives(raw in prop::collection::vec(any::<u32>(), 0..20)) {
        for tokenizer in &tokenizers()[..fixtures::CASES.len()] {
            let size = tokenizer.vocab_size() as u32;
            let ids: Vec<u32> = raw.iter().map(|id| id % size).collect();
            let text = tokenizer.decode(&ids, false).unwrap();
            let bytes = bytes(tokenizer, &ids);
            prop_assert_eq!(String::from_utf8_lossy(&bytes), text);
        }
    }
}

#[test]
fn every_kind_of_token_has_its_bytes() {
    let tokenizer = sentence_piece();
    let of = |token: &str| tokenizer.token_bytes(tokenizer.token_id(token).unwrap());
    assert_eq!(of("▁A").unwrap(), b" A");
    assert_eq!(of("<0xE2>").unwrap(), [0xE2]);
    assert_eq!(of("<think>").unwrap(), b"<think>");
    assert_eq!(of("</s>").unwrap(), b"</s>");
    // Decoding a text drops the space that the bytes of its first token have.
    let ids = tokenizer.encode(" A", false).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "A");
}

#[test]
fn padding_and_unknown_ids_have_no_bytes() {
    let tokenizer = TextTokenizer::open(&fixtures::model("03_qwen3_headdim")).unwrap();
    assert_eq!(tokenizer.token_bytes(39).unwrap(), b"H");
    assert_eq!(tokenizer.token_bytes(800), None);
    assert_eq!(tokenizer.token_bytes(u32::MAX), None);
}
