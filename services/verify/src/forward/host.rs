//! The model and what the engine thread keeps beside it. Here the errors part: one that ends everything, and those of
//! single calls.

use std::sync::{Arc, OnceLock};

use treespec_engine::{
    BlockRequest, ContextId, DraftRequest, Drafted, EngineError, Speculated, SpeculativeStep,
    StepBatch, StepOutput,
};
use treespec_rpc::ServiceError;

use super::Draft;
use super::contexts::{ContextKey, Contexts};
use crate::LoadedModel;
use crate::error::engine_fault;

/// The model is lost, and why. Work that was not answered is refused with the same reason.
pub(super) struct Lost(pub(super) String);

/// The model and what the thread keeps beside it.
pub(super) struct Host {
    pub(super) model: LoadedModel,
    pub(super) contexts: Contexts,
    pub(super) lost: Arc<OnceLock<String>>,
}

impl Host {
    /// The error as a request is told it.
    pub(super) fn fault(&self, error: &EngineError) -> Result<ServiceError, Lost> {
        if !error.is_fatal() {
            return Ok(engine_fault(error));
        }
        tracing::error!(%error, "the model has failed for good");
        Err(Lost(self.lost.get_or_init(|| error.to_string()).to_owned()))
    }

    pub(super) fn close_context(&mut self, key: ContextKey) {
        if let Some(speculator) = self.model.speculator() {
            self.contexts.close(speculator.drafter(), key);
        }
    }

    /// Features of newly committed rows for the hosted drafter.
    pub(super) fn append(
        &mut self,
        key: ContextKey,
        start: usize,
        features: &[f32],
    ) -> Result<(), Lost> {
        let Some(speculator) = self.model.speculator() else {
            return Ok(());
        };
        let appended = self
            .contexts
            .append(speculator.drafter(), key, start, features);
        self.only_fatal(appended)
    }

    /// A sequence's context, when it can be drafted for from `committed`.
    pub(super) fn ready(
        &mut self,
        key: ContextKey,
        committed: usize,
    ) -> Result<Option<ContextId>, Lost> {
        let Some(speculator) = self.model.speculator() else {
            return Ok(None);
        };
        let ready = self.contexts.ready(speculator.drafter(), key, committed);
        match ready {
            Ok(id) => Ok(id),
            Err(error) => self.only_fatal(Err(error)).map(|()| None),
        }
    }

    /// A draft alone. `None` when there can be none.
    pub(super) fn draft(&mut self, draft: &Draft) -> Result<Option<Drafted>, Lost> {
        let key = draft.context.key();
        let Some(context) = self.ready(key, draft.committed)? else {
            return Ok(None);
        };
        let Some(speculator) = self.model.speculator() else {
            return Ok(None);
        };
        let request = DraftRequest {
            block: BlockRequest {
                context,
                root_token: draft.root,
            },
            shape: draft.shape,
            max_depth: draft.max_depth,
            coupling: draft.coupling,
        };
        match speculator.drafter().draft(&[request]) {
            Ok(mut drafts) => Ok(drafts.pop()),
            Err(error) => {
                self.fail_context(key, error)?;
                Ok(None)
            }
        }
    }

    pub(super) fn fail_context(&mut self, key: ContextKey, error: EngineError) -> Result<(), Lost> {
        let Some(speculator) = self.model.speculator() else {
            return Ok(());
        };
        let failed = self.contexts.fail(speculator.drafter(), key, error);
        self.only_fatal(failed)
    }

    fn only_fatal(&self, outcome: Result<(), EngineError>) -> Result<(), Lost> {
        match outcome {
            Ok(()) => Ok(()),
            Err(error) => self.fault(&error).map(drop),
        }
    }

    pub(super) fn speculate(
        &mut self,
        steps: &[SpeculativeStep<'_>],
    ) -> Result<Vec<Speculated>, EngineError> {
        let speculator = self
            .model
            .speculator()
            .ok_or_else(|| EngineError::InvalidBatch("no drafter is hosted here".into()))?;
        let results = speculator.speculate(steps)?;
        check_count(results.len(), steps.len())?;
        Ok(results)
    }

    pub(super) fn step(&mut self, batch: &StepBatch<'_>) -> Result<StepOutput, EngineError> {
        let output = self.model.backend().step(batch)?;
        check_count(output.rows.len(), batch.rows.len())?;
        check_count(output.trees.len(), batch.trees.len())?;
        Ok(output)
    }
}

fn check_count(got: usize, expected: usize) -> Result<(), EngineError> {
    if got == expected {
        return Ok(());
    }
    Err(EngineError::InvalidBatch(format!(
        "the model returned {got} results for {expected}"
    )))
}
