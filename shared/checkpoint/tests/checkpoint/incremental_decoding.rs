//! Deltas are whole characters and add up to the whole text, for any ids in any pieces.

use std::fs;
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use serde_json::json;
use treespec_checkpoint::{IncrementalDecoder, TextTokenizer};

use crate::fixtures;

/// The fixtures' byte-level tokenizers, and one with byte fallback.
fn all_tokenizers() -> &'static [Arc<TextTokenizer>] {
    static TOKENIZERS: OnceLock<Vec<Arc<TextTokenizer>>> = OnceLock::new();
    TOKENIZERS.get_or_init(|| {
        let mut opened: Vec<_> = fixtures::CASES
            .iter()
            .map(|case| Arc::new(TextTokenizer::open(&fixtures::model(case)).unwrap()))
            .collect();
        opened.push(Arc::new(byte_fallback()));
        opened
    })
}

/// The decoder chain of SentencePiece models (Llama 2): a leading space is stripped from the text as a whole, bytes are
/// tokens of their own.
fn byte_fallback() -> TextTokenizer {
    let mut vocabulary = serde_json::Map::new();
    for token in ["<unk>", "</s>", "▁", "▁Hello", "▁world", "ing", "é", "�"] {
        vocabulary.insert(token.to_owned(), json!(vocabulary.len()));
    }
    for byte in [0xe2u8, 0x82, 0xac, 0x41, 0xf0, 0x9f, 0x98, 0x80] {
        vocabulary.insert(format!("<0x{byte:02X}>"), json!(vocabulary.len()));
    }
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "</s>", "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false}],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>", "byte_fallback": true},
    });
    let directory = tempfile::TempDir::new().unwrap();
    fs::write(
        directory.path().join("tokenizer.json"),
        tokenizer.to_string(),
    )
    .unwrap();
    TextTokenizer::open(directory.path()).unwrap()
}

fn decode_in_pieces(
    tokenizer: &Arc<TextTokenizer>,
    ids: &[u32],
    cuts: &[usize],
    skip_special: bool,
) -> Vec<String> {
    let mut decoder = IncrementalDecoder::new(Arc::clone(tokenizer), skip_special);
    let mut deltas = Vec::new();
    let mut start = 0;
    for &cut in cuts {
        let end = (start + cut).min(ids.len());
        deltas.push(decoder.push(&ids[start..end]).unwrap());
        start = end;
    }
    deltas.push(decoder.push(&ids[start..]).unwrap());
    deltas.push(decoder.finish().unwrap());
    deltas
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn deltas_add_up_to_the_text(
        which in 0usize..4,
        raw in prop::collection::vec(any::<u32>(), 0..60),
        cuts in prop::collection::vec(0usize..4, 0..60),
        skip_special: bool,
    ) {
        let tokenizer = &all_tokenizers()[which];
        let ids: Vec<u32> = raw.iter().map(|id| id % tokenizer.vocab_size() as u32).collect();
        let whole = tokenizer.decode(&ids, skip_special).unwrap();
        prop_assert_eq!(decode_in_pieces(tokenizer, &ids, &cuts, skip_special).concat(), whole);
    }

    #[test]
    fn valid_text_is_never_shown_with_a_broken_character(
        which in 0usize..3,
        text in "(\\PC|漢|😀|é|[a-z ]){0,40}",
    ) {
        prop_assume!(!text.contains(char::REPLACEMENT_CHARACTER));
        let tokenizer = &all_tokenizers()[which];
        let ids = tokenizer.encode(&text, false).unwrap();
        let deltas = decode_in_pieces(tokenizer, &ids, &vec![1; ids.len()], false);
        prop_assert!(deltas.iter().all(|delta| !delta.contains(char::REPLACEMENT_CHARACTER)));
        prop_assert_eq!(deltas.last().map(String::as_str), Some(""));
    }
}

#[test]
fn a_split_character_appears_once_it_is_complete() {
    let tokenizer = &all_tokenizers()[0];
    let ids = tokenizer.encode("a😀b", false).unwrap();
    let deltas = decode_in_pieces(tokenizer, &ids, &vec![1; ids.len()], false);
    let shown: Vec<&str> = deltas
        .iter()
        .map(String::as_str)
        .filter(|delta| !delta.is_empty())
        .collect();
    assert_eq!(shown, ["a", "😀", "b"]);
}

#[test]
fn an_unknown_id_leaves_the_decoder_as_it_was() {
    let tokenizer = &all_tokenizers()[0];
    let ids = tokenizer.encode("one two", false).unwrap();
    let mut decoder = IncrementalDecoder::new(Arc::clone(tokenizer), false);
    let mut text = decoder.push(&ids[..1]).unwrap();
    assert!(decoder.push(&[ids[0], 1_000_000]).is_err());
    text += &decoder.push(&ids[1..]).unwrap();
    text += &decoder.finish().unwrap();
    assert_eq!(text, "one two");
}
