//! The thread that owns the model. Work arrives by channel; everything that waits when a forward can start goes into
//! one wave. Row invariance makes the company irrelevant to the result.

mod contexts;
mod host;
mod wave;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use treespec_engine::{DraftShape, Drafted, ForwardOutput, HeadRequest, HeadRow, RowChoices};
use treespec_rpc::ServiceError;
use treespec_sampling::{Coupling, TokenMask, TokenRules};
use treespec_tree::{Acceptance, TokenTree};

pub(crate) use self::contexts::DrafterContext;
use self::contexts::{ContextKey, Contexts};
use self::host::{Host, Lost};
use self::wave::Wave;
use crate::LoadedModel;
use crate::drafting::DraftCost;
use crate::kv_reservation::KvReservation;

/// Where a sequence's new rows go.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) kv: Arc<KvReservation>,
    /// Rows already in the cache.
    pub(crate) committed: usize,
}

/// How the rows of a piece of work choose the tokens behind them, see [`RowChoices`].
pub(crate) struct Choices {
    pub(crate) rules: Arc<TokenRules>,
    /// What can come behind each row; empty where anything can.
    pub(crate) grammar: Vec<TokenMask>,
    /// Leading rows that the counts of the rules have already.
    pub(crate) counted_rows: usize,
}

impl Choices {
    /// Without a grammar, for rows that are not counted yet.
    pub(crate) fn of(rules: Arc<TokenRules>) -> Self {
        Self {
            rules,
            grammar: Vec::new(),
            counted_rows: 0,
        }
    }

    fn rows(&self) -> RowChoices<'_> {
        RowChoices {
            processors: self.rules.processors(),
            grammar: &self.grammar,
            counted_rows: self.counted_rows,
        }
    }
}

/// A chunk of prompt.
pub(crate) struct Prefill {
    pub(crate) place: Place,
    pub(crate) tokens: Vec<u32>,
    /// One per token.
    pub(crate) head: Vec<Option<HeadRequest>>,
    pub(crate) choices: Choices,
    /// Whether to return the features of the rows.
    pub(crate) features: bool,
    /// The context of the hosted drafter that gets the features instead.
    pub(crate) context: Option<Arc<DrafterContext>>,
}

/// A tree to verify, and to commit as far as the target agrees.
pub(crate) struct Verify {
    pub(crate) place: Place,
    pub(crate) tree: TokenTree,
    pub(crate) head: HeadRequest,
    pub(crate) choices: Choices,
    /// Whether to return the features of the accepted rows.
    pub(crate) features: bool,
    /// The context of the hosted drafter that gets the features instead.
    pub(crate) context: Option<Arc<DrafterContext>>,
}

/// A draft of the hosted drafter that is not verified at once.
pub(crate) struct Draft {
    pub(crate) committed: usize,
    /// The decided token that is not in the cache yet.
    pub(crate) root: u32,
    pub(crate) context: Arc<DrafterContext>,
    pub(crate) shape: DraftShape,
    /// Deepest node that can be verified, at least 1.
    pub(crate) max_depth: usize,
    pub(crate) coupling: Option<Coupling>,
}

/// A step of the hosted drafter and the target. It decodes plainly when the drafter cannot draft.
pub(crate) struct Speculate {
    pub(crate) place: Place,
    /// The decided token that is not in the cache yet.
    pub(crate) root: u32,
    pub(crate) context: Arc<DrafterContext>,
    pub(crate) shape: DraftShape,
    /// Deepest node that can be verified, at least 1.
    pub(crate) max_depth: usize,
    pub(crate) head: HeadRequest,
    pub(crate) rules: Arc<TokenRules>,
    pub(crate) coupling: Option<Coupling>,
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
    /// What the hosted drafter's draft cost; `None` when the tree is not its own.
    pub(crate) draft: Option<DraftCost>,
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
    Speculate(Box<Speculate>, Reply<Verified>),
    Draft(Draft, Reply<Option<Drafted>>),
    HeadTopk(Vec<f32>, usize, Reply<Vec<HeadRow>>),
    CloseContext(ContextKey),
}

