//! The one thread that owns the drafter and all bookkeeping. Jobs come in by a channel; nothing else touches either.
//!
//! Order of work: link messages in order of arrival, then all proposals that are waiting in one forward, then at most
//! one chunk of a Prime, so that a long prefill never stands in the way of steps.
//!
//! A device that is lost ends the thread: nothing that it could still answer would be true.

use std::{
    collections::{HashMap, VecDeque},
    thread,
};

use tokio::sync::{mpsc, oneshot};
use tonic::Status;
use treespec_engine::{ContextId, Drafter, DrafterSpec, EngineError};
use treespec_rpc::{
    ServiceError,
    convert::{self, FeatureSpan},
    handshake::Fingerprint,
    proto::draft::v1::{LinkResponse, Opened, Proposal, link_response::Message},
};

use crate::{
    Error, LoadedDrafter,
    error::service_error,
    proposal::{ProposalRequest, draft_batch},
    sessions::{LinkId, Refusal, SequenceKey, Sessions},
};

/// Room for one response on a link. It is reserved before a message is read, so the engine thread never waits for a
/// verifier that does not read, and such a verifier is not read from either.
pub(crate) type Reply = mpsc::OwnedPermit<Result<LinkResponse, Status>>;

/// Work for the engine thread.
pub(crate) enum Job {
    /// A link has shaken hands. `ended` tells it when another one takes its place.
    Attach {
        link: LinkId,
        verifier: String,
        ended: oneshot::Sender<ServiceError>,
    },
    /// A link has ended.
    Detach { link: LinkId },
    /// A message about a sequence.
    Sequence {
        link: LinkId,
        key: SequenceKey,
        request: SequenceRequest,
        reply: Reply,
    },
    /// A sequence that the verifier does not need any more.
    Close { link: LinkId, id: u64 },
    /// A chunk of a Prime stream.
    Prime(PrimeChunk),
}

/// A checked message about a sequence.
pub(crate) enum SequenceRequest {
    Open,
    Context(FeatureSpan),
    Propose(ProposalRequest),
    /// The message was malformed; its sequence ends in order with its other messages.
    Refuse(ServiceError),
}

/// Feature rows of a prefill.
pub(crate) struct PrimeChunk {
    pub(crate) verifier: String,
    pub(crate) key: SequenceKey,
    pub(crate) rows: FeatureSpan,
    /// Gets the end of the context.
    pub(crate) reply: oneshot::Sender<Result<u32, ServiceError>>,
}

/// What the thread knows about its drafter once it is loaded.
pub(crate) struct Loaded {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) spec: DrafterSpec,
}

/// Sends jobs to the thread. The thread ends when all clones are gone.
#[derive(Debug, Clone)]
pub(crate) struct EngineHandle(mpsc::UnboundedSender<Job>);

impl EngineHandle {
    /// # Errors
    /// UNAVAILABLE when the thread has ended.
    pub(crate) fn send(&self, job: Job) -> Result<(), ServiceError> {
        self.0.send(job).map_err(|_| Self::stopped())
    }

    /// The error of everything that depends on a thread that has ended.
    pub(crate) fn stopped() -> ServiceError {
        ServiceError::unavailable("the drafter has stopped")
    }
}

/// A running engine thread.
pub(crate) struct EngineThread {
    pub(crate) handle: EngineHandle,
    /// The outcome of the load.
    pub(crate) loaded: oneshot::Receiver<Result<Loaded, Error>>,
    /// Why the thread has ended, when its device is lost; closed when it has ended otherwise, by a panic too.
    pub(crate) ended: oneshot::Receiver<String>,
}

/// Starts the thread, which first calls `load`.
///
/// # Errors
/// [`Error::Thread`].
pub(crate) fn spawn(
    load: impl FnOnce() -> Result<LoadedDrafter, Error> + Send + 'static,
    max_sequences: usize,
) -> Result<EngineThread, Error> {
    let (jobs, queue) = mpsc::unbounded_channel();
    let (report, loaded) = oneshot::channel();
    let (alive, ended) = oneshot::channel();
    thread::Builder::new()
        .name("draft-engine".to_owned())
        .spawn(move || {
            // Dropped with the thread, by a panic too.
            let alive = alive;
            let (outcome, drafter) = match load() {
                Ok(LoadedDrafter {
                    drafter,
                    fingerprint,
                }) => {
                    let spec = drafter.spec().clone();
                    (Ok(Loaded { fingerprint, spec }), Some(drafter))
                }
                Err(error) => (Err(error), None),
            };
            // Nobody waits for the outcome when the service was stopped during the load.
            if report.send(outcome).is_ok()
                && let Some(drafter) = drafter
                && let Some(reason) = Engine::new(drafter, queue, max_sequences).run()
            {
                // The service waits for this as long as it runs.
                let _ = alive.send(reason);
            }
        })
        .map_err(Error::Thread)?;
    Ok(EngineThread {
        handle: EngineHandle(jobs),
        loaded,
        ended,
    })
}

