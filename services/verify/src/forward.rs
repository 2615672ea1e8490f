//! The thread that owns the backend. Work arrives by channel; everything that waits when a forward can start goes
//! into that forward as one ragged batch. Row invariance makes the company irrelevant to the result.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use treespec_engine::{
    Backend, EngineError, ForwardOutput, HeadRequest, HeadRow, RowBatch, RowShape, SequenceRows,
};
use treespec_rpc::ServiceError;
use treespec_sampling::greedy;
use treespec_tree::{Acceptance, AncestorSets, TokenTree, walk};

use crate::error::engine_fault;
use crate::kv_reservation::KvReservation;

/// Where a sequence's new rows go.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) kv: Arc<KvReservation>,
    /// Rows already in the cache.
    pub(crate) committed: usize,
}

/// A chunk of prompt.
pub(crate) struct Prefill {
    pub(crate) place: Place,
    pub(crate) tokens: Vec<u32>,
    /// One per token.
    pub(crate) head: Vec<Option<HeadRequest>>,
    pub(crate) features: bool,
}

/// A tree to verify, and to commit as far as the target agrees.
pub(crate) struct Verify {
    pub(crate) place: Place,
    pub(crate) tree: TokenTree,
    pub(crate) head: HeadRequest,
    pub(crate) features: bool,
}

/// What became of a tree. The accepted path is in the KV cache when this arrives.
pub(crate) struct Verified {
    pub(crate) tree: TokenTree,
    pub(crate) acceptance: Acceptance,
    /// Head rows of the accepted path: row `i` chose the `i`-th new token.
    pub(crate) head: Vec<HeadRow>,
    /// Feature rows of the accepted path.
    pub(crate) features: Vec<f32>,
    pub(crate) timings: Timings,
}

/// Where the time of a verification went.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Timings {
    pub(crate) forward: Duration,
    pub(crate) accept: Duration,
}

type Reply<T> = oneshot::Sender<Result<T, ServiceError>>;

enum Work {
    Prefill(Prefill, Reply<ForwardOutput>),
    Verify(Box<Verify>, Reply<Verified>),
    HeadTopk(Vec<f32>, usize, Reply<Vec<HeadRow>>),
}

/// Sends work to the engine thread. The thread ends when the last handle is dropped.
#[derive(Clone)]
pub(crate) struct ForwardQueue {
    work: mpsc::UnboundedSender<Work>,
}

impl ForwardQueue {
    /// Starts the thread. The receiver resolves when it ends. The queue is unbounded because every sequence has at most
    /// one piece of work in it and sequences are bounded by admission.
    pub(crate) fn start(
        backend: Box<dyn Backend>,
    ) -> std::io::Result<(Self, oneshot::Receiver<()>)> {
        let (work, waiting) = mpsc::unbounded_channel();
        let (alive, ended) = oneshot::channel::<()>();
        thread::Builder::new()
            .name("verify-engine".into())
            .spawn(move || {
                // Dropped with the thread, by a panic too.
                let _alive = alive;
                run(backend, waiting);
            })?;
        Ok((Self { work }, ended))
    }

    pub(crate) async fn prefill(&self, prefill: Prefill) -> Result<ForwardOutput, ServiceError> {
        self.send(|reply| Work::Prefill(prefill, reply)).await
    }

    pub(crate) async fn verify(&self, verify: Verify) -> Result<Verified, ServiceError> {
        self.send(|reply| Work::Verify(Box::new(verify), reply))
            .await
    }

    /// The top-k pass for a drafter's hidden rows, `[n, hidden]`.
    pub(crate) async fn head_topk(
        &self,
        hidden: Vec<f32>,
        k: usize,
    ) -> Result<Vec<HeadRow>, ServiceError> {
        self.send(|reply| Work::HeadTopk(hidden, k, reply)).await
    }

