//! The command line's side of the coordinator API.

use anyhow::{Context as _, Result, anyhow, bail};
use tonic::{Code, Status, transport::Channel};
use treespec_rpc::{
    proto::coordinator::v1::{
        self as proto, coordinator_service_client::CoordinatorServiceClient,
        generate_response::Event,
    },
    status::ServiceError,
    transport,
};

use treespec_sampling::answer_seed;

use crate::answer::Answer;

/// What a stream reports while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Update<'a> {
    /// So many of so many prompt tokens have been run through the target.
    Prefill {
        /// Prompt tokens done.
        done: u32,
        /// Prompt tokens in all.
        total: u32,
    },
    /// New text.
    Text(&'a str),
}

/// A connection to a coordinator.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    service: CoordinatorServiceClient<Channel>,
}

impl Client {
    /// A client of the coordinator at `endpoint`, for example `http://127.0.0.1:7070`. It connects with the first call.
    ///
    /// # Errors
    /// When `endpoint` is no such URL.
    pub(crate) fn new(endpoint: &str) -> Result<Self> {
        let channel = transport::channel(endpoint)?;
        Ok(Self {
            service: transport::coordinator_client(channel),
        })
    }

    /// Runs a request for one answer to its end and tells `on_update` what arrives.
    ///
    /// # Errors
    /// The service's status as one line, an error of `on_update`, or a stream that ends early.
    pub(crate) async fn generate(
        &mut self,
        request: proto::GenerateRequest,
        on_update: impl FnMut(Update<'_>) -> Result<()>,
    ) -> Result<Answer> {
        let mut answers = self.generate_all(request, on_update).await?;
        answers.pop().context("the coordinator sent no answer")
    }

    /// Runs a request to the end of all its answers and tells `on_update` what arrives of the first.
    ///
    /// # Errors
    /// As [`Client::generate`].
    pub(crate) async fn generate_all(
        &mut self,
        request: proto::GenerateRequest,
        mut on_update: impl FnMut(Update<'_>) -> Result<()>,
    ) -> Result<Vec<Answer>> {
        let choices = request.choices.unwrap_or(1);
        let mut stream = self
            .service
            .generate(request)
            .await
            .map_err(|status| status_error(&status))?
            .into_inner();
        let mut answers = vec![Answer::default(); choices as usize];
        let mut unfinished = answers.len();
        while let Some(message) = stream
            .message()
            .await
            .map_err(|status| status_error(&status))?
        {
            let event = message
                .event
                .context("the coordinator sent an event that this version does not know")?;
            unfinished -= usize::from(matches!(event, Event::Finished(_)));
            record(&mut answers, event, &mut on_update)?;
        }
        if unfinished > 0 {
            bail!(
                "the stream ended after {} tokens without a last message",
                answers
                    .iter()
                    .map(|answer| answer.token_ids.len())
                    .sum::<usize>()
            );
        }
        Ok(answers)
    }

    /// The text of `token_ids`, special tokens included.
    ///
    /// # Errors
    /// The service's status as one line.
    pub(crate) async fn detokenize(&mut self, token_ids: Vec<u32>) -> Result<String> {
        let request = proto::DetokenizeRequest {
            token_ids,
            skip_special_tokens: Some(false),
        };
        self.service
            .detokenize(request)
            .await
            .map(|response| response.into_inner().text)
            .map_err(|status| status_error(&status))
    }

    /// What the coordinator serves.
    ///
    /// # Errors
    /// The service's status as one line.
    pub(crate) async fn model_info(&mut self) -> Result<proto::GetModelInfoResponse> {
        self.service
            .get_model_info(proto::GetModelInfoRequest {})
            .await
            .map(tonic::Response::into_inner)
            .map_err(|status| status_error(&status))
    }
}

/// Adds an event to the answer that it belongs to.
fn record(
    answers: &mut [Answer],
    event: Event,
    on_update: &mut impl FnMut(Update<'_>) -> Result<()>,
) -> Result<()> {
    let choice = match &event {
        Event::Delta(delta) => delta.choice,
        Event::Finished(finished) => finished.choice,
        Event::Started(_) | Event::Progress(_) | Event::PromptLogprobs(_) => 0,
    };
    if let Event::Started(started) = &event {
        for (answer, choice) in answers.iter_mut().zip(0..) {
            answer.seed = answer_seed(started.seed, choice);
        }
    }
    let answer = answers.get_mut(choice as usize).with_context(|| {
        format!("the coordinator sent an answer {choice} that nobody asked for")
    })?;
    match event {
        Event::Started(_) => {}
        Event::Progress(progress) => on_update(Update::Prefill {
            done: progress.done_tokens,
            total: progress.total_tokens,
        })?,
        Event::PromptLogprobs(prompt) => answer.prompt_logprobs.extend(prompt.logprobs),
        Event::Delta(delta) => {
            if choice == 0 {
                on_update(Update::Text(&delta.text))?;
            }
            answer.text.push_str(&delta.text);
            answer.token_ids.extend(delta.token_ids);
            answer.logprobs.extend(delta.logprobs);
            answer.trees.extend(delta.tree);
        }
        Event::Finished(last) => {
            answer.finish_reason = last.finish_reason();
            answer.stop = last.stop;
            answer.usage = last.usage.unwrap_or_default();
            answer.stats = last.stats.unwrap_or_default();
        }
    }
    Ok(())
}

/// A status as one line: the code's name as the gRPC documentation writes it, then what went wrong.
fn status_error(status: &Status) -> anyhow::Error {
    let error = ServiceError::from_status(status);
    anyhow!("{}: {error}", code_name(error.code()))
}

fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_becomes_one_line_with_code_and_field() {
        let status = Status::from(ServiceError::invalid("max_tokens", "0 is not positive"));
        assert_eq!(
            status_error(&status).to_string(),
            "INVALID_ARGUMENT: max_tokens: 0 is not positive"
        );
    }

    #[tokio::test]
    async fn an_endpoint_where_nobody_listens_is_unavailable() {
        let mut client = Client::new("http://127.0.0.1:9").unwrap();
        let error = client.model_info().await.unwrap_err().to_string();
        assert!(error.starts_with("UNAVAILABLE: "), "{error}");
        assert!(Client::new("nonsense").is_err());
    }
}
