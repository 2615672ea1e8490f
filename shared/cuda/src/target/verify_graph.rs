//! Trees of the host through the target as one CUDA graph: rows, forward, head, walk, compaction, features.

use std::sync::Arc;

use treespec_engine::{EngineError, HeadRequest, TreeRows, VerifiedTree};
use treespec_tree::{Acceptance, TokenTree};

use super::outcomes::{AcceptedHeads, AskedPath, wait_for_outcomes, walked};
use super::{MOST_SEQUENCES, MOST_STEP_ROWS, TargetCore};
use crate::NONE;
use crate::acceptance::{AcceptanceBuffers, MOST_PATH, TargetChoices};
use crate::batch_inputs::{SequenceInput, sequence_bucket};
use crate::kv_cache::AcceptedPaths;
use crate::rows::AcceptedRows;
use crate::step_rows::{RowKind, StepRows, context_bucket};
use crate::{
    CudaError, Device, DeviceBuffer, DevicePtr, Graph, PackedRows, PinnedBuffer, row_bucket,
};

/// What a graph is captured for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct VerifyKey {
    sequences: usize,
    /// Rows of a sequence; 1 is plain decoding.
    stride: usize,
    features: bool,
    sampled: bool,
    /// Positions that the attention is planned for.
    longest: usize,
}

impl VerifyKey {
    /// The steps of one sequence in a short context: plain, a chain's block, and the largest tree that fills a tile.
    pub(super) fn usual(features: bool) -> [Self; 3] {
        [1, 16, 64].map(|stride| Self {
            sequences: 1,
            stride,
            features: features && stride > 1,
            sampled: false,
            longest: context_bucket(1),
        })
    }

    /// The smallest graph that a batch fits.
    pub(super) fn of(batch: &[TreeRows<'_>]) -> Self {
        let nodes = batch.iter().map(|rows| rows.tree.len()).max().unwrap_or(1);
        let longest = batch.iter().map(|rows| rows.committed + rows.tree.len());
        Self {
            sequences: sequence_bucket(batch.len()),
            stride: stride(nodes),
            features: batch.iter().any(|rows| rows.features),
            sampled: batch.iter().any(TreeRows::is_sampled),
            longest: context_bucket(longest.max().unwrap_or(1)),
        }
    }

    /// Rows of a sequence.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }
}

/// Rows of a sequence for trees of up to `nodes` nodes.
fn stride(nodes: usize) -> usize {
    match nodes {
        0..=1 => 1,
        nodes => nodes.next_power_of_two().max(8),
    }
}

/// Cuts a batch into parts that fit one graph each.
pub(super) fn groups<'a, 'b>(trees: &'a [TreeRows<'b>]) -> Vec<&'a [TreeRows<'b>]> {
    let mut groups = Vec::new();
    let mut start = 0;
    let mut widest = 1;
    for (index, rows) in trees.iter().enumerate() {
        let wider = widest.max(stride(rows.tree.len()));
        let count = sequence_bucket(index + 1 - start);
        if index > start && (count * wider > MOST_STEP_ROWS || count > MOST_SEQUENCES) {
            groups.push(&trees[start..index]);
            start = index;
            widest = stride(rows.tree.len());
        } else {
            widest = wider;
        }
    }
    if start < trees.len() {
        groups.push(&trees[start..]);
    }
    groups
}

/// The rows of accepted paths: where their features come from.
pub(crate) struct AcceptedBuffers {
    /// Entries per sequence.
    pub(crate) stride: usize,
    /// Row bucket of all entries.
    pub(crate) bucket: usize,
    /// Rows of the forward, u32.
    pub(crate) source_rows: DeviceBuffer<u32>,
    /// Absolute positions, u32.
    pub(crate) positions: DeviceBuffer<u32>,
    /// Slots in the drafter's cache, u32.
    pub(crate) kv_slot: DeviceBuffer<u32>,
}

impl AcceptedBuffers {
    /// For `sequences` paths of up to `stride` nodes.
    pub(crate) fn new(
        device: &Arc<Device>,
        sequences: usize,
        stride: usize,
    ) -> Result<Self, CudaError> {
        let stride = stride.min(MOST_PATH);
        let bucket = row_bucket(sequences * stride);
        Ok(Self {
            stride,
            bucket,
            source_rows: DeviceBuffer::zeroed(device, bucket)?,
            positions: DeviceBuffer::zeroed(device, bucket)?,
            kv_slot: DeviceBuffer::zeroed(device, bucket)?,
        })
    }

    /// The kernel's arguments. `context` holds the rows, tables and table stride of the drafter's contexts.
    pub(crate) fn arguments(
        &self,
        acceptance: &AcceptanceBuffers,
        rows: &StepRows,
        context: Option<(DevicePtr, DevicePtr, usize)>,
    ) -> AcceptedRows {
        let (context_rows, tables, table_stride) = context.unwrap_or_default();
        AcceptedRows {
            path: acceptance.paths.ptr(),
            path_stride: MOST_PATH,
            counts: acceptance.counts.ptr(),
            first_row: rows.first_row(),
            committed: acceptance.committed_before.ptr(),
            context_rows,
            tables,
            table_stride,
            sequences: rows.sequences,
            stride: self.stride,
            rows: self.bucket,
            source_rows: self.source_rows.ptr(),
            positions: self.positions.ptr(),
            kv_slot: self.kv_slot.ptr(),
        }
    }
}

