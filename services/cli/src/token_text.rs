//! Tokens as text for people.

use std::path::Path;

use treespec_checkpoint::TextTokenizer;

/// Texts of single tokens, or nothing where the model has no tokenizer.
pub(crate) struct TokenTexts {
    tokenizer: Option<TextTokenizer>,
}

impl TokenTexts {
    /// The tokenizer of the target at `path`. Without a readable one, tokens are shown by their ids only.
    pub(crate) fn open(path: &Path) -> Self {
        Self {
            tokenizer: TextTokenizer::open(path).ok(),
        }
    }

    /// The text of a token in quotes, so that blanks and line breaks show; empty when it is not known.
    pub(crate) fn quoted(&self, id: u32) -> String {
        self.tokenizer
            .as_ref()
            .and_then(|tokenizer| tokenizer.decode(&[id], false).ok())
            .map_or_else(String::new, |text| format!("{text:?}"))
    }
}
