//! Where a model keeps its chat template and the special tokens that the template may use.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::CheckpointError;
use crate::config_file::ConfigFile;
use crate::gguf::{GgufFile, is_gguf};

/// The text of a template, not yet compiled.
#[derive(Debug)]
pub(super) struct TemplateSource {
    pub(super) template: String,
    /// `bos_token` and so on; a model without one leaves the variable undefined, like transformers.
    pub(super) special_tokens: BTreeMap<String, String>,
    pub(super) path: PathBuf,
}

const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

impl TemplateSource {
    pub(super) fn find(target: &Path) -> Result<Option<Self>, CheckpointError> {
        if is_gguf(target) {
            Self::in_gguf(target)
        } else {
            Self::in_directory(target)
        }
    }

    fn in_directory(directory: &Path) -> Result<Option<Self>, CheckpointError> {
        let config = ConfigFile::open_if_present(&directory.join("tokenizer_config.json"))?;
        let own_file = directory.join("chat_template.jinja");
        let (template, path) = match (std::fs::read_to_string(&own_file), &config) {
            (Ok(template), _) => (template, own_file),
            (Err(source), _) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(CheckpointError::io(&own_file, source));
            }
            (Err(_), Some(config)) => match configured_template(config)? {
                Some(template) => (template, config.path().to_owned()),
                None => return Ok(None),
            },
            (Err(_), None) => return Ok(None),
        };
        let map = ConfigFile::open_if_present(&directory.join("special_tokens_map.json"))?;
        let mut special_tokens = BTreeMap::new();
        for name in SPECIAL_TOKENS {
            let files = [config.as_ref(), map.as_ref()];
            if let Some(token) = files
                .into_iter()
                .flatten()
                .find_map(|file| token_text(file.value(name)?))
            {
                special_tokens.insert(name.to_owned(), token);
            }
        }
        Ok(Some(Self {
            template,
            special_tokens,
            path,
        }))
    }

    fn in_gguf(path: &Path) -> Result<Option<Self>, CheckpointError> {
        let file = GgufFile::open(path)?;
        let Some(template) = file.text("tokenizer.chat_template")? else {
            return Ok(None);
        };
        let tokens = file.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
        let keys = [
            "bos_token_id",
            "eos_token_id",
            "unknown_token_id",
            "padding_token_id",
        ];
        let mut special_tokens = BTreeMap::new();
        for (name, key) in SPECIAL_TOKENS.into_iter().zip(keys) {
            let key = format!("tokenizer.ggml.{key}");
            let Some(id) = file.count(&key)? else {
                continue;
            };
            let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
            let token = token
                .ok_or_else(|| file.invalid(&key, format!("a token id below {}", tokens.len())))?;
            special_tokens.insert(name.to_owned(), token.clone());
        }
        Ok(Some(Self {
            template,
            special_tokens,
            path: path.to_owned(),
        }))
    }
}

/// `chat_template`: a string, or a list of `{name, template}` of which `default` counts.
fn configured_template(config: &ConfigFile) -> Result<Option<String>, CheckpointError> {
    const FIELD: &str = "chat_template";
    match config.value(FIELD) {
        None => Ok(None),
        Some(Value::String(template)) => Ok(Some(template.clone())),
        Some(Value::Array(named)) => {
            let default = named
                .iter()
                .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"));
            let template = default
                .and_then(|entry| entry.get("template"))
                .and_then(Value::as_str);
            Ok(template.map(str::to_owned))
        }
        Some(other) => Err(config.invalid(FIELD, other, "a string or a list of named templates")),
    }
}

/// A token is a string, or an object with its `content`.
fn token_text(value: &Value) -> Option<String> {
    value
        .as_str()
        .or_else(|| value.get("content")?.as_str())
        .map(str::to_owned)
}