/// A captured step, with the memory that its kernels read and write.
pub(crate) struct VerifyGraph {
    key: VerifyKey,
    rows: StepRows,
    acceptance: AcceptanceBuffers,
    accepted: AcceptedBuffers,
    tokens: PinnedBuffer<u32>,
    parents: PinnedBuffer<u32>,
    features: PinnedBuffer<f32>,
    /// Steps that each place of the batch has made.
    steps: Vec<u32>,
    graph: Option<Graph>,
}

impl VerifyGraph {
    /// Allocates, runs once without sequences so that everything is loaded, and captures.
    pub(super) fn capture(core: &mut TargetCore, key: VerifyKey) -> Result<Self, EngineError> {
        let device = core.device.clone();
        let kind = if key.stride == 1 {
            RowKind::Range
        } else {
            RowKind::Tree
        };
        let count = key.sequences * key.stride;
        let accepted = AcceptedBuffers::new(&device, key.sequences, key.stride)?;
        let width = core.spec.feature_size.filter(|_| key.features).unwrap_or(0);
        let mut step = Self {
            key,
            rows: StepRows::new(
                &device,
                &core.kernels.attention,
                key.sequences,
                key.stride,
                kind,
                key.longest,
            )?,
            acceptance: AcceptanceBuffers::new(&device, key.sequences)?,
            features: PinnedBuffer::new(&device, accepted.bucket * width)?,
            accepted,
            tokens: PinnedBuffer::new(&device, count)?,
            parents: PinnedBuffer::new(&device, count)?,
            steps: vec![0; key.sequences],
            graph: None,
        };
        core.inputs.fill(key.sequences, &[]);
        step.tokens.as_mut_slice().fill(NONE);
        step.launches(core)?;
        device.stream().synchronize()?;
        let graph = Graph::capture(&device, || step.launches(core))?;
        step.graph = Some(graph);
        Ok(step)
    }

    fn launches(&self, core: &TargetCore) -> Result<(), EngineError> {
        let key = self.key;
        core.inputs.upload(&core.rows, key.sequences)?;
        let state = core.inputs.state(key.sequences);
        let plain = key.stride == 1;
        if plain {
            core.acceptance.advance(
                key.sequences,
                None,
                state,
                self.rows.roots(),
                &self.acceptance,
            )?;
        } else {
            let host = self
                .rows
                .host_trees(self.tokens.device_ptr(), self.parents.device_ptr());
            core.rows.tree(state, host)?;
        }
        let choices = core.choose(&self.rows, state, key.features, key.sampled)?;
        if plain {
            core.acceptance.advance(
                key.sequences,
                Some(choices),
                state,
                self.rows.roots(),
                &self.acceptance,
            )?;
        } else {
            core.acceptance.accept(
                key.sequences,
                choices,
                self.rows.verified(),
                state,
                &self.acceptance,
            )?;
            core.compact_accepted(key.sequences, state, &self.acceptance)?;
        }
        if let (true, Some(projection)) = (key.features, &core.projection) {
            let accepted = self.accepted.arguments(&self.acceptance, &self.rows, None);
            core.rows.accepted(accepted)?;
            let none = PackedRows::new(DevicePtr::NULL, projection.width(), self.accepted.bucket);
            projection.project_selected(
                &core.kernels.linear,
                &core.rows,
                self.accepted.source_rows.ptr(),
                self.rows.bucket,
                self.features.device_ptr(),
                none,
            )?;
        }
        Ok(())
    }

