//! What a generation has brought.

use tokio::time::timeout;
use tonic::{Status, Streaming};
use treespec_rpc::proto::coordinator::v1::{
    Delta, GenerateResponse, finished::Stop, generate_response::Event,
};
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
    /// The seed that the request was answered with.
    pub seed: u64,
    /// Why it ended; unspecified until it has.
    pub finish: FinishReason,
    /// The token or string that ended it.
    pub stop: Option<Stop>,
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
/// Every method panics when the stream breaks its own protocol: one Started, then deltas, then one Finished per answer.
pub struct AnswerStream {
    events: Streaming<GenerateResponse>,
    answers: Vec<Answer>,
    started: bool,
}

impl AnswerStream {
    pub(crate) fn new(events: Streaming<GenerateResponse>, choices: usize) -> Self {
        Self {
            events,
            answers: vec![Answer::default(); choices],
            started: false,
        }
    }

    /// What has come so far of the first answer.
    pub fn so_far(&self) -> &Answer {
        &self.answers[0]
    }

    /// The next delta; `None` when the generation has finished.
    ///
    /// # Errors
    /// The status that ends the stream.
    pub async fn next(&mut self) -> Result<Option<Delta>, Status> {
        loop {
            let response = timeout(PATIENCE, self.events.message())
                .await
                .unwrap_or_else(|_| panic!("the stream stalls after {:?}", self.answers))?;
            let Some(response) = response else {
                let unfinished = FinishReason::Unspecified;
                assert!(
                    self.answers
                        .iter()
                        .all(|answer| answer.finish != unfinished),
                    "the stream ends without Finished"
                );
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

    /// Reads to the end, for the first answer.
    ///
    /// # Errors
    /// The status that ends the stream, here and below.
    pub async fn finish(self) -> Result<Answer, Status> {
        Ok(self.finish_all().await?.swap_remove(0))
    }

    /// Reads to the end, for all answers.
    ///
    /// # Errors
    /// As [`AnswerStream::finish`].
    pub async fn finish_all(mut self) -> Result<Vec<Answer>, Status> {
        while self.next().await?.is_some() {}
        Ok(self.answers)
    }

    fn record(&mut self, event: Event) -> Option<Delta> {
        assert_eq!(
            self.started,
            !matches!(event, Event::Started(_)),
            "Started must come once and first"
        );
        let choice = match &event {
            Event::Delta(delta) => delta.choice,
            Event::Finished(finished) => finished.choice,
            Event::Started(_) | Event::Progress(_) | Event::PromptLogprobs(_) => 0,
        };
        let answer = &mut self.answers[choice as usize];
        let unfinished = answer.finish == FinishReason::Unspecified;
        match event {
            Event::Started(started) => {
                self.started = true;
                for answer in &mut self.answers {
                    answer.request_id.clone_from(&started.request_id);
                    answer.prompt_tokens = started.prompt_tokens;
                    answer.seed = started.seed;
                }
            }
            Event::Progress(_) => {}
            Event::PromptLogprobs(logprobs) => {
                assert!(answer.prompt_logprobs.is_empty(), "they come once");
                answer.prompt_logprobs = logprobs.logprobs;
            }
            Event::Delta(delta) => {
                assert!(unfinished, "{delta:?} after Finished");
                answer.text.push_str(&delta.text);
                answer.token_ids.extend(&delta.token_ids);
                answer.logprobs.extend(delta.logprobs.iter().cloned());
                answer.trees.extend(delta.tree.clone());
                return Some(delta);
            }
            Event::Finished(finished) => {
                assert!(unfinished, "{finished:?} after Finished");
                answer.finish = finished.finish_reason();
                answer.stop.clone_from(&finished.stop);
                answer.usage = finished.usage.unwrap_or_default();
                answer.stats = finished.stats.unwrap_or_default();
                answer.rounds.clone_from(&answer.stats.rounds);
            }
        }
        None
    }
}