struct Engine {
    drafter: Box<dyn Drafter>,
    sessions: Sessions<ContextId>,
    /// Tells a link that it has been replaced.
    links: HashMap<LinkId, oneshot::Sender<ServiceError>>,
    jobs: mpsc::UnboundedReceiver<Job>,
    /// Proposals for the next forward, at most one per sequence.
    proposals: Vec<PendingProposal>,
    primes: VecDeque<PrimeChunk>,
    /// What the drafter said when its device was lost.
    lost: Option<String>,
}

struct PendingProposal {
    link: LinkId,
    key: SequenceKey,
    context: ContextId,
    request: ProposalRequest,
    reply: Reply,
}

impl Engine {
    fn new(
        drafter: Box<dyn Drafter>,
        jobs: mpsc::UnboundedReceiver<Job>,
        max_sequences: usize,
    ) -> Self {
        Self {
            drafter,
            sessions: Sessions::new(max_sequences),
            links: HashMap::new(),
            jobs,
            proposals: Vec::new(),
            primes: VecDeque::new(),
            lost: None,
        }
    }

    /// Works until all handles are gone, which is `None`, or until the device is lost, which is the reason.
    fn run(mut self) -> Option<String> {
        while self.lost.is_none() {
            if self.primes.is_empty() {
                match self.jobs.blocking_recv() {
                    Some(job) => self.accept(job),
                    None => return None,
                }
            }
            while let Ok(job) = self.jobs.try_recv() {
                self.accept(job);
            }
            self.draft();
            if let Some(chunk) = self.primes.pop_front() {
                self.prime(chunk);
            }
        }
        self.lost
    }

    /// An error of the drafter as the verifier is told it.
    fn fault(lost: &mut Option<String>, error: &EngineError) -> ServiceError {
        if error.is_fatal() {
            tracing::error!(%error, "the drafter has failed for good");
            lost.get_or_insert_with(|| error.to_string());
        }
        service_error(error)
    }

    fn accept(&mut self, job: Job) {
        match job {
            Job::Attach {
                link,
                verifier,
                ended,
            } => self.attach(link, verifier, ended),
            Job::Detach { link } => {
                self.draft();
                self.links.remove(&link);
                let freed = self.sessions.detach(link);
                self.free(freed);
            }
            Job::Sequence {
                link,
                key,
                request,
                reply,
            } => self.sequence(link, key, request, reply),
            Job::Close { link, id } => {
                self.draft_before(link, id);
                let freed = self.sessions.close(link, id);
                self.free(freed);
            }
            Job::Prime(chunk) => self.primes.push_back(chunk),
        }
    }

    fn attach(&mut self, link: LinkId, verifier: String, ended: oneshot::Sender<ServiceError>) {
        self.draft();
        if let Some(replaced) = self.sessions.attach(link, verifier.clone()) {
            tracing::info!(%verifier, contexts = replaced.freed.len(), "a new link replaces the old one");
            if let Some(old) = self.links.remove(&replaced.link) {
                let error = ServiceError::Aborted {
                    description: format!("another link of verifier {verifier:?} replaced this one"),
                };
                // The old link may be ending by itself.
                let _ = old.send(error);
            }
            self.free(replaced.freed);
        }
        self.links.insert(link, ended);
    }

