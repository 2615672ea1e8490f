use treespec_checkpoint::IncrementalDecoder;
use treespec_rpc::{
    ServiceError,
    proto::{
        coordinator::v1::{Delta, Finished, Progress, generate_response::Event},
        verify::v1::{self as verify, FinishReason, generate_response::Event as VerifyEvent},
    },
};

/// What has been generated so far, and how it is told to the client.
///
/// It outlives verify calls: a replay repeats prefill and continues the text, and the client notices neither.
pub(crate) struct Transcript {
    decoder: IncrementalDecoder,
    prompt_tokens: usize,
    generated: Vec<u32>,
    prefilled: u32,
    has_prompt_logprobs: bool,
}

impl Transcript {
    /// An empty transcript after a prompt of `prompt_tokens`.
    pub(crate) fn new(decoder: IncrementalDecoder, prompt_tokens: usize) -> Self {
        Self {
            decoder,
            prompt_tokens,
            generated: Vec::new(),
            prefilled: 0,
            has_prompt_logprobs: false,
        }
    }

    /// The committed tokens after the prompt.
    pub(crate) fn generated(&self) -> &[u32] {
        &self.generated
    }

    /// True once the client has the log-probabilities of the prompt.
    pub(crate) fn has_prompt_logprobs(&self) -> bool {
        self.has_prompt_logprobs
    }

    /// Turns an event of verify into what the client is told, in order.
    ///
    /// # Errors
    /// INTERNAL when verify sends tokens that the tokenizer cannot decode.
    pub(crate) fn record(&mut self, event: VerifyEvent) -> Result<Vec<Event>, ServiceError> {
        Ok(match event {
            VerifyEvent::Prefill(progress) => self.progress(progress).into_iter().collect(),
            VerifyEvent::PromptLogprobs(logprobs) => {
                let first = !std::mem::replace(&mut self.has_prompt_logprobs, true);
                first
                    .then_some(Event::PromptLogprobs(logprobs))
                    .into_iter()
                    .collect()
            }
            VerifyEvent::Tokens(tokens) => vec![self.delta(tokens)?],
            VerifyEvent::Finished(finished) => {
                let usage = finished.usage.unwrap_or_default();
                self.finish(
                    finished.finish_reason(),
                    usage.cached_tokens,
                    finished.stats,
                )?
            }
        })
    }

    /// Progress never goes back: a replay prefills again.
    fn progress(&mut self, progress: verify::PrefillProgress) -> Option<Event> {
        if progress.done_tokens <= self.prefilled || !self.generated.is_empty() {
            return None;
        }
        self.prefilled = progress.done_tokens;
        Some(Event::Progress(Progress {
            done_tokens: progress.done_tokens,
            total_tokens: progress.total_tokens,
        }))
    }

    fn delta(&mut self, tokens: verify::CommittedTokens) -> Result<Event, ServiceError> {
        let text = self
            .decoder
            .push(&tokens.token_ids)
            .map_err(|error| ServiceError::internal(error.to_string()))?;
        self.generated.extend_from_slice(&tokens.token_ids);
        Ok(Event::Delta(Delta {
            text,
            token_ids: tokens.token_ids,
            logprobs: tokens.logprobs,
            tree: tokens.tree,
        }))
    }

    /// The text that still waited for the rest of a character, then the end.
    ///
    /// # Errors
    /// INTERNAL when the rest cannot be decoded.
    pub(crate) fn finish(
        &mut self,
        reason: FinishReason,
        cached_tokens: u32,
        stats: Option<verify::SpeculationStats>,
    ) -> Result<Vec<Event>, ServiceError> {
        let rest = self
            .decoder
            .finish()
            .map_err(|error| ServiceError::internal(error.to_string()))?;
        let mut events = Vec::with_capacity(2);
        if !rest.is_empty() {
            events.push(Event::Delta(Delta {
                text: rest,
                ..Delta::default()
            }));
        }
        events.push(Event::Finished(Finished {
            finish_reason: reason.into(),
            // Counted here: a replayed verify call knows its own part only.
            usage: Some(verify::Usage {
                prompt_tokens: count(self.prompt_tokens),
                completion_tokens: count(self.generated.len()),
                cached_tokens,
            }),
            stats,
        }));
        Ok(events)
    }
}

/// A context is far shorter than `u32::MAX` tokens.
fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}
