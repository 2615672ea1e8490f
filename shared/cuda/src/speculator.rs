//! Target and drafter on one GPU: draft, verification, acceptance and the drafter's new context in one graph.

use std::sync::Arc;
use std::time::Instant;

use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_engine::{
    Backend, BlockTable, DraftShape, Drafter, DrafterOptions, EngineError, ForwardOutput,
    HeadRequest, HeadRow, LoadProgress, PrefillMode, RowBatch, RowChoices, Speculated,
    SpeculativeStep, Speculator, StepBatch, StepOutput, TargetSpec, VerifiedTree,
};
use treespec_tree::Acceptance;

use crate::acceptance::AcceptanceBuffers;
use crate::batch_inputs::{BatchInputs, SequenceInput};
use crate::draft_tree::DraftRecords;
use crate::drafter::{CudaDrafter, DraftKey, read_draft};
use crate::graph_cache::GraphCache;
use crate::step_rows::StepRows;
use crate::target::{
    AcceptedBuffers, AcceptedHeads, AskedPath, CudaTarget, MOST_SEQUENCES, MOST_STEP_ROWS,
    wait_for_outcomes, walked,
};
use crate::{Device, Graph};
use stage_times::StageTimes;

mod stage_times;

/// Target and drafter in bf16 that share a device, its stream, the embedding and the head.
pub struct CudaSpeculator {
    target: CudaTarget,
    drafter: CudaDrafter,
    inputs: BatchInputs,
    graphs: GraphCache<(DraftKey, bool), SpeculativeGraph>,
}

impl CudaSpeculator {
    /// Loads both models to `device`. `kv_tokens` rows of the target's KV cache over all sequences.
    ///
    /// # Errors
    /// As [`CudaTarget::load`] and [`CudaDrafter::load`].
    pub fn load(
        device: &Arc<Device>,
        target: &TargetCheckpoint,
        drafter: &DrafterCheckpoint,
        kv_tokens: usize,
        options: &DrafterOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        let loaded = CudaTarget::load(device, target, Some(drafter), kv_tokens, progress)?;
        let vocabulary = loaded.core.head.vocabulary.clone();
        let drafter = CudaDrafter::with_vocabulary(
            device,
            drafter,
            target,
            vocabulary,
            options,
            &mut |_| {},
        )?;
        let inputs = BatchInputs::new(
            device,
            drafter.core.most_sequences(),
            loaded.core.inputs.target_blocks(),
            drafter.core.blocks_per_context,
        )?;
        let mut speculator = Self {
            target: loaded,
            drafter,
            inputs,
            graphs: GraphCache::new(device),
        };
        // Budgets that fill whole tiles; others are captured when they are first asked for.
        let trees = [15, 31, 63].map(|budget| DraftShape::Tree { budget });
        for shape in [DraftShape::Chain].into_iter().chain(trees) {
            let key = DraftKey::of(shape, false, 1, speculator.drafter.spec(), 1);
            speculator.graph(key, false)?;
        }
        Ok(speculator)
    }

    /// Captures the graph of a step unless there is one.
    fn graph(&mut self, key: DraftKey, sampled: bool) -> Result<(), EngineError> {
        if self.graphs.contains(&(key, sampled)) {
            return Ok(());
        }
        self.graphs.make_room()?;
        let graph = match SpeculativeGraph::capture(self, key, sampled) {
            Ok(graph) => graph,
            Err(error) => {
                self.graphs.free_memory(error)?;
                SpeculativeGraph::capture(self, key, sampled)?
            }
        };
        self.graphs.insert((key, sampled), graph);
        Ok(())
    }

