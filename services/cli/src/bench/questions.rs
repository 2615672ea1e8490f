//! What benchmarks without services ask: prompts as token ids, since there is nobody else to render them.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, ensure};
use treespec_checkpoint::{ChatMessage, ChatTemplate, TextTokenizer};

use super::{prompts, reference, reference::ReferencePrompt};

/// Tokens of an answer at most, where neither a flag nor a reference says it.
pub(super) const DEFAULT_MAX_TOKENS: u32 = 128;

/// One prompt to answer.
#[derive(Debug, Clone)]
pub(super) struct Question {
    /// One user message in the model's chat template.
    pub(super) tokens: Vec<u32>,
    /// Tokens of the answer at most.
    pub(super) max_tokens: u32,
}

/// The prompts of a run and, where they come from a reference file, its answers.
#[derive(Debug)]
pub(super) struct Questions {
    /// The user messages.
    pub(super) texts: Vec<String>,
    /// The same as token ids.
    pub(super) questions: Vec<Question>,
    /// One per question.
    pub(super) reference: Option<Vec<ReferencePrompt>>,
}

impl Questions {
    /// The prompts of a reference file, of a prompt file, or the built-in ones, for the model at `target`.
    ///
    /// # Errors
    /// A bad file, nothing to ask, no chat template, or a prompt that is another one for this tokenizer than for the
    /// reference's.
    pub(super) fn load(
        reference: Option<&Path>,
        file: Option<&Path>,
        limit: Option<usize>,
        max_tokens: Option<u32>,
        target: &Path,
    ) -> Result<Self> {
        let codec = Codec::open(target)?;
        let Some(path) = reference else {
            let texts = prompts::load(file, limit)?;
            let max_tokens = max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
            let questions = texts
                .iter()
                .map(|text| codec.question(text, max_tokens))
                .collect::<Result<_>>()?;
            return Ok(Self {
                texts,
                questions,
                reference: None,
            });
        };
        let mut prompts = reference::read(path)?;
        prompts.truncate(limit.unwrap_or(usize::MAX));
        ensure!(!prompts.is_empty(), "there are no prompts to run");
        let mut questions = Vec::with_capacity(prompts.len());
        for (index, prompt) in prompts.iter().enumerate() {
            let question = codec.question(&prompt.prompt, prompt.max_tokens(max_tokens))?;
            prompt
                .compare_prompt(question.tokens.len() as u32)
                .map_err(|problem| anyhow!("prompt {index}: {problem}"))?;
            questions.push(question);
        }
        Ok(Self {
            texts: prompts.iter().map(|prompt| prompt.prompt.clone()).collect(),
            questions,
            reference: Some(prompts),
        })
    }
}

/// The target's text side.
struct Codec {
    tokenizer: TextTokenizer,
    template: ChatTemplate,
}

impl Codec {
    fn open(target: &Path) -> Result<Self> {
        Ok(Self {
            tokenizer: TextTokenizer::open(target)?,
            template: ChatTemplate::open(target)?
                .with_context(|| format!("{} has no chat template", target.display()))?,
        })
    }

    fn question(&self, content: &str, max_tokens: u32) -> Result<Question> {
        let message = ChatMessage {
            role: "user".to_owned(),
            content: content.to_owned(),
        };
        let text = self.template.render(&[message], true)?;
        Ok(Question {
            // Templates bring their own special tokens.
            tokens: self.tokenizer.encode(&text, false)?,
            max_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::engine::tests::fixture;

    #[test]
    fn prompts_go_through_the_chat_template() {
        let target = fixture("cases/01_llama_gqa_tied/model");
        let asked = Questions::load(None, None, Some(2), Some(5), &target).unwrap();
        assert_eq!(asked.questions.len(), 2);
        assert_eq!(asked.questions[1].max_tokens, 5);
        let tokenizer = TextTokenizer::open(&target).unwrap();
        let text = tokenizer.decode(&asked.questions[0].tokens, false).unwrap();
        assert!(text.contains(&asked.texts[0]), "{text}");
        assert!(text.len() > asked.texts[0].len(), "{text}");
    }

    #[test]
    fn a_reference_of_another_tokenizer_is_refused() {
        let reference = fixture("eval32_f32.json");
        let target = fixture("cases/01_llama_gqa_tied/model");
        let error = Questions::load(Some(&reference), None, None, None, &target).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains("prompt 0: the prompt has"), "{error}");
        assert!(error.contains("chat template"), "{error}");
    }
}