    /// Runs the step for a batch that has this graph's key.
    pub(super) fn run(
        &mut self,
        core: &mut TargetCore,
        batch: &[TreeRows<'_>],
    ) -> Result<Vec<VerifiedTree>, EngineError> {
        self.fill(core, batch)?;
        match &self.graph {
            Some(graph) if !core.device.is_profiled() => graph.launch()?,
            _ => self.launches(core)?,
        }
        let outcomes = wait_for_outcomes(
            &core.device,
            &self.acceptance,
            &mut self.steps[..batch.len()],
        )?;
        let wants_heads = batch.iter().any(|rows| rows.head != HeadRequest::ARGMAX);
        if wants_heads || self.key.features {
            core.device.stream().synchronize()?;
        }
        let heads = AcceptedHeads::read(core, &self.rows, batch.iter().map(|rows| rows.head))?;
        let mut verified = Vec::with_capacity(batch.len());
        for (sequence, (rows, outcome)) in batch.iter().zip(outcomes).enumerate() {
            let walked = walked(outcome)?;
            let features = if rows.features {
                self.features_of(sequence, walked.path.len())
            } else {
                Vec::new()
            };
            verified.push(VerifiedTree {
                head: heads.of(sequence, &walked, AskedPath::from(rows))?,
                features,
                acceptance: Acceptance {
                    path: walked.path,
                    bonus: walked.bonus,
                },
            });
        }
        Ok(verified)
    }

    fn fill(&mut self, core: &mut TargetCore, batch: &[TreeRows<'_>]) -> Result<(), EngineError> {
        let inputs: Vec<SequenceInput<'_>> = batch
            .iter()
            .map(|rows| SequenceInput {
                root: rows.tree.tokens()[0],
                committed: rows.committed,
                max_depth: usize::MAX,
                table: rows.table.blocks(),
                context_rows: 0,
                context_table: &[],
                ranking: None,
            })
            .collect();
        core.inputs.fill(self.key.sequences, &inputs);
        let tokens = self.tokens.as_mut_slice();
        let parents = self.parents.as_mut_slice();
        tokens.fill(NONE);
        parents.fill(NONE);
        for (sequence, rows) in batch.iter().enumerate() {
            StepTree(rows.tree).check()?;
            let start = sequence * self.key.stride;
            let nodes = rows.tree.len();
            tokens[start..start + nodes].copy_from_slice(rows.tree.tokens());
            for node in 1..nodes {
                parents[start + node] = rows.tree.parent(node).map_or(NONE, |p| p as u32);
            }
        }
        Ok(())
    }

    fn features_of(&self, sequence: usize, rows: usize) -> Vec<f32> {
        let width = self.features.as_slice().len() / self.accepted.bucket;
        let start = sequence * self.accepted.stride * width;
        self.features.as_slice()[start..start + rows * width].to_vec()
    }
}

/// A tree that the device verifies.
pub(crate) struct StepTree<'a>(pub(crate) &'a TokenTree);

impl StepTree<'_> {
    fn check(&self) -> Result<(), EngineError> {
        let deepest = self.0.depths().iter().max().copied().unwrap_or(0) as usize;
        if deepest < MOST_PATH {
            return Ok(());
        }
        Err(EngineError::InvalidBatch(format!(
            "a tree of depth {deepest}: the device takes depths up to {}",
            MOST_PATH - 1
        )))
    }
}

impl TargetCore {
    /// The target's choice at every row.
    pub(crate) fn choose(
        &self,
        rows: &StepRows,
        state: crate::BatchState,
        tap: bool,
        sampled: bool,
    ) -> Result<TargetChoices, EngineError> {
        let arrays = rows.target_arrays(state);
        let last = self.forward_rows(&arrays, tap)?;
        self.head.run(
            &self.kernels.linear,
            self.final_input(arrays.bucket),
            Some(last.scale),
        )?;
        if let (true, Some(sampler)) = (sampled, &self.sampler) {
            return Ok(sampler.choose(self.head.logits(), rows)?);
        }
        self.head
            .select(rows.sequences * rows.stride, 1, false, DevicePtr::NULL)?;
        let top = self.head.top();
        Ok(TargetChoices {
            tokens: top.ids,
            stride: top.stride,
            logits: top.logits,
            logit_stride: top.stride,
            normaliser: DevicePtr::NULL,
        })
    }

    /// Moves the keys and values of accepted paths to where plain decoding would have put them.
    pub(crate) fn compact_accepted(
        &self,
        sequences: usize,
        state: crate::BatchState,
        acceptance: &AcceptanceBuffers,
    ) -> Result<(), EngineError> {
        let accepted = AcceptedPaths {
            sequences,
            path: acceptance.paths.ptr(),
            path_stride: MOST_PATH,
            counts: acceptance.counts.ptr(),
            committed: acceptance.committed_before.ptr(),
            tables: state.tables,
            table_stride: state.table_stride,
        };
        Ok(self.compaction.compact(&self.kv, accepted)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use treespec_engine::BlockTable;

    #[test]
    fn groups_fit_a_graph_and_lose_nothing() {
        let table = BlockTable::default();
        let mut wide = TokenTree::root_only(1);
        for token in 0..100 {
            wide.push(0, token, 0.0).unwrap();
        }
        let root = TokenTree::root_only(1);
        let rows = |tree| TreeRows {
            table: &table,
            committed: 0,
            tree,
            head: HeadRequest::ARGMAX,
            sampling: None,
            features: false,
        };
        let trees: Vec<TreeRows<'_>> = (0..80)
            .map(|i| rows(if i % 7 == 0 { &wide } else { &root }))
            .collect();
        let groups = groups(&trees);
        assert_eq!(groups.iter().map(|g| g.len()).sum::<usize>(), 80);
        for group in groups {
            let key = VerifyKey::of(group);
            assert!(key.sequences * key.stride <= MOST_STEP_ROWS, "{key:?}");
            assert!(key.sequences <= MOST_SEQUENCES);
        }
        assert_eq!([1, 2, 9, 64, 65, 256].map(stride), [1, 8, 16, 64, 128, 256]);
    }
}
