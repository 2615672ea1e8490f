//! The four ways to give a prompt.

use std::{fs, io, path::PathBuf, str::FromStr};

use anyhow::{Context as _, Result};
use serde::Deserialize;
use treespec_rpc::proto::coordinator::v1::{self as proto, generate_request::Prompt};

/// Exactly one of these is given.
#[derive(Debug, Clone, Default, clap::Args)]
#[group(required = true, multiple = false)]
#[command(next_help_heading = "Prompt")]
pub(crate) struct PromptArgs {
    /// One user message, rendered through the model's chat template
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Text as it is, without a chat template
    #[arg(long, value_name = "TEXT")]
    pub raw_prompt: Option<String>,
    /// JSON file with a conversation [{"role": …, "content": …}], "-" for stdin
    #[arg(long, value_name = "FILE")]
    pub messages: Option<PathBuf>,
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS")]
    pub tokens: Option<TokenList>,
}

/// Token ids separated by commas. Empty text is an empty list, so that the service says what is wrong with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TokenList(pub Vec<u32>);

impl FromStr for TokenList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        text.split(',')
            .map(|id| {
                id.trim()
                    .parse()
                    .map_err(|error| format!("{id:?} is not a token id: {error}"))
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    role: String,
    content: String,
}

impl PromptArgs {
    /// The request's prompt field.
    ///
    /// # Errors
    /// When the messages file can't be read or is not a list of messages.
    pub(crate) fn to_prompt(&self) -> Result<Prompt> {
        if let Some(text) = &self.prompt {
            return Ok(user_message(text));
        }
        if let Some(text) = &self.raw_prompt {
            return Ok(Prompt::Text(text.clone()));
        }
        if let Some(path) = &self.messages {
            return read_messages(path);
        }
        let TokenList(ids) = self
            .tokens
            .clone()
            .context("give one of --prompt, --raw-prompt, --messages, --tokens")?;
        Ok(Prompt::TokenIds(proto::TokenIds { ids }))
    }
}

/// A conversation of one message by the user.
pub(crate) fn user_message(content: &str) -> Prompt {
    Prompt::Messages(proto::Messages {
        messages: vec![proto::Message {
            role: "user".to_owned(),
            content: content.to_owned(),
        }],
    })
}

fn read_messages(path: &PathBuf) -> Result<Prompt> {
    let text = if path.as_os_str() == "-" {
        io::read_to_string(io::stdin())
    } else {
        fs::read_to_string(path)
    }
    .with_context(|| format!("cannot read {}", path.display()))?;
    let messages: Vec<Message> = serde_json::from_str(&text).with_context(|| {
        format!(
            "{} is not a JSON list of {{\"role\": …, \"content\": …}}",
            path.display()
        )
    })?;
    Ok(Prompt::Messages(proto::Messages {
        messages: messages
            .into_iter()
            .map(|Message { role, content }| proto::Message { role, content })
            .collect(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_lists_allow_blanks_and_name_what_is_no_id() {
        assert_eq!("1, 2,3".parse(), Ok(TokenList(vec![1, 2, 3])));
        assert_eq!("".parse(), Ok(TokenList(vec![])));
        for bad in ["1,x", "1,,2", "-1", "4294967296"] {
            assert!(bad.parse::<TokenList>().is_err(), "{bad}");
        }
    }

    #[test]
    fn messages_keep_their_order_and_roles() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chat.json");
        fs::write(
            &path,
            r#"[{"role":"system","content":"s"},{"role":"user","content":"u"}]"#,
        )
        .unwrap();
        let arguments = PromptArgs {
            messages: Some(path),
            ..Default::default()
        };
        let Prompt::Messages(chat) = arguments.to_prompt().unwrap() else {
            panic!("not messages")
        };
        let pairs: Vec<_> = chat
            .messages
            .iter()
            .map(|m| (m.role.as_str(), m.content.as_str()))
            .collect();
        assert_eq!(pairs, [("system", "s"), ("user", "u")]);
    }

    #[test]
    fn a_bad_messages_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chat.json");
        fs::write(&path, r#"{"role":"user"}"#).unwrap();
        for path in [path, folder.path().join("absent.json")] {
            let arguments = PromptArgs {
                messages: Some(path.clone()),
                ..Default::default()
            };
            let error = format!("{:#}", arguments.to_prompt().unwrap_err());
            assert!(error.contains(&path.display().to_string()), "{error}");
        }
    }
}
