//! A target that hosts its drafter: draft, verification and acceptance of a step in one call, without a wire between.

use std::time::Duration;

use treespec_sampling::{Coupling, Processors};
use treespec_tree::TokenTree;

use crate::{
    Backend, BlockRequest, BlockTable, ContextId, DraftRequest, DraftShape, Drafter, EngineError,
    ForwardOutput, HeadRequest, HeadRow, PrefillMode, RowBatch, RowChoices, StepBatch, StepOutput,
    TargetSpec, TreeRows, VerifiedTree,
};

/// One step of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct SpeculativeStep<'a> {
    /// KV blocks with room for `committed` rows, the root and the nodes of the draft.
    pub table: &'a BlockTable,
    /// Rows already in the cache; also where the drafter's context must end.
    pub committed: usize,
    /// The decided token that the draft hangs from.
    pub root: u32,
    /// The sequence's context in [`Speculator::drafter`].
    pub context: ContextId,
    /// Shape of the draft.
    pub shape: DraftShape,
    /// Nodes deeper than this are cut, see [`DraftRequest::max_depth`].
    pub max_depth: usize,
    /// What every node wants from the target's head; at least one best token.
    pub head: HeadRequest,
    /// How every node chooses its token, see [`TreeRows::sampling`]; without grammar, for which the tree must be known
    /// before it is verified.
    pub sampling: Option<Processors<'a>>,
    /// How the drafter takes part in the draw, see [`DraftRequest::coupling`].
    pub coupling: Option<Coupling>,
}

impl SpeculativeStep<'_> {
    /// True when its nodes do not simply take the best token.
    pub fn is_sampled(&self) -> bool {
        self.sampling
            .is_some_and(|processors| !processors.is_argmax())
    }
}

/// What a step did. Times are those of the whole pass: that is how long each of its sequences waited.
#[derive(Debug, Clone, PartialEq)]
pub struct Speculated {
    /// The draft that was verified.
    pub tree: TokenTree,
    /// What was accepted. Its features are empty: they went to the drafter.
    pub verified: VerifiedTree,
    /// The drafter's forward.
    pub draft: Duration,
    /// The top-k pass for the drafter's rows.
    pub head: Duration,
    /// Tree construction.
    pub build: Duration,
    /// The target's forward with its head.
    pub forward: Duration,
    /// Choice, walk, compaction, and the accepted features into the drafter's context.
    pub accept: Duration,
}

/// A target with its drafter on the same device.
pub trait Speculator: Backend {
    /// The drafter: to open and close contexts, and to append the features of prompts to them.
    fn drafter(&mut self) -> &mut dyn Drafter;

    /// Drafts, verifies, accepts and commits, and appends the features of the accepted rows to the drafter's context,
    /// for all sequences in one pass. One result per step, in order.
    ///
    /// A failure commits nothing: the caller may run the same positions again. It says nothing about the state of the
    /// drafter's contexts, which may be behind or ahead of what was committed.
    ///
    /// A context that cannot take the accepted features is closed: the step has its result, the next one fails.
    ///
    /// # Errors
    /// What [`Drafter::draft`] and [`Backend::step`] return, or [`EngineError::ContextGap`] when a context does not end
    /// at `committed`.
    fn speculate(&mut self, steps: &[SpeculativeStep<'_>]) -> Result<Vec<Speculated>, EngineError>;
}

/// Any target and any drafter as one [`Speculator`], by composition.
#[derive(Debug)]
pub struct Colocated<B, D> {
    target: B,
    drafter: D,
}

impl<B: Backend, D: Drafter> Colocated<B, D> {
    /// Joins a target, loaded with the drafter's feature projection, and that drafter, loaded with its head.
    ///
    /// # Errors
    /// [`EngineError::InvalidBatch`] when the target computes no features or those of another width.
    pub fn new(target: B, drafter: D) -> Result<Self, EngineError> {
        let (computed, wanted) = (target.spec().feature_size, drafter.spec().hidden_size);
        if computed != Some(wanted) {
            let computed = computed.map_or("no features".to_owned(), |size| {
                format!("features of width {size}")
            });
            return Err(EngineError::InvalidBatch(format!(
                "the drafter reads features of width {wanted}, the target computes {computed}"
            )));
        }
        Ok(Self { target, drafter })
    }

    /// Hands the accepted features to the drafter. A context that refuses them is closed.
    fn extend_context(
        &mut self,
        step: &SpeculativeStep<'_>,
        features: &[f32],
    ) -> Result<(), EngineError> {
        let start = step.committed as u32;
        match self.drafter.append_context(step.context, start, features) {
            Ok(()) => Ok(()),
            Err(error @ EngineError::DeviceLost(_)) => Err(error),
            Err(_) => {
                self.drafter.close(step.context);
                Ok(())
            }
        }
    }
}

impl<B: Backend, D: Drafter> Backend for Colocated<B, D> {
    fn spec(&self) -> &TargetSpec {
        self.target.spec()
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<Vec<ForwardOutput>, EngineError> {
        self.target.forward(batch)
    }

    fn compact(
        &mut self,
        table: &BlockTable,
        committed: usize,
        path: &[usize],
    ) -> Result<(), EngineError> {
        self.target.compact(table, committed, path)
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        self.target.head_topk(hidden, k)
    }

    fn step(&mut self, batch: &StepBatch<'_>) -> Result<StepOutput, EngineError> {
        self.target.step(batch)
    }

    fn set_prefill(&mut self, mode: PrefillMode) -> Result<(), EngineError> {
        self.target.set_prefill(mode)
    }
}

impl<B: Backend, D: Drafter> Speculator for Colocated<B, D> {
    fn drafter(&mut self) -> &mut dyn Drafter {
        &mut self.drafter
    }

    fn speculate(&mut self, steps: &[SpeculativeStep<'_>]) -> Result<Vec<Speculated>, EngineError> {
        for step in steps {
            let end = self.drafter.context(step.context)?.end;
            if end as usize != step.committed {
                return Err(EngineError::ContextGap {
                    start: step.committed as u32,
                    expected: end,
                });
            }
        }
        let requests: Vec<DraftRequest> = steps.iter().map(DraftRequest::from).collect();
        let drafts = self.drafter.draft(&requests)?;
        let trees = steps.iter().zip(&drafts);
        let batch = StepBatch {
            rows: Vec::new(),
            trees: trees
                .map(|(step, draft)| TreeRows {
                    table: step.table,
                    committed: step.committed,
                    tree: &draft.tree,
                    head: step.head,
                    sampling: step.sampling.map(RowChoices::from),
                    features: true,
                })
                .collect(),
        };
        let output = self.target.step(&batch)?;
        let started = std::time::Instant::now();
        let mut speculated = Vec::with_capacity(steps.len());
        for ((step, draft), mut verified) in steps.iter().zip(drafts).zip(output.trees) {
            let features = std::mem::take(&mut verified.features);
            self.extend_context(step, &features)?;
            speculated.push(Speculated {
                tree: draft.tree,
                verified,
                draft: draft.forward,
                head: draft.head,
                build: draft.build,
                forward: output.forward,
                accept: Duration::ZERO,
            });
        }
        let accept = output.accept + started.elapsed();
        for one in &mut speculated {
            one.accept = accept;
        }
        Ok(speculated)
    }
}

impl From<&SpeculativeStep<'_>> for DraftRequest {
    fn from(step: &SpeculativeStep<'_>) -> Self {
        Self {
            block: BlockRequest {
                context: step.context,
                root_token: step.root,
            },
            shape: step.shape,
            max_depth: step.max_depth,
            coupling: step.coupling,
        }
    }
}
