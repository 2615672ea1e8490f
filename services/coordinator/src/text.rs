use std::{path::Path, sync::Arc};

use treespec_checkpoint::{
    ChatMessage, ChatTemplate, CheckpointError, IncrementalDecoder, TextTokenizer,
};
use treespec_rpc::{ServiceError, proto::coordinator::v1::Messages};

/// The target's text side: its tokenizer and chat template.
pub(crate) struct TextCodec {
    tokenizer: Arc<TextTokenizer>,
    template: Option<ChatTemplate>,
}

impl TextCodec {
    /// Reads both from a Hugging Face directory or a GGUF file.
    pub(crate) fn open(target: &Path) -> Result<Self, CheckpointError> {
        Ok(Self {
            tokenizer: Arc::new(TextTokenizer::open(target)?),
            template: ChatTemplate::open(target)?,
        })
    }

    pub(crate) fn fingerprint(&self) -> &str {
        self.tokenizer.fingerprint()
    }

    pub(crate) fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Token ids of raw text; `add_special` adds the tokenizer's own special tokens, such as BOS.
    pub(crate) fn encode_text(
        &self,
        text: &str,
        add_special: bool,
    ) -> Result<Vec<u32>, ServiceError> {
        self.tokenizer
            .encode(text, add_special)
            .map_err(|error| ServiceError::invalid("text", error.to_string()))
    }

    /// Token ids of a conversation, rendered through the chat template with a generation prompt.
    pub(crate) fn encode_messages(&self, messages: Messages) -> Result<Vec<u32>, ServiceError> {
        let Some(template) = &self.template else {
            return Err(ServiceError::invalid(
                "messages",
                "the model has no chat template: send text or token_ids",
            ));
        };
        let messages = chat_messages(messages)?;
        template
            .render(&messages, true)
            // Templates bring their own special tokens.
            .and_then(|text| self.tokenizer.encode(&text, false))
            .map_err(|error| ServiceError::invalid("messages", error.to_string()))
    }

    /// Text of token ids.
    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, ServiceError> {
        self.tokenizer.decode(ids, skip_special).map_err(|error| {
            let unknown = match error {
                CheckpointError::UnknownToken { id, .. } => ids.iter().position(|&at| at == id),
                _ => None,
            };
            let field = match unknown {
                Some(index) => format!("token_ids[{index}]"),
                None => "token_ids".to_owned(),
            };
            ServiceError::invalid(field, error.to_string())
        })
    }

    /// Decodes generated tokens as they come. Special tokens are no part of the text.
    pub(crate) fn incremental_decoder(&self) -> IncrementalDecoder {
        IncrementalDecoder::new(Arc::clone(&self.tokenizer), true)
    }
}

fn chat_messages(messages: Messages) -> Result<Vec<ChatMessage>, ServiceError> {
    if messages.messages.is_empty() {
        return Err(ServiceError::invalid(
            "messages",
            "is empty: at least one message is needed",
        ));
    }
    let chat: Vec<_> = messages
        .messages
        .into_iter()
        .map(|message| ChatMessage {
            role: message.role,
            content: message.content,
        })
        .collect();
    match chat.iter().position(|message| message.role.is_empty()) {
        None => Ok(chat),
        Some(index) => Err(ServiceError::invalid(
            format!("messages.messages[{index}].role"),
            "is empty: name a role of the model's template, such as user",
        )),
    }
}
