//! Text to token ids and back.

mod gguf_vocabulary;
mod pre_tokenizer;
mod token_bytes;

use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};
use token_bytes::TokenSpelling;
use tokenizers::Tokenizer;

use crate::CheckpointError;
use crate::config_file::ConfigFile;
use crate::gguf::{GgufFile, is_gguf};
use crate::limits;

/// The tokenizer of a target.
pub struct TextTokenizer {
    inner: Tokenizer,
    path: PathBuf,
    vocab_size: usize,
    /// Ids that the model can produce; the ones beyond `vocab_size` have no text.
    model_vocab_size: usize,
    fingerprint: String,
    spelling: TokenSpelling,
}

impl std::fmt::Debug for TextTokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("TextTokenizer")
            .field("path", &self.path)
            .field("vocab_size", &self.vocab_size)
            .field("model_vocab_size", &self.model_vocab_size)
            .finish_non_exhaustive()
    }
}

impl TextTokenizer {
    /// Reads tokenizer.json of a Hugging Face directory, or builds the tokenizer from a GGUF file's metadata
    /// (byte-level BPE with one of the known pre-tokenizers).
    ///
    /// # Errors
    /// When there is no tokenizer, it is damaged, or a GGUF file declares a model or pre-tokenizer that is not known.
    pub fn open(target: &Path) -> Result<Self, CheckpointError> {
        if is_gguf(target) {
            let file = GgufFile::open(target)?;
            let json = gguf_vocabulary::tokenizer_json(&file)?;
            return Self::from_json(target, json, None);
        }
        let path = target.join("tokenizer.json");
        let json = ConfigFile::open(
            &path,
            "tokenizer",
            "the model directory needs a tokenizer.json (save it once with transformers' fast tokenizer)",
        )?;
        let model_vocab_size = match ConfigFile::open_if_present(&target.join("config.json"))? {
            Some(config) => config.count("vocab_size", limits::VOCABULARY)?,
            None => None,
        };
        Self::from_json(&path, json.into_value(), model_vocab_size)
    }

    fn from_json(
        path: &Path,
        json: Value,
        model_vocab_size: Option<usize>,
    ) -> Result<Self, CheckpointError> {
        let failed = |error: tokenizers::Error| CheckpointError::tokenizer(path, error);
        let spelling = TokenSpelling::of(&json);
        let mut inner = build(json).map_err(|message| CheckpointError::tokenizer(path, message))?;
        // A truncation or padding left in the file by a training run must not change prompts.
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        let mut tokens: Vec<(u32, String)> = inner
            .get_vocab(true)
            .into_iter()
            .map(|(token, id)| (id, token))
            .collect();
        tokens.sort_unstable();
        let vocab_size = match tokens.last() {
            Some(&(highest, _)) if limits::TOKEN_ID.contains(&(highest as usize)) => {
                highest as usize + 1
            }
            Some(&(highest, _)) => {
                return Err(CheckpointError::tokenizer(
                    path,
                    format!("token id {highest} is too large"),
                ));
            }
            None => return Err(CheckpointError::tokenizer(path, "the vocabulary is empty")),
        };
        Ok(Self {
            inner,
            path: path.to_owned(),
            vocab_size,
            model_vocab_size: model_vocab_size.unwrap_or(vocab_size).max(vocab_size),
            fingerprint: fingerprint(&tokens),
            spelling,
        })
    }

    /// The ids of `text`. With `add_special` the tokenizer's own frame is added (for instance a leading BOS); text that
    /// spells a special token becomes that token either way. A rendered chat template contains its own special tokens
    /// and is encoded without.
    ///
    /// # Errors
    /// When the tokenizer has no way to represent the text (no byte fallback and no unknown token).
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, CheckpointError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|error| CheckpointError::tokenizer(&self.path, error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids that the model has but the tokenizer does not
    /// (padding of the embedding) are empty.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownToken`] for an id outside the model's vocabulary.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, CheckpointError> {
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= self.model_vocab_size) {
            return Err(CheckpointError::UnknownToken {
                id,
                vocab_size: self.model_vocab_size,
            });
        }
        self.inner
            .decode(ids, skip_special)
            .map_err(|error| CheckpointError::tokenizer(&self.path, error))
    }

    /// Number of ids that have a text: the highest one plus one. The model's vocabulary can be larger.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// SHA-256 (hex) over all (id, token) pairs in the order of ids: equal iff two services tokenise alike.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Whether `id` is a control token such as BOS or an end-of-turn mark.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary();
        added
            .simple_id_to_token(id)
            .is_some_and(|token| added.is_special_token(&token))
    }

    /// The id of a token by its exact spelling, special tokens included.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The bytes that `id` contributes to a text: those of consecutive ids form the text, although a single one may hold
    /// only a part of a character. A special token is its own spelling. `None` for ids without a text.
    ///
    /// A SentencePiece vocabulary keeps the space before a word in the token, and so in these bytes; decoding a whole
    /// text drops it from the first one.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.inner.id_to_token(id)?;
        Some(self.spelling.bytes(&token))
    }

    /// Whether decoding leaves `id` out: a special token when those are skipped, or padding without a text.
    pub(crate) fn is_omitted(&self, id: u32, skip_special: bool) -> bool {
        (skip_special && self.is_special(id)) || self.inner.id_to_token(id).is_none()
    }

    /// Whether `id` stands for a single byte whose text depends on its neighbours (`<0xE2>` in SentencePiece
    /// vocabularies).
    pub(crate) fn is_byte_fallback(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some_and(|token| {
            token.len() == 6 && token.starts_with("<0x") && token.ends_with('>')
        })
    }
}

/// The tokenizer that `json` describes.
///
/// The library panics on some contents that are valid JSON (a merge whose result is longer than every token, a damaged
/// precompiled normaliser). No state outlives such a panic, so it is turned into an error.
fn build(json: Value) -> Result<Tokenizer, String> {
    let built = std::panic::catch_unwind(move || serde_json::from_value::<Tokenizer>(json));
    match built {
        Ok(built) => built.map_err(|error| error.to_string()),
        Err(_) => Err("the contents are inconsistent (merges or normaliser)".to_owned()),
    }
}

/// Hash of the vocabulary. Every token is preceded by its id and length, so that no two vocabularies hash alike.
fn fingerprint(tokens: &[(u32, String)]) -> String {
    let mut hash = Sha256::new();
    for (id, token) in tokens {
        hash.update(id.to_le_bytes());
        hash.update((token.len() as u64).to_le_bytes());
        hash.update(token.as_bytes());
    }
    crate::hex::encode(&hash.finalize())
}
