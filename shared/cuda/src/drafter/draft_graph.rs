//! Drafts as one CUDA graph: block forward, head, tree.

use treespec_engine::{DraftRequest, DraftShape, DrafterSpec, EngineError};
use treespec_tree::{MAX_BUDGET, TokenTree};

use super::DraftCore;
use crate::batch_inputs::{BatchInputs, sequence_bucket};
use crate::draft_tree::DraftRecords;
use crate::step_rows::{RowKind, StepRows, context_bucket};
use crate::{Graph, MOST_TOP};

/// What a graph is captured for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DraftKey {
    pub(crate) sequences: usize,
    /// `None` is the chain.
    pub(crate) budget: Option<usize>,
    /// Depths that can matter.
    pub(crate) depths: usize,
    /// Candidates per depth that can matter.
    pub(crate) candidates: usize,
    /// Candidates per depth that the head selects: more where noise can lift one from further down.
    pub(crate) selected: usize,
    /// Whether some draft's candidates are ranked with noise.
    pub(crate) coupled: bool,
    /// Rows of a finished draft, its root included.
    pub(crate) rows: usize,
    /// Positions that the attention is planned for.
    pub(crate) longest: usize,
}

impl DraftKey {
    /// For `sequences` drafts of a shape that see up to `longest` positions; `coupled` when one of them is ranked with noise.
    pub(crate) fn of(
        shape: DraftShape,
        coupled: bool,
        sequences: usize,
        spec: &DrafterSpec,
        longest: usize,
    ) -> Self {
        let budget = match shape {
            DraftShape::Chain => None,
            DraftShape::Tree { budget } => Some(budget.min(MAX_BUDGET)),
        };
        let depths = shape.depths(spec.block_size);
        let candidates = shape.candidates_per_depth(spec.vocab_size).min(MOST_TOP);
        let with_noise = shape.coupled_candidates_per_depth(spec.vocab_size);
        Self {
            sequences: sequence_bucket(sequences),
            budget,
            depths,
            candidates,
            selected: match coupled {
                true => with_noise.min(MOST_TOP),
                false => candidates,
            },
            coupled,
            rows: 1 + budget.unwrap_or(depths),
            longest: context_bucket(longest),
        }
    }

    /// Whether the target's rows are the nodes of a tree or those of a chain.
    pub(crate) fn kind(&self) -> RowKind {
        match self.budget {
            None => RowKind::Range,
            Some(_) => RowKind::Tree,
        }
    }
}

/// Cuts a batch into runs of one shape that fit one forward.
pub(crate) fn groups(requests: &[DraftRequest], most: usize) -> Vec<&[DraftRequest]> {
    requests
        .chunk_by(|a, b| a.shape == b.shape)
        .flat_map(|run| run.chunks(most))
        .collect()
}

/// A captured draft, with the memory that its kernels read and write.
pub(super) struct DraftGraph {
    key: DraftKey,
    blocks: StepRows,
    rows: StepRows,
    records: DraftRecords,
    graph: Option<Graph>,
}

impl DraftGraph {
    /// Allocates, runs once without sequences so that everything is loaded, and captures.
    pub(super) fn capture(
        core: &DraftCore,
        inputs: &mut BatchInputs,
        key: DraftKey,
    ) -> Result<Self, EngineError> {
        let device = &core.device;
        let mut draft = Self {
            key,
            blocks: core.block_rows_for(key.sequences, key.longest)?,
            rows: StepRows::new(
                device,
                &core.kernels.attention,
                key.sequences,
                key.rows,
                key.kind(),
                key.longest,
            )?,
            records: DraftRecords::new(device, key.sequences, key.rows)?,
            graph: None,
        };
        inputs.fill(key.sequences, &[]);
        draft.launches(core, inputs)?;
        device.stream().synchronize()?;
        draft.graph = Some(Graph::capture(device, || draft.launches(core, inputs))?);
        Ok(draft)
    }

    fn launches(&self, core: &DraftCore, inputs: &BatchInputs) -> Result<(), EngineError> {
        inputs.upload(&core.rows, self.key.sequences)?;
        let contexts = inputs.contexts(self.key.sequences);
        let last = core.block_forward(&self.blocks, contexts)?;
        core.block_candidates(&self.blocks, last, self.key.selected)?;
        core.build_drafts(self.key, inputs, &self.rows, &self.records)
    }