    /// Runs steps of one shape that fit one graph.
    fn run_group(&mut self, steps: &[SpeculativeStep<'_>]) -> Result<Vec<Speculated>, EngineError> {
        let started = Instant::now();
        let longest = steps.iter().map(|step| step.committed).max().unwrap_or(0);
        let spec = self.drafter.spec();
        let shape = steps[0].shape;
        let most = DraftKey::of(shape, false, 1, spec, 0).rows;
        let ranking = &self.drafter.core.ranking;
        let coupled = steps.iter().any(|step| ranking.of(step.coupling).is_some());
        let key = DraftKey::of(shape, coupled, steps.len(), spec, longest + most);
        let choices = steps.iter().map(|step| step.sampling.map(RowChoices::from));
        let sampled = self.target.core.prepare_sampling(choices, key.rows)?;
        self.graph(key, sampled)?;
        self.fill_inputs(key, steps)?;
        let outcome = self.run_graph(key, sampled, steps, started);
        if outcome.is_err() {
            self.graphs.remove(&(key, sampled));
        }
        outcome
    }

    /// Runs the graph of a group whose inputs are filled.
    fn run_graph(
        &mut self,
        key: DraftKey,
        sampled: bool,
        steps: &[SpeculativeStep<'_>],
        started: Instant,
    ) -> Result<Vec<Speculated>, EngineError> {
        let graph = self
            .graphs
            .get_mut(&(key, sampled))
            .expect("invariant: the graph was captured above");
        let reads_clock = graph.times.next_is_read();
        let captured = if reads_clock {
            &graph.timed
        } else {
            &graph.graph
        };
        match captured {
            Some(captured) if !self.target.core.device.is_profiled() => captured.launch()?,
            _ => graph.launches(&self.target, &self.drafter, &self.inputs, false)?,
        }
        let core = &self.target.core;
        let outcomes = wait_for_outcomes(
            &core.device,
            &graph.acceptance,
            &mut graph.steps[..steps.len()],
        )?;
        let requests = steps.iter().map(|step| step.head);
        if reads_clock || requests.clone().any(|head| head != HeadRequest::ARGMAX) {
            core.device.stream().synchronize()?;
        }
        if reads_clock {
            graph.times.read();
        }
        let heads = AcceptedHeads::read(core, &graph.rows, requests)?;
        let [draft, head, build, forward, accept] = graph.times.split(started.elapsed());
        let mut speculated = Vec::with_capacity(steps.len());
        for (sequence, outcome) in outcomes.into_iter().enumerate() {
            let walked = walked(outcome)?;
            let tree = read_draft(&graph.records, sequence)?;
            speculated.push(Speculated {
                tree,
                verified: VerifiedTree {
                    head: heads.of(sequence, &walked, AskedPath::from(&steps[sequence]))?,
                    features: Vec::new(),
                    acceptance: Acceptance {
                        path: walked.path,
                        bonus: walked.bonus,
                    },
                },
                draft,
                head,
                build,
                forward,
                accept,
            });
        }
        Ok(speculated)
    }

    fn fill_inputs(
        &mut self,
        key: DraftKey,
        steps: &[SpeculativeStep<'_>],
    ) -> Result<(), EngineError> {
        let block_size = self.drafter.spec().block_size;
        let mut inputs = Vec::with_capacity(steps.len());
        for step in steps {
            self.check(step, key.rows)?;
            // Where the block's rows are now, the accepted features come later.
            self.drafter.contexts.reserve_block(step.context)?;
            self.drafter.contexts.make_room(step.context, block_size)?;
        }
        for step in steps {
            let context = self.drafter.contexts.get(step.context)?;
            inputs.push(SequenceInput {
                root: step.root,
                committed: step.committed,
                max_depth: step.max_depth,
                table: step.table.blocks(),
                context_rows: context.rows,
                context_table: context.table.blocks(),
                ranking: self.drafter.core.ranking.of(step.coupling),
            });
        }
        self.inputs.fill(key.sequences, &inputs);
        Ok(())
    }

    fn check(&self, step: &SpeculativeStep<'_>, rows: usize) -> Result<(), EngineError> {
        let spec = &self.target.core.spec;
        if step.root as usize >= spec.vocab_size {
            return Err(EngineError::UnknownToken {
                token: step.root,
                vocab_size: spec.vocab_size,
            });
        }
        let end = self.drafter.contexts.get(step.context)?.end();
        if end != step.committed {
            return Err(EngineError::ContextGap {
                start: step.committed as u32,
                expected: end as u32,
            });
        }
        if step.table.capacity() < step.committed + rows {
            return Err(EngineError::InvalidBatch(format!(
                "{} KV slots for {} rows",
                step.table.capacity(),
                step.committed + rows
            )));
        }
        if step.head.top_k == 0 {
            return Err(EngineError::InvalidBatch(
                "a step whose nodes ask for no token of the head".into(),
            ));
        }
        Ok(())
    }

    /// Steps of one shape that fit one graph each.
    fn groups<'a, 'b>(&self, steps: &'a [SpeculativeStep<'b>]) -> Vec<&'a [SpeculativeStep<'b>]> {
        let spec = self.drafter.spec();
        steps
            .chunk_by(|a, b| a.shape == b.shape)
            .flat_map(|run| {
                let rows = DraftKey::of(run[0].shape, false, 1, spec, 0).rows;
                let fitting = (MOST_STEP_ROWS / rows).max(1);
                let most = (1 << fitting.ilog2())
                    .min(self.drafter.core.most_sequences())
                    .min(MOST_SEQUENCES);
                run.chunks(most)
            })
            .collect()
    }
}

impl Backend for CudaSpeculator {
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

impl Speculator for CudaSpeculator {
    fn drafter(&mut self) -> &mut dyn Drafter {
        &mut self.drafter
    }

