//! The DFlash v1 drafter on a GPU (z-lab/dflash, `dflash/model.py` at 44947fb).

mod core;
mod draft_graph;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use treespec_checkpoint::{CouplingProfile, DrafterCheckpoint, TargetCheckpoint};
use treespec_engine::{
    BLOCK_TOKENS, BlockRequest, ContextId, DraftContexts, DraftRequest, DraftShape, Drafted,
    Drafter, DrafterOptions, DrafterSpec, EngineError, HeadRow, LoadProgress,
};

use crate::batch_inputs::{BatchInputs, SequenceInput, sequence_bucket};
use crate::graph_cache::GraphCache;
use crate::vocabulary::Vocabulary;
use crate::{Device, MOST_DEPTHS, PinnedBuffer, SequenceRanking, row_bucket};
pub(crate) use core::DraftCore;
use draft_graph::DraftGraph;
pub(crate) use draft_graph::{DraftKey, read_draft};

/// Rows of one forward of blocks, and of one pass of context rows.
pub(crate) const MOST_BLOCK_ROWS: usize = 256;

/// DFlash drafter in bf16.
pub struct CudaDrafter {
    pub(crate) core: DraftCore,
    pub(crate) contexts: DraftContexts,
    inputs: BatchInputs,
    graphs: GraphCache<DraftKey, DraftGraph>,
    arriving: ArrivingRows,
}

/// Context rows from the host, in memory that the kernels read in place.
struct ArrivingRows {
    /// f32 `[256][hidden]`.
    features: PinnedBuffer<f32>,
    /// `[256]` each: absolute positions, physical slots.
    positions: PinnedBuffer<u32>,
    slots: PinnedBuffer<u32>,
    /// Kernels that have not been waited for may still read them.
    in_use: bool,
}

/// A block to draft, and what becomes of its candidates.
struct BlockInput {
    block: BlockRequest,
    max_depth: usize,
    ranking: Option<SequenceRanking>,
}

impl From<BlockRequest> for BlockInput {
    /// Nothing: its rows are all that is wanted.
    fn from(block: BlockRequest) -> Self {
        Self {
            block,
            max_depth: usize::MAX,
            ranking: None,
        }
    }
}

impl CudaDrafter {
    /// Loads the drafter and, from the target's checkpoint, the embedding and head that it shares, to `device` as bf16.
    /// `options.threads` and `options.isa` are not used.
    ///
    /// # Errors
    /// [`EngineError::Checkpoint`] for a missing or misshapen tensor or a drafter made for another target,
    /// [`EngineError::OutOfDeviceMemory`], or a fault of the device.
    pub fn load(
        device: &Arc<Device>,
        drafter: &DrafterCheckpoint,
        target: &TargetCheckpoint,
        options: &DrafterOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        device.bind()?;
        let vocabulary = Arc::new(Vocabulary::load(device, target, options.with_head)?);
        let mut drafter =
            Self::with_vocabulary(device, drafter, target, vocabulary, options, progress)?;
        drafter.capture_usual()?;
        Ok(drafter)
    }

    /// As [`CudaDrafter::load`], with an embedding and head that are on the device already.
    pub(crate) fn with_vocabulary(
        device: &Arc<Device>,
        drafter: &DrafterCheckpoint,
        target: &TargetCheckpoint,
        vocabulary: Arc<Vocabulary>,
        options: &DrafterOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        drafter.check_target(&target.config)?;
        let config = &drafter.config;
        if config.block_size > MOST_DEPTHS + 1 {
            return Err(EngineError::Device(format!(
                "block_size {} of the drafter: the GPU takes blocks of up to {}",
                config.block_size,
                MOST_DEPTHS + 1
            )));
        }
        let total_bytes = drafter.total_bytes();
        let mut report = |done: usize| {
            progress(LoadProgress {
                done_bytes: total_bytes * done as u64 / (config.num_layers as u64 + 1),
                total_bytes,
            });
        };
        report(0);
        let contexts = DraftContexts::new(
            options.max_contexts,
            options.context_window,
            config.block_size,
            target.config.context_length,
        );
        let spec = DrafterSpec {
            block_size: config.block_size,
            hidden_size: config.hidden_size,
            vocab_size: target.config.vocab_size,
            context_window: contexts.window(),
            num_layers: config.num_layers,
        };
        let core = DraftCore::load(device, drafter, vocabulary, spec, &contexts, &mut report)?;
        report(config.num_layers + 1);
        let inputs = BatchInputs::new(
            device,
            core.most_sequences(),
            0,
            contexts.blocks_per_context(),
        )?;
        let arriving = ArrivingRows {
            features: PinnedBuffer::new(device, MOST_BLOCK_ROWS * config.hidden_size)?,
            positions: PinnedBuffer::new(device, MOST_BLOCK_ROWS)?,
            slots: PinnedBuffer::new(device, MOST_BLOCK_ROWS)?,
            in_use: false,
        };
        Ok(Self {
            core,
            contexts,
            inputs,
            graphs: GraphCache::new(device),
            arriving,
        })
    }