    /// Runs the drafts of the first `sequences` inputs.
    pub(super) fn run(
        &self,
        core: &DraftCore,
        inputs: &BatchInputs,
        sequences: usize,
    ) -> Result<Vec<TokenTree>, EngineError> {
        match &self.graph {
            Some(graph) if !core.device.is_profiled() => graph.launch()?,
            _ => self.launches(core, inputs)?,
        }
        core.device.stream().synchronize()?;
        (0..sequences)
            .map(|sequence| read_draft(&self.records, sequence))
            .collect()
    }
}

/// The draft of a sequence that took part.
pub(crate) fn read_draft(
    records: &DraftRecords,
    sequence: usize,
) -> Result<TokenTree, EngineError> {
    records
        .tree(sequence)
        .map_err(|error| EngineError::Device(format!("the device left no draft: {error}")))
}

impl DraftCore {
    /// Builds the drafts from the candidates of a block forward, into `rows` and `records`.
    pub(crate) fn build_drafts(
        &self,
        key: DraftKey,
        inputs: &BatchInputs,
        rows: &StepRows,
        records: &DraftRecords,
    ) -> Result<(), EngineError> {
        let state = inputs.state(key.sequences);
        let block_size = self.spec.block_size;
        if key.coupled {
            self.ranking.rank(
                key.sequences,
                self.head.candidates(block_size, key.depths, key.selected),
                key.candidates,
                state.committed,
                inputs.rankings(key.sequences),
            )?;
        }
        let candidates = self.head.candidates(block_size, key.depths, key.candidates);
        match key.budget {
            None => self.trees.chain(
                key.sequences,
                candidates,
                state,
                rows.drafts(),
                records.device_ptr(),
            )?,
            Some(budget) => self.trees.tree(
                key.sequences,
                budget,
                candidates,
                state,
                rows.drafts(),
                records.device_ptr(),
            )?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use treespec_engine::{BlockRequest, ContextId};

    #[test]
    fn runs_of_one_shape_share_a_forward() {
        let request = |shape| DraftRequest {
            block: BlockRequest {
                context: ContextId::from_raw(1),
                root_token: 0,
            },
            shape,
            max_depth: 9,
            coupling: None,
        };
        let tree = DraftShape::Tree { budget: 8 };
        let requests: Vec<DraftRequest> = [tree, tree, tree, DraftShape::Chain, tree]
            .map(request)
            .to_vec();
        let sizes: Vec<usize> = groups(&requests, 2).iter().map(|g| g.len()).collect();
        assert_eq!(sizes, [2, 1, 1, 1]);
    }

    #[test]
    fn a_key_has_room_for_its_drafts() {
        let spec = DrafterSpec {
            block_size: 16,
            hidden_size: 64,
            vocab_size: 1_000,
            context_window: 2_048,
            num_layers: 4,
        };
        let chain = DraftKey::of(DraftShape::Chain, false, 3, &spec, 900);
        assert_eq!((chain.sequences, chain.rows, chain.depths), (4, 16, 15));
        assert_eq!((chain.candidates, chain.budget), (1, None));
        assert_eq!(chain.longest, 1_024);
        let tree = DraftKey::of(DraftShape::Tree { budget: 300 }, false, 1, &spec, 1);
        assert_eq!((tree.rows, tree.candidates), (256, 256));
        let small = DraftKey::of(DraftShape::Tree { budget: 4 }, false, 1, &spec, 1);
        assert_eq!((small.rows, small.depths, small.candidates), (5, 4, 4));
        assert_eq!((small.selected, chain.selected), (4, 1));
        let coupled = DraftKey::of(DraftShape::Tree { budget: 4 }, true, 1, &spec, 1);
        assert_eq!((coupled.candidates, coupled.selected), (4, 64));
        let coupled = DraftKey::of(DraftShape::Tree { budget: 300 }, true, 1, &spec, 1);
        assert_eq!((coupled.candidates, coupled.selected), (256, 256));
    }
}
