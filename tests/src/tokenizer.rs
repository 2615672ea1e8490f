//! Tokenizer and chat-template cases.

use serde::Deserialize;

/// `tokenizer_cases` of `expected.json`
#[derive(Debug, Default, Deserialize)]
pub struct TokenizerCases {
    /// Plain text.
    pub encode: Vec<EncodeCase>,
    /// Conversations.
    pub chat: Vec<ChatCase>,
}

/// Text and its token ids.
#[derive(Debug, Deserialize)]
pub struct EncodeCase {
    /// Raw text.
    pub text: String,
    /// With the tokenizer's own special tokens.
    pub ids_with_special: Vec<u32>,
    /// Without them.
    pub ids_without_special: Vec<u32>,
    /// `ids_with_special` as text, or `ids_without_special`: special tokens in the text are kept.
    pub decoded_keep_special: String,
    /// Special tokens are left out.
    pub decoded_skip_special: String,
}

/// A conversation and its token ids.
#[derive(Debug, Deserialize)]
pub struct ChatCase {
    /// In order.
    pub messages: Vec<ChatTurn>,
    /// Whether the template opens the assistant's turn.
    pub add_generation_prompt: bool,
    /// The template's text.
    pub rendered: String,
    /// Its tokens, without special tokens of the tokenizer's own.
    pub ids: Vec<u32>,
}

/// One message.
#[derive(Debug, Clone, Deserialize)]
pub struct ChatTurn {
    /// For example `user`.
    pub role: String,
    /// Its text.
    pub content: String,
}