    fn speculate(&mut self, steps: &[SpeculativeStep<'_>]) -> Result<Vec<Speculated>, EngineError> {
        self.target.core.device.bind()?;
        let mut speculated = Vec::with_capacity(steps.len());
        for group in self.groups(steps) {
            speculated.extend(self.run_group(group)?);
        }
        // Counted only when all have their outcome: after an error every context still ends where its step began.
        for (step, done) in steps.iter().zip(&speculated) {
            let accepted = done.verified.acceptance.path.len();
            self.drafter.contexts.commit(step.context, accepted)?;
        }
        Ok(speculated)
    }
}

/// A captured step, with the memory that its kernels read and write.
struct SpeculativeGraph {
    key: DraftKey,
    /// Whether some sequence does not simply take the best token.
    sampled: bool,
    blocks: StepRows,
    rows: StepRows,
    records: DraftRecords,
    acceptance: AcceptanceBuffers,
    accepted: AcceptedBuffers,
    /// Steps that each place of the batch has made.
    steps: Vec<u32>,
    times: StageTimes,
    graph: Option<Graph>,
    /// The same with the device's clock read between the stages.
    timed: Option<Graph>,
}

impl SpeculativeGraph {
    /// Allocates, runs once without sequences so that everything is loaded, and captures.
    fn capture(
        speculator: &mut CudaSpeculator,
        key: DraftKey,
        sampled: bool,
    ) -> Result<Self, EngineError> {
        let (target, drafter) = (&speculator.target, &speculator.drafter);
        let device = &target.core.device;
        // No path is longer than the block that it was drafted from.
        let path = key.depths + 1;
        let mut step = Self {
            key,
            sampled,
            blocks: drafter.core.block_rows_for(key.sequences, key.longest)?,
            rows: StepRows::new(
                device,
                &target.core.kernels.attention,
                key.sequences,
                key.rows,
                key.kind(),
                key.longest,
            )?,
            records: DraftRecords::new(device, key.sequences, key.rows)?,
            acceptance: AcceptanceBuffers::new(device, key.sequences)?,
            accepted: AcceptedBuffers::new(device, key.sequences, path)?,
            steps: vec![0; key.sequences],
            times: StageTimes::new(device)?,
            graph: None,
            timed: None,
        };
        speculator.inputs.fill(key.sequences, &[]);
        let inputs = &speculator.inputs;
        step.launches(target, drafter, inputs, true)?;
        device.stream().synchronize()?;
        let capture =
            |timed| Graph::capture(device, || step.launches(target, drafter, inputs, timed));
        let (graph, timed) = (capture(false)?, capture(true)?);
        step.graph = Some(graph);
        step.timed = Some(timed);
        Ok(step)
    }

    fn launches(
        &self,
        target: &CudaTarget,
        drafter: &CudaDrafter,
        inputs: &BatchInputs,
        timed: bool,
    ) -> Result<(), EngineError> {
        let (target, drafter) = (&target.core, &drafter.core);
        let mark = |stage| match timed {
            true => self.times.mark(&target.rows, stage),
            false => Ok(()),
        };
        let count = self.key.sequences;
        inputs.upload(&target.rows, count)?;
        let (state, contexts) = (inputs.state(count), inputs.contexts(count));

        mark(0)?;
        let last = drafter.block_forward(&self.blocks, contexts)?;
        mark(1)?;
        drafter.block_candidates(&self.blocks, last, self.key.selected)?;
        mark(2)?;
        drafter.build_drafts(self.key, inputs, &self.rows, &self.records)?;
        mark(3)?;

        let choices = target.choose(&self.rows, state, true, self.sampled)?;
        mark(4)?;
        target.acceptance.accept(
            count,
            choices,
            self.rows.verified(),
            state,
            &self.acceptance,
        )?;
        // The accepted path of a chain is where it belongs already.
        if self.key.budget.is_some() {
            target.compact_accepted(count, state, &self.acceptance)?;
        }
        self.extend_contexts(target, drafter, inputs)?;
        Ok(mark(5)?)
    }

    /// The features of the accepted rows go into the drafter's contexts.
    fn extend_contexts(
        &self,
        target: &crate::target::TargetCore,
        drafter: &crate::drafter::DraftCore,
        inputs: &BatchInputs,
    ) -> Result<(), EngineError> {
        let contexts = inputs.contexts(self.key.sequences);
        let place = (
            contexts.context_rows,
            contexts.tables,
            contexts.table_stride,
        );
        let accepted = self
            .accepted
            .arguments(&self.acceptance, &self.rows, Some(place));
        target.rows.accepted(accepted)?;
        let projection = target
            .projection
            .as_ref()
            .ok_or_else(|| EngineError::InvalidBatch("a target without features".into()))?;
        let features = drafter.packed_features(self.accepted.bucket);
        projection.project_selected(
            &target.kernels.linear,
            &target.rows,
            self.accepted.source_rows.ptr(),
            self.rows.bucket,
            crate::DevicePtr::NULL,
            features,
        )?;
        Ok(drafter.store_context(
            features,
            self.accepted.positions.ptr(),
            self.accepted.kv_slot.ptr(),
        )?)
    }
}
