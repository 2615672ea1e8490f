use std::{collections::VecDeque, sync::Arc, time::Duration};

use futures_util::{Stream, stream};
use tonic::{Request, Status, Streaming};
use treespec_checkpoint::IncrementalDecoder;
use treespec_rpc::{
    ServiceError,
    convert::Speculation,
    proto::{
        coordinator::v1::{GenerateResponse, generate_response::Event},
        verify::v1::{self as verify, FinishReason, generate_response::Event as VerifyEvent},
    },
};

use crate::{
    admission::Ticket,
    deadline::Deadline,
    drafters::Drafters,
    in_flight::RequestId,
    replicas::{ReplicaLease, Replicas, Requirement},
    transcript::{Ending, Transcript},
};

/// Verify calls that one request may take: the first and two replays.
const MAX_ATTEMPTS: usize = 3;
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A checked request, and what it needs to run.
pub(crate) struct Job {
    pub(crate) id: Arc<RequestId>,
    pub(crate) ticket: Ticket,
    pub(crate) deadline: Deadline,
    pub(crate) replicas: Arc<Replicas>,
    /// Drafters to lease from; `None` for plain decoding.
    pub(crate) drafters: Option<Arc<Drafters>>,
    /// Which of the request's answers this is.
    pub(crate) choice: u32,
    /// What ends the answer besides its tokens.
    pub(crate) ending: Ending,
    /// The request to verify: prompt and options.
    pub(crate) request: verify::GenerateRequest,
}

/// One request from its admission to its last event. Dropping it drops the verify call and frees all it holds.
pub(crate) struct Generation {
    job: Job,
    transcript: Transcript,
    /// Events that the client has not been sent yet.
    outbox: VecDeque<Event>,
    attempt: Option<Attempt>,
    attempts: usize,
    requirement: Requirement,
}

/// A verify call under way.
struct Attempt {
    lease: ReplicaLease,
    events: Streaming<verify::GenerateResponse>,
}

/// How a verify call came to nothing.
enum Failure {
    /// The replica is gone or going: the sequence can go on elsewhere.
    ReplicaLost { lease: ReplicaLease, reason: String },
    /// The request itself failed.
    Request(ServiceError),
}

impl Generation {
    pub(crate) fn new(mut job: Job, decoder: IncrementalDecoder) -> Self {
        let prompt_tokens = job.request.token_ids.len();
        let ending = std::mem::take(&mut job.ending);
        Self {
            transcript: Transcript::new(decoder, ending, job.choice, prompt_tokens),
            job,
            outbox: VecDeque::new(),
            attempt: None,
            attempts: 0,
            requirement: Requirement::default(),
        }
    }

