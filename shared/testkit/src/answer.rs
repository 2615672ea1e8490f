//! What a generation has brought.

use tokio::time::timeout;
use tonic::{Status, Streaming};
use treespec_rpc::proto::coordinator::v1::{Delta, GenerateResponse, generate_response::Event};
use treespec_rpc::proto::verify::v1::{
    FinishReason, SpeculationStats, StepTree, TokenLogprob, Usage,
};

use crate::PATIENCE;

/// A generation, complete when it came from [`AnswerStream::finish`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// Given by the client or minted.
    pub request_id: String,
    /// Length of the prompt in tokens.
    pub prompt_tokens: u32,
    /// Generated tokens.
    pub token_ids: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why it ended; unspecified until it has.
    pub finish: FinishReason,
    /// One per token when asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// Those of the second prompt token on, when asked for.
    pub prompt_logprobs: Vec<f32>,
    /// The tree of every step when asked for.
    pub trees: Vec<StepTree>,
    /// Drafted tokens accepted by every step.
    pub rounds: Vec<u32>,
    /// Token counts.
    pub usage: Usage,
    /// What speculation did.
    pub stats: SpeculationStats,
}

/// A generation under way. Dropping it cancels the request.
///
/// Every method panics when the stream breaks its own protocol: one Started, then deltas, then one Finished.
pub struct AnswerStream {
    events: Streaming<GenerateResponse>,
    answer: Answer,
    started: bool,
    finished: bool,
}

impl AnswerStream {
    pub(crate) fn new(events: Streaming<GenerateResponse>) -> Self {
        Self {
            events,
            answer: Answer::default(),
            started: false,
            finished: false,
        }
    }

    /// What has come so far.
    pub fn so_far(&self) -> &Answer {
        &self.answer
    }

    /// The next delta; `None` when the generation has finished.
    ///
    /// # Errors
    /// The status that ends the stream.
    pub async fn next(&mut self) -> Result<Option<Delta>, Status> {
        loop {
            let response = timeout(PATIENCE, self.events.message())
                .await
                .unwrap_or_else(|_| panic!("the stream stalls after {:?}", self.answer))?;
            let Some(response) = response else {
                assert!(self.finished, "the stream ends without Finished");
                return Ok(None);
            };
            let event = response
                .event
                .unwrap_or_else(|| panic!("a response without an event"));
            if let Some(delta) = self.record(event) {
                return Ok(Some(delta));
            }
        }
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// The status that ends the stream.
    pub async fn finish(mut self) -> Result<Answer, Status> {
        while self.next().await?.is_some() {}
        Ok(self.answer)
    }

    fn record(&mut self, event: Event) -> Option<Delta> {
        assert!(!self.finished, "{event:?} after Finished");
        assert_eq!(
            self.started,
            !matches!(event, Event::Started(_)),
            "Started must come once and first"
        );
        let answer = &mut self.answer;
        match event {
            Event::Started(started) => {
                self.started = true;
                answer.request_id = started.request_id;
                answer.prompt_tokens = started.prompt_tokens;
            }
            Event::Progress(_) => {}
            Event::PromptLogprobs(logprobs) => {
                assert!(answer.prompt_logprobs.is_empty(), "they come once");
                answer.prompt_logprobs = logprobs.logprobs;
            }
            Event::Delta(delta) => {
                answer.text.push_str(&delta.text);
                answer.token_ids.extend(&delta.token_ids);
                answer.logprobs.extend(delta.logprobs.iter().cloned());
                answer.trees.extend(delta.tree.clone());
                return Some(delta);
            }
            Event::Finished(finished) => {
                self.finished = true;
                answer.finish = finished.finish_reason();
                answer.usage = finished.usage.unwrap_or_default();
                answer.stats = finished.stats.unwrap_or_default();
                answer.rounds.clone_from(&answer.stats.rounds);
            }
        }
        None
    }
}
