use treespec_checkpoint::IncrementalDecoder;
use treespec_rpc::{
    ServiceError,
    proto::{
        coordinator::v1::{Delta, Finished, Progress, finished::Stop, generate_response::Event},
        verify::v1::{self as verify, FinishReason, generate_response::Event as VerifyEvent},
    },
};

use crate::{
    step_log::StepLog,
    stop_strings::{Scan, StopStrings},
};

/// What ends an answer besides its tokens.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ending {
    pub(crate) stops: StopStrings,
    /// No stop string ends the answer before it has so many tokens.
    pub(crate) min_tokens: usize,
}

/// What has been generated so far, and how it is told to the client.
///
/// It outlives verify calls: a replay repeats prefill and continues the text, and the client notices neither.
pub(crate) struct Transcript {
    decoder: IncrementalDecoder,
    stops: StopStrings,
    /// No stop string ends the answer before it has so many tokens.
    min_tokens: usize,
    /// Which of the request's answers this is.
    choice: u32,
    prompt_tokens: usize,
    generated: Vec<u32>,
    steps: StepLog,
    prefilled: u32,
    has_prompt_logprobs: bool,
    is_finished: bool,
}

impl Transcript {
    /// An empty transcript of answer `choice` to a prompt of `prompt_tokens`.
    pub(crate) fn new(
        decoder: IncrementalDecoder,
        ending: Ending,
        choice: u32,
        prompt_tokens: usize,
    ) -> Self {
        Self {
            decoder,
            stops: ending.stops,
            min_tokens: ending.min_tokens,
            choice,
            prompt_tokens,
            generated: Vec::new(),
            steps: StepLog::new(),
            prefilled: 0,
            has_prompt_logprobs: false,
            is_finished: false,
        }
    }

    /// True after the last event.
    pub(crate) fn is_finished(&self) -> bool {
        self.is_finished
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
                let is_new = !std::mem::replace(&mut self.has_prompt_logprobs, true);
                is_new
                    .then_some(Event::PromptLogprobs(logprobs))
                    .into_iter()
                    .collect()
            }
            VerifyEvent::Tokens(tokens) => self.delta(tokens)?,
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
        let is_repeated = progress.done_tokens <= self.prefilled || !self.generated.is_empty();
        // The answers share a prompt: the first one's progress speaks for all.
        if is_repeated || self.choice > 0 {
            return None;
        }
        self.prefilled = progress.done_tokens;
        Some(Event::Progress(Progress {
            done_tokens: progress.done_tokens,
            total_tokens: progress.total_tokens,
        }))
    }

    /// The tokens of a step as far as no stop string ends the answer; then also its end.
    fn delta(&mut self, mut tokens: verify::CommittedTokens) -> Result<Vec<Event>, ServiceError> {
        let scan = self.read(&mut tokens)?;
        self.steps.add(tokens.token_ids.len());
        let delta = Event::Delta(Delta {
            text: scan.text,
            token_ids: tokens.token_ids,
            logprobs: tokens.logprobs,
            tree: tokens.tree,
            choice: self.choice,
        });
        let end = scan.stopped.map(|string| self.stop(string));
        Ok(std::iter::once(delta).chain(end).collect())
    }

    /// Takes the tokens one by one, since a stop string ends the answer with the token that completes it. What comes
    /// behind is cut off.
    fn read(&mut self, tokens: &mut verify::CommittedTokens) -> Result<Scan, ServiceError> {
        if self.stops.is_empty() {
            self.generated.extend_from_slice(&tokens.token_ids);
            return Ok(Scan {
                text: self.decode(&tokens.token_ids)?,
                stopped: None,
            });
        }
        let mut scan = Scan::default();
        for index in 0..tokens.token_ids.len() {
            let token = tokens.token_ids[index];
            let text = self.decode(&[token])?;
            self.generated.push(token);
            let may_stop = self.generated.len() >= self.min_tokens;
            let part = self.stops.push(&text, may_stop);
            scan.text += &part.text;
            if part.stopped.is_some() {
                tokens.token_ids.truncate(index + 1);
                tokens.logprobs.truncate(index + 1);
                scan.stopped = part.stopped;
                break;
            }
        }
        Ok(scan)
    }

    fn decode(&mut self, ids: &[u32]) -> Result<String, ServiceError> {
        self.decoder
            .push(ids)
            .map_err(|error| ServiceError::internal(error.to_string()))
    }

    /// The text that was held back, then the end.
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
        // The last character may complete a stop string.
        let may_stop = self.generated.len() >= self.min_tokens;
        let mut scan = self.stops.push(&rest, may_stop);
        if scan.stopped.is_none() {
            scan.text += &self.stops.finish();
        }
        let mut events = Vec::with_capacity(2);
        if !scan.text.is_empty() {
            events.push(Event::Delta(Delta {
                text: scan.text,
                choice: self.choice,
                ..Delta::default()
            }));
        }
        if let Some(string) = scan.stopped {
            events.push(self.stop(string));
            return Ok(events);
        }
        let stop = match (reason, self.generated.last()) {
            (FinishReason::Stop, Some(&token)) => Some(Stop::StopTokenId(token)),
            _ => None,
        };
        events.push(self.end(reason, stop, cached_tokens, stats));
        Ok(events)
    }

    /// The end by a stop string.
    fn stop(&mut self, string: String) -> Event {
        let stats = self.steps.report(self.generated.len());
        let stop = Some(Stop::StopString(string));
        self.end(FinishReason::Stop, stop, 0, Some(stats))
    }

    fn end(
        &mut self,
        reason: FinishReason,
        stop: Option<Stop>,
        cached_tokens: u32,
        stats: Option<verify::SpeculationStats>,
    ) -> Event {
        self.is_finished = true;
        Event::Finished(Finished {
            finish_reason: reason.into(),
            // Counted here: a replayed verify call knows its own part only.
            usage: Some(verify::Usage {
                prompt_tokens: count(self.prompt_tokens),
                completion_tokens: count(self.generated.len()),
                cached_tokens,
            }),
            stats,
            choice: self.choice,
            stop,
        })
    }
}

/// A context is far shorter than `u32::MAX` tokens.
fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