    /// The answer's stream: what verify commits, then Finished or a status.
    pub(crate) fn into_stream(
        self,
    ) -> impl Stream<Item = Result<GenerateResponse, Status>> + Send + 'static {
        stream::unfold(Some(self), |generation| async {
            let mut generation = generation?;
            let deadline = generation.job.deadline;
            match deadline.enforce(generation.next_event()).await {
                Ok(Some(event)) => {
                    let response = GenerateResponse { event: Some(event) };
                    Some((Ok(response), Some(generation)))
                }
                Ok(None) => None,
                Err(error) => {
                    let request_id = generation.job.id.as_str();
                    tracing::info!(request_id, %error, "generation failed");
                    Some((Err(error.into()), None))
                }
            }
        })
    }

    async fn next_event(&mut self) -> Result<Option<Event>, ServiceError> {
        loop {
            if let Some(event) = self.outbox.pop_front() {
                return Ok(Some(event));
            }
            if self.transcript.is_finished() {
                return Ok(None);
            }
            self.job.ticket.turn().await?;
            match self.next_verify_event().await {
                Ok(event) => self.record(event)?,
                Err(Failure::ReplicaLost { lease, reason }) => self.move_on(&lease, &reason)?,
                // Verify has the same deadline, and its transport may say CANCELLED first.
                Err(Failure::Request(_)) if self.job.deadline.has_passed() => {
                    return Err(ServiceError::DeadlineExceeded);
                }
                Err(Failure::Request(error)) => return Err(error),
            }
        }
    }

    /// The next event of the verify call; starts one when there is none.
    async fn next_verify_event(&mut self) -> Result<VerifyEvent, Failure> {
        let mut attempt = match self.attempt.take() {
            Some(attempt) => attempt,
            None => self.start_attempt().await?,
        };
        loop {
            let reason = match attempt.events.message().await {
                Ok(Some(verify::GenerateResponse { event: Some(event) })) => {
                    self.attempt = Some(attempt);
                    return Ok(event);
                }
                // An event of a later version.
                Ok(Some(verify::GenerateResponse { event: None })) => continue,
                Ok(None) => "its stream ended without a result".to_owned(),
                Err(status) => return Err(Failure::new(attempt.lease, &status)),
            };
            return Err(Failure::ReplicaLost {
                lease: attempt.lease,
                reason,
            });
        }
    }

    async fn start_attempt(&mut self) -> Result<Attempt, Failure> {
        let lease = self
            .job
            .replicas
            .acquire(&self.requirement)
            .await
            .map_err(Failure::Request)?;
        self.attempts += 1;
        let mut request = Request::new(self.verify_request(lease.model()));
        if let Some(remaining) = self.job.deadline.remaining() {
            request.set_timeout(remaining);
        }
        match lease.client().generate(request).await {
            Ok(response) => Ok(Attempt {
                lease,
                events: response.into_inner(),
            }),
            Err(status) => Err(Failure::new(lease, &status)),
        }
    }

    /// The request for a replica, with what was generated so far, so that a replay continues after it.
    fn verify_request(&self, model: &verify::GetModelInfoResponse) -> verify::GenerateRequest {
        let mut request = self.job.request.clone();
        request.prompt_length = u32::try_from(request.token_ids.len()).ok();
        request
            .token_ids
            .extend_from_slice(self.transcript.generated());
        if self.transcript.has_prompt_logprobs()
            && let Some(output) = &mut request.output
        {
            output.prompt_logprobs = Some(false);
        }
        if !model.hosts_drafter {
            let drafters = self.job.drafters.as_ref();
            request.drafter = drafters.and_then(|drafters| drafters.lease());
            if request.drafter.is_none() {
                // The replica before this one may have hosted a drafter: the loss of it is no error of the request.
                request.speculation = Some(Speculation::Ar.into());
            }
        }
        request
    }

    fn record(&mut self, event: VerifyEvent) -> Result<(), ServiceError> {
        self.outbox.extend(self.transcript.record(event)?);
        if self.transcript.is_finished() {
            // Ends the call of an answer that a stop string has ended.
            self.attempt = None;
        }
        Ok(())
    }

    /// Prepares the replay of a sequence whose replica is lost.
    fn move_on(&mut self, lease: &ReplicaLease, reason: &str) -> Result<(), ServiceError> {
        if self.job.deadline.has_passed() {
            // The transport gave up because of the deadline: the replica is not to blame.
            return Err(ServiceError::DeadlineExceeded);
        }
        let endpoint = lease.endpoint();
        lease.report_lost(reason);
        if let Some(reason) = self.completion(lease.model()) {
            self.outbox.extend(self.transcript.finish(reason, 0, None)?);
            return Ok(());
        }
        if self.attempts >= MAX_ATTEMPTS {
            return Err(ServiceError::Unavailable {
                description: format!(
                    "verify failed {} times, last {endpoint}: {reason}",
                    self.attempts
                ),
                retry_after: Some(RETRY_AFTER),
            });
        }
        let request_id = self.job.id.as_str();
        tracing::warn!(
            request_id,
            endpoint,
            reason,
            generated = self.transcript.generated().len(),
            "verify replica lost, replaying"
        );
        self.requirement.avoid = Some(endpoint.to_owned());
        if !self.transcript.generated().is_empty() {
            let profile = lease.model().numerics_profile.clone();
            self.requirement.numerics_profile.get_or_insert(profile);
        }
        Ok(())
    }

    /// Why nothing more is to be generated, when only the last message of verify is missing.
    fn completion(&self, model: &verify::GetModelInfoResponse) -> Option<FinishReason> {
        let request = &self.job.request;
        let generated = self.transcript.generated();
        let last = generated.last()?;
        let at_eos = !request.ignore_eos() && model.eos_token_ids.contains(last);
        if at_eos || request.stop_token_ids.contains(last) {
            return Some(FinishReason::Stop);
        }
        let at_limit = request
            .max_tokens
            .is_some_and(|most| generated.len() >= most as usize);
        let context = request.token_ids.len() + generated.len();
        (at_limit || context >= model.context_length as usize).then_some(FinishReason::Length)
    }
}

impl Failure {
    fn new(lease: ReplicaLease, status: &Status) -> Self {
        match ServiceError::from_status(status) {
            ServiceError::Unavailable { description, .. } => Self::ReplicaLost {
                lease,
                reason: description,
            },
            error => Self::Request(error),
        }
    }
}
