//! A tokenizer.json built from the `tokenizer.ggml.*` metadata of a GGUF file.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::pre_tokenizer::PreTokenizer;
use crate::CheckpointError;
use crate::gguf::GgufFile;

/// llama.cpp's token types, of which these two are matched in the text before anything else.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// The tokenizer as a tokenizer.json value. Only byte-level BPE (`tokenizer.ggml.model` = `gpt2`) is known.
pub(super) fn tokenizer_json(file: &GgufFile) -> Result<Value, CheckpointError> {
    let model_key = "tokenizer.ggml.model";
    if file.required(model_key, file.text(model_key)?)? != "gpt2" {
        return Err(file.unsupported(model_key, "'gpt2' (byte-level BPE)"));
    }
    let pre_key = "tokenizer.ggml.pre";
    let declared = file.required(pre_key, file.text(pre_key)?)?;
    let pre_tokenizer = PreTokenizer::from_name(&declared)
        .ok_or_else(|| file.unsupported(pre_key, PreTokenizer::SUPPORTED))?;
    let tokens = file.required(TOKENS, file.texts(TOKENS)?)?;
    let vocabulary = vocabulary(file, &tokens)?;
    let merges = merges(file, &vocabulary)?;
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens(file, &tokens)?,
        "normalizer": pre_tokenizer.normalizer_json(),
        "pre_tokenizer": pre_tokenizer.json(),
        "post_processor": frame(file, &tokens, pre_tokenizer)?,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": pre_tokenizer.ignores_merges(),
            "vocab": vocabulary,
            "merges": merges,
        },
    }))
}

fn vocabulary(file: &GgufFile, tokens: &[String]) -> Result<Map<String, Value>, CheckpointError> {
    let mut vocabulary = Map::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if let Some(first) = vocabulary.insert(token.clone(), json!(id)) {
            let message = format!("{TOKENS} lists {token:?} twice (ids {first} and {id})");
            return Err(CheckpointError::tokenizer(file.path(), message));
        }
    }
    Ok(vocabulary)
}

/// Merges as pairs of tokens whose concatenation is a token too.
fn merges(file: &GgufFile, vocabulary: &Map<String, Value>) -> Result<Vec<Value>, CheckpointError> {
    let written = file.required(MERGES, file.texts(MERGES)?)?;
    let pairs = written.iter().map(|merge| {
        let (left, right) = split_merge(merge)?;
        let known = [left, right, &format!("{left}{right}")]
            .into_iter()
            .all(|token| vocabulary.contains_key(token));
        known.then(|| json!([left, right])).ok_or(merge)
    });
    pairs.collect::<Result<_, _>>().map_err(|merge| {
        let message =
            format!("{MERGES} has the entry {merge:?}, which is not two tokens that form a third");
        CheckpointError::tokenizer(file.path(), message)
    })
}

/// A merge is written `left right`; the left part has at least one character. The error is the merge itself.
fn split_merge(merge: &String) -> Result<(&str, &str), &String> {
    let first_len = merge.chars().next().map_or(0, char::len_utf8);
    let space = merge[first_len..].find(' ').ok_or(merge)?;
    let (left, right) = merge.split_at(first_len + space);
    Ok((left, &right[1..]))
}

/// Control tokens (special) and user-defined ones (matched as a whole, but ordinary text when decoded).
fn added_tokens(file: &GgufFile, tokens: &[String]) -> Result<Value, CheckpointError> {
    let kinds = file.integers(TOKEN_TYPES)?.unwrap_or_default();
    if !kinds.is_empty() && kinds.len() != tokens.len() {
        return Err(file.invalid(
            TOKEN_TYPES,
            format!("one type for each of the {} tokens", tokens.len()),
        ));
    }
    let added = tokens
        .iter()
        .zip(kinds)
        .enumerate()
        .filter(|(_, (token, kind))| matches!(*kind, CONTROL | USER_DEFINED) && !token.is_empty())
        .map(|(id, (token, kind))| {
            json!({
                "id": id, "content": token, "special": kind == CONTROL, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        });
    Ok(Value::Array(added.collect()))
}

/// The post-processor that adds BOS and EOS where the file asks for them.
fn frame(
    file: &GgufFile,
    tokens: &[String],
    pre_tokenizer: PreTokenizer,
) -> Result<Value, CheckpointError> {
    let add_bos = file
        .flag("tokenizer.ggml.add_bos_token")?
        .unwrap_or_else(|| pre_tokenizer.adds_bos_by_default());
    let add_eos = file.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let mut used: HashMap<&str, u64> = HashMap::new();
    let mut frame_token = |wanted: bool, key: &str| -> Result<Option<Value>, CheckpointError> {
        if !wanted {
            return Ok(None);
        }
        let id = file.required(key, file.count(key)?)?;
        let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
        let token =
            token.ok_or_else(|| file.invalid(key, format!("a token id below {}", tokens.len())))?;
        used.insert(token, id);
        Ok(Some(json!({"SpecialToken": {"id": token, "type_id": 0}})))
    };
    let bos = frame_token(add_bos, "tokenizer.ggml.bos_token_id")?;
    let eos = frame_token(add_eos, "tokenizer.ggml.eos_token_id")?;
    let framed = |sequence: &str| -> Vec<Value> {
        let text = json!({"Sequence": {"id": sequence, "type_id": 0}});
        bos.iter()
            .cloned()
            .chain([text])
            .chain(eos.iter().cloned())
            .collect()
    };
    let special_tokens: Map<String, Value> = used
        .iter()
        .map(|(&token, id)| {
            (
                token.to_owned(),
                json!({"id": token, "ids": [id], "tokens": [token]}),
            )
        })
        .collect();
    let pair = [framed("A"), framed("B")].concat();
    Ok(json!({
        "type": "TemplateProcessing",
        "single": framed("A"),
        "pair": pair,
        "special_tokens": special_tokens,
    }))
}
