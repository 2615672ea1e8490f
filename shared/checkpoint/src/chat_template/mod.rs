//! Chat messages to prompt text, by the template that comes with the model.

mod environment;
mod python_json;
mod source;

use std::path::{Path, PathBuf};

use minijinja::value::Serde;
use minijinja::{Environment, Value, context};
use serde::{Deserialize, Serialize};

use crate::CheckpointError;
use source::TemplateSource;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

/// A compiled chat template with the special tokens that it may use.
///
/// It renders like transformers' `apply_chat_template`: `trim_blocks`, `lstrip_blocks`, loop controls, Python string and
/// dict methods, `raise_exception`, `strftime_now` (in UTC), `tojson` without HTML escapes.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: Value,
    path: PathBuf,
}

const TEMPLATE_NAME: &str = "chat";

impl ChatTemplate {
    /// Finds the template: `chat_template.jinja` or `chat_template` in tokenizer_config.json of a Hugging Face
    /// directory (of several named ones `default`), `tokenizer.chat_template` of a GGUF file. `None` when the model has
    /// none.
    ///
    /// # Errors
    /// When a file is damaged or the template does not compile.
    pub fn open(target: &Path) -> Result<Option<Self>, CheckpointError> {
        TemplateSource::find(target)?.map(Self::compile).transpose()
    }

    fn compile(source: TemplateSource) -> Result<Self, CheckpointError> {
        let mut environment = environment::hugging_face();
        environment
            .add_template_owned(TEMPLATE_NAME, source.template)
            .map_err(|error| template_error(&source.path, &error))?;
        Ok(Self {
            environment,
            special_tokens: Value::from(Serde(&source.special_tokens)),
            path: source.path,
        })
    }

    /// The prompt text of `messages`. With `add_generation_prompt` it ends where the assistant's answer starts. The text
    /// contains its special tokens: encode it without adding any.
    ///
    /// # Errors
    /// [`CheckpointError::MessagesRefused`] with the template's own message when it raises an exception (for instance
    /// about an unknown role), [`CheckpointError::ChatTemplate`] when it fails otherwise.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, CheckpointError> {
        let none = Value::from(());
        let variables = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => add_generation_prompt,
            tools => none.clone(),
            documents => none,
            ..self.special_tokens.clone()
        };
        self.environment
            .get_template(TEMPLATE_NAME)
            .and_then(|template| template.render(variables))
            .map_err(|error| match environment::raised_message(&error) {
                Some(message) => CheckpointError::MessagesRefused { message },
                None => template_error(&self.path, &error),
            })
    }
}

fn template_error(path: &Path, error: &minijinja::Error) -> CheckpointError {
    CheckpointError::ChatTemplate {
        path: path.to_owned(),
        message: error.to_string(),
    }
}