    /// Captures the graphs of the usual drafts for one sequence; others are captured when they are first asked for.
    fn capture_usual(&mut self) -> Result<(), EngineError> {
        if self.core.head.vocabulary.head.is_none() {
            return Ok(());
        }
        let trees = [15, 31, 63].map(|budget| DraftShape::Tree { budget });
        for shape in [DraftShape::Chain].into_iter().chain(trees) {
            self.graph(DraftKey::of(shape, false, 1, &self.core.spec, 1))?;
        }
        Ok(())
    }

    /// Captures the graph of a draft unless there is one.
    fn graph(&mut self, key: DraftKey) -> Result<(), EngineError> {
        if self.graphs.contains(&key) {
            return Ok(());
        }
        self.graphs.make_room()?;
        let graph = match DraftGraph::capture(&self.core, &mut self.inputs, key) {
            Ok(graph) => graph,
            Err(error) => {
                self.graphs.free_memory(error)?;
                DraftGraph::capture(&self.core, &mut self.inputs, key)?
            }
        };
        self.graphs.insert(key, graph);
        Ok(())
    }

    fn check_token(&self, token: u32) -> Result<(), EngineError> {
        let vocab_size = self.core.spec.vocab_size;
        if (token as usize) < vocab_size {
            return Ok(());
        }
        Err(EngineError::UnknownToken { token, vocab_size })
    }

    /// Positions that the blocks of some requests see.
    fn longest(&self, requests: &[DraftRequest]) -> Result<usize, EngineError> {
        let mut longest = 0;
        for request in requests {
            longest = longest.max(self.contexts.get(request.block.context)?.rows);
        }
        Ok(longest + self.core.spec.block_size)
    }

    /// Makes room for the blocks and tells the device where they are.
    fn fill_inputs(&mut self, blocks: &[BlockInput]) -> Result<(), EngineError> {
        for BlockInput { block, .. } in blocks {
            self.check_token(block.root_token)?;
            self.contexts.reserve_block(block.context)?;
        }
        let mut inputs = Vec::with_capacity(blocks.len());
        for input in blocks {
            let block = input.block;
            let context = self.contexts.get(block.context)?;
            inputs.push(SequenceInput {
                root: block.root_token,
                committed: context.end(),
                max_depth: input.max_depth,
                table: &[],
                context_rows: context.rows,
                context_table: context.table.blocks(),
                ranking: input.ranking,
            });
        }
        self.inputs.fill(sequence_bucket(blocks.len()), &inputs);
        Ok(())
    }

    fn block_rows(&mut self, blocks: &[BlockRequest]) -> Result<Vec<f32>, EngineError> {
        let count = sequence_bucket(blocks.len());
        let inputs: Vec<BlockInput> = blocks.iter().copied().map(BlockInput::from).collect();
        self.fill_inputs(&inputs)?;
        let core = &self.core;
        let rows = core.block_rows_for(count, core.spec.context_window)?;
        self.inputs.upload(&core.rows, count)?;
        core.block_forward(&rows, self.inputs.contexts(count))?;
        core.final_rows(rows.bucket)?;
        let (size, width) = (core.spec.block_size, core.spec.hidden_size);
        let hidden = core.staged.read_range(0, blocks.len() * size * width)?;
        let slots = hidden.chunks_exact(size * width);
        Ok(slots.flat_map(|block| &block[width..]).copied().collect())
    }
}

