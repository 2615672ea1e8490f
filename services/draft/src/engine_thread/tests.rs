//! Jobs are queued before the engine runs, so what it finds waiting is known exactly.

use std::sync::{Arc, atomic::Ordering};

use treespec_engine::DraftShape;

use super::*;
use crate::{
    proposal::Placement,
    scripted::{BLOCK, HIDDEN, Probe, ScriptedDrafter},
};

const LINK: LinkId = LinkId(1);

/// A queue of jobs with one link, and the responses to it.
struct Queue {
    jobs: mpsc::UnboundedSender<Job>,
    waiting: mpsc::UnboundedReceiver<Job>,
    responses: mpsc::Sender<Result<LinkResponse, Status>>,
    answers: mpsc::Receiver<Result<LinkResponse, Status>>,
}

impl Queue {
    fn new() -> Self {
        let (jobs, waiting) = mpsc::unbounded_channel();
        let (responses, answers) = mpsc::channel(256);
        let queue = Self {
            jobs,
            waiting,
            responses,
            answers,
        };
        queue.push(Job::Attach {
            link: LINK,
            verifier: "v".to_owned(),
            ended: oneshot::channel().0,
        });
        queue
    }

    fn push(&self, job: Job) {
        assert!(self.jobs.send(job).is_ok());
    }

    fn sequence(&self, id: u64, request: SequenceRequest) {
        let reply = self.responses.clone().try_reserve_owned();
        self.push(Job::Sequence {
            link: LINK,
            key: SequenceKey { id, epoch: 0 },
            request,
            reply: reply.map_err(|_| ()).expect("room for the answer"),
        });
    }

    /// Opens a sequence with one row at position 0.
    fn open(&self, id: u64) {
        self.sequence(id, SequenceRequest::Open);
        self.sequence(id, SequenceRequest::Context(row(0)));
    }

    fn propose(&self, id: u64, ctx_end: u32, placement: Placement) {
        let request = ProposalRequest {
            ctx_end,
            root_token: 3,
            shape: DraftShape::Tree { budget: 4 },
            placement,
            coupling: None,
        };
        self.sequence(id, SequenceRequest::Propose(request));
    }

    fn prime(&self, id: u64, start: u32) -> oneshot::Receiver<Result<u32, ServiceError>> {
        let (reply, done) = oneshot::channel();
        self.push(Job::Prime(PrimeChunk {
            verifier: "v".to_owned(),
            key: SequenceKey { id, epoch: 0 },
            rows: row(start),
            reply,
        }));
        done
    }

    /// Runs the engine until the queue is empty and returns what the verifier got.
    fn run(mut self, probe: &Arc<Probe>) -> Vec<Message> {
        let drafter = Box::new(ScriptedDrafter::new(probe, true));
        drop((self.jobs, self.responses));
        Engine::new(drafter, self.waiting, 64).run();
        std::iter::from_fn(|| self.answers.blocking_recv())
            .filter_map(|answer| answer.expect("a response").message)
            .collect()
    }
}

fn row(start: u32) -> FeatureSpan {
    FeatureSpan {
        start,
        end: start + 1,
        values: vec![0.5; HIDDEN],
    }
}

fn proposed(answers: &[Message]) -> Vec<(u64, u32)> {
    answers
        .iter()
        .filter_map(|answer| match answer {
            Message::Proposal(proposal) => Some((proposal.sequence_id, proposal.ctx_end)),
            _ => None,
        })
        .collect()
}

fn batches(probe: &Probe) -> Vec<usize> {
    probe.batches.lock().unwrap().clone()
}

#[test]
fn all_waiting_proposals_of_a_placement_share_a_forward_and_a_head_pass() {
    let (probe, queue) = (Arc::default(), Queue::new());
    for id in 0..9 {
        queue.open(id);
        let placement = if id < 5 {
            Placement::Draft
        } else {
            Placement::Verify
        };
        queue.propose(id, 1, placement);
    }
    let answers = queue.run(&probe);
    assert_eq!(batches(&probe), [5, 4]);
    assert_eq!(*probe.head_rows.lock().unwrap(), [5 * (BLOCK - 1)]);
    let expected: Vec<_> = (0..9).map(|id| (id, 1)).collect();
    assert_eq!(proposed(&answers), expected);
}

#[test]
fn a_proposal_is_made_before_the_next_message_of_its_sequence() {
    let (probe, queue) = (Arc::default(), Queue::new());
    for id in 0..3 {
        queue.open(id);
        queue.propose(id, 1, Placement::Draft);
    }
    queue.sequence(1, SequenceRequest::Context(row(1)));
    queue.propose(1, 2, Placement::Draft);
    queue.push(Job::Close { link: LINK, id: 1 });
    let answers = queue.run(&probe);
    assert_eq!(batches(&probe), [3, 1]);
    assert_eq!(proposed(&answers), [(0, 1), (1, 1), (2, 1), (1, 2)]);
}

#[test]
fn a_link_that_ends_gets_its_proposals_first_and_frees_its_contexts() {
    let (probe, queue) = (Arc::default(), Queue::new());
    queue.open(1);
    queue.propose(1, 1, Placement::Draft);
    queue.push(Job::Detach { link: LINK });
    queue.sequence(1, SequenceRequest::Context(row(1)));
    let answers = queue.run(&probe);
    assert_eq!(proposed(&answers), [(1, 1)]);
    assert_eq!(probe.open_contexts.load(Ordering::SeqCst), 0);
    assert!(matches!(answers.last(), Some(Message::Failure(_))));
}

#[test]
fn a_prefill_waits_for_steps_and_is_not_forgotten() {
    let (probe, queue) = (Arc::default(), Queue::new());
    queue.open(1);
    queue.open(2);
    let mut primed = [queue.prime(2, 1), queue.prime(2, 2), queue.prime(9, 0)];
    queue.propose(1, 1, Placement::Draft);
    // The last forward sees the context of sequence 2 as it was before the chunks, which arrived earlier.
    queue.propose(2, 1, Placement::Draft);
    let answers = queue.run(&probe);
    assert_eq!(batches(&probe), [2]);
    assert_eq!(proposed(&answers), [(1, 1), (2, 1)]);
    assert_eq!(primed[0].try_recv(), Ok(Ok(2)));
    assert_eq!(primed[1].try_recv(), Ok(Ok(3)));
    let unknown = primed[2].try_recv().expect("an answer");
    assert!(matches!(unknown, Err(ServiceError::NotFound { .. })));
}