/// Sends work to the engine thread. The thread ends when the last handle is dropped.
#[derive(Clone)]
pub(crate) struct ForwardQueue {
    work: mpsc::UnboundedSender<Work>,
    /// Why the model cannot be used any more, set before any work is refused for it.
    lost: Arc<OnceLock<String>>,
    next_context: Arc<AtomicU64>,
}

impl ForwardQueue {
    /// Starts the thread. The receiver gets the reason when the device is lost, and fails when the thread ends
    /// otherwise, which it does only by a panic. The queue is unbounded because every sequence has at most two pieces
    /// of work in it and sequences are bounded by admission.
    pub(crate) fn start(model: LoadedModel) -> std::io::Result<(Self, oneshot::Receiver<String>)> {
        let (work, waiting) = mpsc::unbounded_channel();
        let (alive, ended) = oneshot::channel();
        let lost = Arc::new(OnceLock::new());
        let host = Host {
            model,
            contexts: Contexts::default(),
            lost: Arc::clone(&lost),
        };
        thread::Builder::new()
            .name("verify-engine".into())
            .spawn(move || {
                // Dropped with the thread, by a panic too.
                let alive = alive;
                if let Err(Lost(reason)) = run(host, waiting) {
                    // The server waits for this as long as it runs.
                    let _ = alive.send(reason);
                }
            })?;
        let queue = Self {
            work,
            lost,
            next_context: Arc::default(),
        };
        Ok((queue, ended))
    }

    /// A context of the hosted drafter for one sequence. It is opened by the first features that reach it.
    pub(crate) fn drafter_context(&self) -> Arc<DrafterContext> {
        let key = ContextKey(self.next_context.fetch_add(1, Ordering::Relaxed));
        Arc::new(DrafterContext::new(key, self.work.clone()))
    }

    pub(crate) async fn prefill(&self, prefill: Prefill) -> Result<ForwardOutput, ServiceError> {
        self.send(|reply| Work::Prefill(prefill, reply)).await
    }

    pub(crate) async fn verify(&self, verify: Verify) -> Result<Verified, ServiceError> {
        self.send(|reply| Work::Verify(Box::new(verify), reply))
            .await
    }

    /// One step by the hosted drafter.
    pub(crate) async fn speculate(&self, step: Speculate) -> Result<Verified, ServiceError> {
        self.send(|reply| Work::Speculate(Box::new(step), reply))
            .await
    }

    /// A draft by the hosted drafter; `None` when it cannot draft for this context now.
    pub(crate) async fn draft(&self, draft: Draft) -> Result<Option<Drafted>, ServiceError> {
        self.send(|reply| Work::Draft(draft, reply)).await
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
        let (reply, answer) = oneshot::channel();
        self.work.send(work(reply)).map_err(|_| self.gone())?;
        answer.await.map_err(|_| self.gone())?
    }

    /// The error of work that the thread did not answer.
    fn gone(&self) -> ServiceError {
        match self.lost.get() {
            // Another replica can go on with the sequence.
            Some(reason) => ServiceError::unavailable(reason),
            None => ServiceError::internal("the engine thread has ended"),
        }
    }
}

fn run(mut host: Host, mut waiting: mpsc::UnboundedReceiver<Work>) -> Result<(), Lost> {
    while let Some(first) = waiting.blocking_recv() {
        let mut wave = Wave::default();
        let mut next = Some(first);
        while let Some(work) = next {
            match work {
                Work::Prefill(prefill, reply) => wave.add_prefill(prefill, reply),
                Work::Verify(verify, reply) => wave.add_tree(*verify, reply),
                Work::Speculate(step, reply) => wave.add_step(*step, reply),
                Work::Draft(draft, reply) => {
                    let drafted = host.draft(&draft)?;
                    // A request that is gone needs no answer, here and below.
                    let _ = reply.send(Ok(drafted));
                }
                Work::HeadTopk(hidden, k, reply) => {
                    let rows = host.model.backend().head_topk(&hidden, k);
                    let rows = match rows {
                        Ok(rows) => Ok(rows),
                        Err(error) => Err(host.fault(&error)?),
                    };
                    let _ = reply.send(rows);
                }
                Work::CloseContext(key) => host.close_context(key),
            }
            next = waiting.try_recv().ok();
        }
        wave.run(&mut host)?;
    }
    Ok(())
}