impl Drafter for CudaDrafter {
    fn spec(&self) -> &DrafterSpec {
        &self.core.spec
    }

    fn coupling_profile(&self) -> Option<&CouplingProfile> {
        self.core.ranking.profile()
    }

    fn open(&mut self) -> Result<ContextId, EngineError> {
        self.contexts.open()
    }

    fn close(&mut self, context: ContextId) {
        self.contexts.close(context);
    }

    fn context(&self, context: ContextId) -> Result<Range<u32>, EngineError> {
        let context = self.contexts.get(context)?;
        Ok(context.first as u32..context.end() as u32)
    }

    fn append_context(
        &mut self,
        id: ContextId,
        start: u32,
        rows: &[f32],
    ) -> Result<(), EngineError> {
        let width = self.core.spec.hidden_size;
        let arrived = self.core.spec.context_rows(rows)?;
        let core = &self.core;
        core.device.bind()?;
        let skipped = self.contexts.begin_append(id, start, arrived)?;
        for chunk in rows[skipped * width..].chunks(MOST_BLOCK_ROWS * width) {
            let count = chunk.len() / width;
            let bucket = row_bucket(count);
            let context = self.contexts.make_room(id, count)?;
            let arriving = &mut self.arriving;
            if arriving.in_use {
                core.device.stream().synchronize()?;
            }
            arriving.features.as_mut_slice()[..chunk.len()].copy_from_slice(chunk);
            let positions = &mut arriving.positions.as_mut_slice()[..bucket];
            let slots = &mut arriving.slots.as_mut_slice()[..bucket];
            positions.fill(0);
            slots.fill(u32::MAX);
            for (i, (position, slot)) in positions.iter_mut().zip(slots).take(count).enumerate() {
                let (block, offset) = context.table.locate(context.rows + i);
                *position = (context.end() + i) as u32;
                *slot = block.0 * BLOCK_TOKENS as u32 + offset as u32;
            }
            // Nobody waits for this: a draft comes later in the stream, and so does an error.
            arriving.in_use = true;
            let packed = core.packed_features(bucket);
            core.rows
                .pack(arriving.features.device_ptr(), count, width, packed)?;
            core.store_context(
                packed,
                arriving.positions.device_ptr(),
                arriving.slots.device_ptr(),
            )?;
            self.contexts.commit(id, count)?;
        }
        Ok(())
    }

    fn block_hidden(&mut self, blocks: &[BlockRequest]) -> Result<Vec<f32>, EngineError> {
        self.core.device.bind()?;
        let mut hidden = Vec::new();
        for blocks in blocks.chunks(self.core.most_sequences()) {
            hidden.extend(self.block_rows(blocks)?);
        }
        Ok(hidden)
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        let core = &self.core;
        core.device.bind()?;
        core.head.select_hidden(
            &core.kernels.linear,
            &core.rows,
            &core.staged,
            &core.packed,
            hidden,
            k,
        )
    }

    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Drafted>, EngineError> {
        self.core.device.bind()?;
        self.core.head.vocabulary.head()?;
        let mut drafts = Vec::with_capacity(requests.len());
        for group in draft_graph::groups(requests, self.core.most_sequences()) {
            let started = Instant::now();
            let inputs: Vec<BlockInput> = group
                .iter()
                .map(|request| BlockInput {
                    block: request.block,
                    max_depth: request.max_depth,
                    ranking: self.core.ranking.of(request.coupling),
                })
                .collect();
            let key = DraftKey::of(
                group[0].shape,
                inputs.iter().any(|input| input.ranking.is_some()),
                group.len(),
                &self.core.spec,
                self.longest(group)?,
            );
            self.graph(key)?;
            self.fill_inputs(&inputs)?;
            let graph = self
                .graphs
                .get_mut(&key)
                .expect("invariant: the graph was captured above");
            let trees = graph.run(&self.core, &self.inputs, group.len())?;
            self.arriving.in_use = false;
            let forward = started.elapsed();
            drafts.extend(trees.into_iter().map(|tree| Drafted {
                tree,
                forward,
                head: Duration::ZERO,
                build: Duration::ZERO,
            }));
        }
        Ok(drafts)
    }
}