    fn sequence(&mut self, link: LinkId, key: SequenceKey, request: SequenceRequest, reply: Reply) {
        self.draft_before(link, key.id);
        let outcome = match request {
            SequenceRequest::Open => self.open(link, key).map(Some),
            SequenceRequest::Context(rows) => self.append(link, key, &rows).map(|()| None),
            SequenceRequest::Refuse(error) => Err(self.sessions.end(link, key, error)),
            SequenceRequest::Propose(request) => {
                match self.sessions.propose(link, key, request.ctx_end) {
                    Ok(context) => {
                        return self.proposals.push(PendingProposal {
                            link,
                            key,
                            context,
                            request,
                            reply,
                        });
                    }
                    Err(refusal) => Err(refusal),
                }
            }
        };
        match outcome {
            Ok(Some(opened)) => send(reply, Message::Opened(opened)),
            Ok(None) => {}
            Err(refusal) => self.refuse(key, refusal, reply),
        }
    }

    fn open(&mut self, link: LinkId, key: SequenceKey) -> Result<Opened, Refusal<ContextId>> {
        let (drafter, lost) = (&mut self.drafter, &mut self.lost);
        self.sessions.open(link, key, |former| {
            if let Some(former) = former {
                drafter.close(former);
            }
            drafter.open().map_err(|error| Self::fault(lost, &error))
        })?;
        tracing::debug!(
            sequence = key.id,
            key.epoch,
            open = self.sessions.open_sequences(),
            "sequence opened"
        );
        Ok(Opened {
            sequence_id: key.id,
            epoch: key.epoch,
            ctx_start: 0,
            ctx_end: 0,
        })
    }

    fn append(
        &mut self,
        link: LinkId,
        key: SequenceKey,
        rows: &FeatureSpan,
    ) -> Result<(), Refusal<ContextId>> {
        let context = self.sessions.append(link, key, rows.start, rows.end)?;
        self.drafter
            .append_context(context, rows.start, &rows.values)
            .map_err(|error| {
                let error = Self::fault(&mut self.lost, &error);
                self.sessions.end(link, key, error)
            })
    }

    fn prime(&mut self, chunk: PrimeChunk) {
        let outcome = self
            .sessions
            .link_of(&chunk.verifier)
            .map_err(Refusal::from)
            .and_then(|link| self.append(link, chunk.key, &chunk.rows));
        let outcome = outcome.map(|()| chunk.rows.end).map_err(|refusal| {
            self.free(refusal.freed);
            refusal.error
        });
        // The verifier may have given up on the call.
        let _ = chunk.reply.send(outcome);
    }

    /// Drafts first when the next message is about a sequence that waits for a draft: the proposal was made for the
    /// state before that message.
    fn draft_before(&mut self, link: LinkId, id: u64) {
        let waits = |proposal: &PendingProposal| proposal.link == link && proposal.key.id == id;
        if self.proposals.iter().any(waits) {
            self.draft();
        }
    }

    /// Answers all waiting proposals with one forward.
    fn draft(&mut self) {
        if self.proposals.is_empty() {
            return;
        }
        let proposals = std::mem::take(&mut self.proposals);
        let batch: Vec<_> = proposals.iter().map(|p| (p.context, p.request)).collect();
        let drafts = draft_batch(self.drafter.as_mut(), &batch);
        tracing::trace!(batch = batch.len(), "drafted");
        for (proposal, draft) in proposals.into_iter().zip(drafts) {
            let key = proposal.key;
            match draft {
                Ok(draft) => {
                    let message = Message::Proposal(Proposal {
                        sequence_id: key.id,
                        epoch: key.epoch,
                        ctx_end: proposal.request.ctx_end,
                        draft: Some(draft.reply),
                        timings: Some(draft.timings),
                    });
                    send(proposal.reply, message);
                }
                Err(error) => {
                    let error = Self::fault(&mut self.lost, &error);
                    let refusal = self.sessions.end(proposal.link, key, error);
                    self.refuse(key, refusal, proposal.reply);
                }
            }
        }
    }

    fn refuse(&mut self, key: SequenceKey, refusal: Refusal<ContextId>, reply: Reply) {
        tracing::debug!(sequence = key.id, key.epoch, error = %refusal.error, "sequence failed");
        self.free(refusal.freed);
        let failure = convert::failure_to_proto(key.id, key.epoch, &refusal.error);
        send(reply, Message::Failure(failure));
    }

    fn free(&mut self, contexts: impl IntoIterator<Item = ContextId>) {
        for context in contexts {
            self.drafter.close(context);
        }
    }
}

fn send(reply: Reply, message: Message) {
    reply.send(Ok(LinkResponse {
        message: Some(message),
    }));
}

#[cfg(test)]
mod tests;