    async fn send<T>(&self, work: impl FnOnce(Reply<T>) -> Work) -> Result<T, ServiceError> {
        let gone = || ServiceError::internal("the engine thread has ended");
        let (reply, answer) = oneshot::channel();
        self.work.send(work(reply)).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

fn run(mut backend: Box<dyn Backend>, mut waiting: mpsc::UnboundedReceiver<Work>) {
    while let Some(first) = waiting.blocking_recv() {
        let mut batch = Vec::new();
        let mut next = Some(first);
        while let Some(work) = next {
            match work {
                Work::Prefill(prefill, reply) => batch.push(Member::prefill(prefill, reply)),
                Work::Verify(verify, reply) => batch.push(Member::verify(*verify, reply)),
                Work::HeadTopk(hidden, k, reply) => {
                    let rows = backend.head_topk(&hidden, k);
                    // A request that is gone needs no answer, here and below.
                    let _ = reply.send(rows.map_err(|error| engine_fault(&error)));
                }
            }
            next = waiting.try_recv().ok();
        }
        run_batch(&mut *backend, batch);
    }
}

/// One sequence's share of a forward.
struct Member {
    place: Place,
    tokens: Vec<u32>,
    head: Vec<Option<HeadRequest>>,
    features: bool,
    then: Then,
}

enum Then {
    Answer(Reply<ForwardOutput>),
    Accept {
        tree: TokenTree,
        ancestors: AncestorSets,
        reply: Reply<Verified>,
    },
}

impl Member {
    fn prefill(prefill: Prefill, reply: Reply<ForwardOutput>) -> Self {
        Self {
            place: prefill.place,
            tokens: prefill.tokens,
            head: prefill.head,
            features: prefill.features,
            then: Then::Answer(reply),
        }
    }

    fn verify(verify: Verify, reply: Reply<Verified>) -> Self {
        let ancestors = verify.tree.ancestors();
        Self {
            place: verify.place,
            tokens: verify.tree.tokens().to_vec(),
            head: vec![Some(verify.head); verify.tree.len()],
            features: verify.features,
            then: Then::Accept {
                tree: verify.tree,
                ancestors,
                reply,
            },
        }
    }

    fn rows(&self) -> SequenceRows<'_> {
        SequenceRows {
            table: self.place.kv.table(),
            committed: self.place.committed,
            tokens: &self.tokens,
            shape: match &self.then {
                // A chain's rows see each other without a mask.
                Then::Accept {
                    tree, ancestors, ..
                } if !tree.is_chain() => RowShape::tree(tree, ancestors),
                _ => RowShape::Chain,
            },
            head: &self.head,
            features: self.features,
        }
    }

    fn is_abandoned(&self) -> bool {
        match &self.then {
            Then::Answer(reply) => reply.is_closed(),
            Then::Accept { reply, .. } => reply.is_closed(),
        }
    }

    fn fail(self, error: ServiceError) {
        match self.then {
            Then::Answer(reply) => drop(reply.send(Err(error))),
            Then::Accept { reply, .. } => drop(reply.send(Err(error))),
        }
    }

    fn finish(self, backend: &mut dyn Backend, output: ForwardOutput, forward: Duration) {
        match self.then {
            Then::Answer(reply) => drop(reply.send(Ok(output))),
            Then::Accept { tree, reply, .. } => {
                let verified = accept(backend, &self.place, tree, output, forward);
                drop(reply.send(verified.map_err(|error| engine_fault(&error))));
            }
        }
    }
}

fn run_batch(backend: &mut dyn Backend, members: Vec<Member>) {
    // One wrong member must not spoil the forward of the others.
    let spec = backend.spec();
    let (vocab_size, context_length) = (spec.vocab_size, spec.context_length);
    let mut valid = Vec::with_capacity(members.len());
    for member in members {
        match member.rows().validate(vocab_size, context_length) {
            _ if member.is_abandoned() => {}
            Ok(()) => valid.push(member),
            Err(error) => member.fail(engine_fault(&error)),
        }
    }
    if valid.is_empty() {
        return;
    }
    let started = Instant::now();
    let outputs = backend.forward(&RowBatch {
        sequences: valid.iter().map(Member::rows).collect(),
    });
    let forward = started.elapsed();
    match outputs {
        Ok(outputs) => {
            for (member, output) in valid.into_iter().zip(outputs) {
                member.finish(backend, output, forward);
            }
        }
        Err(error) => {
            tracing::error!(%error, "a forward failed");
            for member in valid {
                member.fail(engine_fault(&error));
            }
        }
    }
}

/// Samples at every node, walks down while the target's choice is a child, and keeps that path in the cache.
fn accept(
    backend: &mut dyn Backend,
    place: &Place,
    tree: TokenTree,
    mut output: ForwardOutput,
    forward: Duration,
) -> Result<Verified, EngineError> {
    let started = Instant::now();
    let choices = output
        .head
        .iter()
        .enumerate()
        .map(|(row, head)| greedy(&head.top).ok_or(EngineError::NonFiniteLogits { row }))
        .collect::<Result<Vec<u32>, _>>()?;
    let acceptance = walk(&tree, |node| choices[node]);
    backend.compact(place.kv.table(), place.committed, &acceptance.path)?;
    let width = output.features.len() / tree.len();
    let features = acceptance
        .path
        .iter()
        .flat_map(|&node| &output.features[node * width..(node + 1) * width])
        .copied()
        .collect();
    let head = acceptance
        .path
        .iter()
        .map(|&node| HeadRow {
            top: std::mem::take(&mut output.head[node].top),
            ..output.head[node].clone()
        })
        .collect();
    Ok(Verified {
        tree,
        acceptance,
        head,
        features,
        timings: Timings {
            forward,
            accept: started.elapsed(),
        },
    })
}
