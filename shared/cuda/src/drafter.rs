//! The DFlash v1 drafter on a GPU (z-lab/dflash, `dflash/model.py` at 44947fb).

mod draft_graph;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint, TensorSource};
use treespec_engine::{
    BLOCK_TOKENS, BlockRequest, ContextId, DraftContexts, DraftRequest, Drafted, Drafter,
    DrafterOptions, DrafterSpec, EngineError, HeadRow, LoadProgress,
};

use crate::activations::Activations;
use crate::attention::AttentionKernels;
use crate::batch_inputs::{BatchInputs, SequenceInput, sequence_bucket};
use crate::decoder::{Decoder, DecoderShape, FinalRows, LayerKernels, Weights};
use crate::draft_tree::DraftTreeKernels;
use crate::head_pass::HeadPass;
use crate::kv_cache::KvCache;
use crate::linear::{Epilogue, Layout, LinearKernels, PackedLinear};
use crate::rotary::{ContextRows, RotaryKernels};
use crate::rows::{BLOCK_VARIANTS, BlockContexts, BlockShape, RowKernels};
use crate::step_rows::{RowKind, StepRows, context_bucket};
use crate::vocabulary::Vocabulary;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, PackedRows, row_bucket};
use draft_graph::DraftGraph;
pub(crate) use draft_graph::{DraftKey, read_draft};

/// Rows of one forward of blocks, and of one pass of context rows.
pub(crate) const MOST_BLOCK_ROWS: usize = 256;

/// DFlash drafter in bf16.
pub struct CudaDrafter {
    pub(crate) core: DraftCore,
    pub(crate) contexts: DraftContexts,
    inputs: BatchInputs,
    graphs: HashMap<DraftKey, DraftGraph>,
}

/// Weights, cache, buffers and kernels: all that the graphs of a drafter launch.
pub(crate) struct DraftCore {
    pub(crate) device: Arc<Device>,
    pub(crate) spec: DrafterSpec,
    pub(crate) kernels: LayerKernels,
    pub(crate) rows: RowKernels,
    pub(crate) trees: DraftTreeKernels,
    pub(crate) head: HeadPass,
    pub(crate) blocks_per_context: usize,
    decoder: Decoder,
    kv: KvCache,
    activations: Activations,
    shape: BlockShape,
    /// Which visible range each layer takes.
    variants: Vec<usize>,
    final_norm: DeviceBuffer<f32>,
    eps: f32,
    /// Keys and values of the context for all layers.
    context_kv: PackedLinear,
    key_norms: DeviceBuffer<f32>,
    context_projected: DeviceBuffer<f32>,
    /// f32 and packed rows on their way in or out, `[256][hidden]`.
    staged: DeviceBuffer<f32>,
    packed: DeviceBuffer<bf16>,
    positions: DeviceBuffer<u32>,
    slots: DeviceBuffer<u32>,
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
        Self::with_vocabulary(device, drafter, target, vocabulary, options, progress)
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
        Ok(Self {
            core,
            contexts,
            inputs,
            graphs: HashMap::new(),
        })
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
    fn fill_inputs(
        &mut self,
        blocks: &[BlockRequest],
        depths: &[usize],
    ) -> Result<(), EngineError> {
        for block in blocks {
            self.check_token(block.root_token)?;
            self.contexts.reserve_block(block.context)?;
        }
        let mut inputs = Vec::with_capacity(blocks.len());
        for (block, &max_depth) in blocks.iter().zip(depths) {
            let context = self.contexts.get(block.context)?;
            inputs.push(SequenceInput {
                root: block.root_token,
                committed: context.end(),
                max_depth,
                table: &[],
                context_rows: context.rows,
                context_table: context.table.blocks(),
            });
        }
        self.inputs.fill(sequence_bucket(blocks.len()), &inputs);
        Ok(())
    }

    fn block_rows(&mut self, blocks: &[BlockRequest]) -> Result<Vec<f32>, EngineError> {
        let count = sequence_bucket(blocks.len());
        self.fill_inputs(blocks, &vec![usize::MAX; blocks.len()])?;
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

impl DraftCore {
    fn load(
        device: &Arc<Device>,
        drafter: &DrafterCheckpoint,
        vocabulary: Arc<Vocabulary>,
        spec: DrafterSpec,
        contexts: &DraftContexts,
        report: &mut dyn FnMut(usize),
    ) -> Result<Self, EngineError> {
        let config = &drafter.config;
        let shape = DecoderShape {
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            layers: config.num_layers,
            eps: config.rms_norm_eps,
            rope_theta: config.rope_theta,
            head_norms: true,
        };
        let weights = Weights::Checkpoint(drafter);
        let decoder = Decoder::load(device, &weights, "layers.", "norm.weight", shape, report)?;
        let names: Vec<_> = (0..config.num_layers)
            .flat_map(|layer| decoder.key_value_names("layers.", layer))
            .collect();
        let mut key_norms = Vec::with_capacity(config.num_layers * config.head_dim);
        for layer in 0..config.num_layers {
            let name = format!("layers.{layer}.self_attn.k_norm.weight");
            key_norms.extend(TensorSource::tensor(drafter, &name, &[config.head_dim])?);
        }
        let (block_shape, variants) = block_shape(drafter)?;
        let rows = MOST_BLOCK_ROWS;
        Ok(Self {
            kernels: LayerKernels {
                linear: LinearKernels::load(device)?,
                rotary: RotaryKernels::load(device, shape.attention())?,
                attention: AttentionKernels::load(device, shape.attention())?,
            },
            rows: RowKernels::load(device)?,
            trees: DraftTreeKernels::load(device)?,
            head: HeadPass::new(device, vocabulary, rows, crate::MOST_TOP)?,
            blocks_per_context: contexts.blocks_per_context(),
            kv: KvCache::new(device, shape.cache(contexts.num_blocks()))?,
            activations: Activations::new(device, shape, rows, decoder.most_parts())?,
            shape: block_shape,
            variants,
            final_norm: DeviceBuffer::from_slice(
                device,
                &TensorSource::tensor(drafter, "norm.weight", &[config.hidden_size])?,
            )?,
            eps: config.rms_norm_eps,
            context_kv: weights.matrices(device, &names, Layout::Plain, 0)?,
            key_norms: DeviceBuffer::from_slice(device, &key_norms)?,
            context_projected: DeviceBuffer::zeroed(
                device,
                rows * config.num_layers * 2 * shape.key_width(),
            )?,
            staged: DeviceBuffer::zeroed(device, rows * config.hidden_size)?,
            packed: DeviceBuffer::zeroed(device, PackedRows::len(rows, config.hidden_size))?,
            positions: DeviceBuffer::zeroed(device, rows)?,
            slots: DeviceBuffer::zeroed(device, rows)?,
            device: device.clone(),
            decoder,
            spec,
        })
    }

    /// Sequences of one forward of blocks.
    pub(crate) fn most_sequences(&self) -> usize {
        let fitting = (MOST_BLOCK_ROWS / self.spec.block_size).max(1);
        // A bucket must fit too.
        1 << fitting.ilog2()
    }

    /// Row arrays for the blocks of a bucket of sequences.
    pub(crate) fn block_rows_for(
        &self,
        sequences: usize,
        longest: usize,
    ) -> Result<StepRows, CudaError> {
        StepRows::new(
            &self.device,
            &self.kernels.attention,
            sequences,
            self.spec.block_size,
            RowKind::Range,
            longest.min(context_bucket(self.spec.context_window)),
        )
    }

    /// Embeds the blocks and runs all layers.
    pub(crate) fn block_forward(
        &self,
        rows: &StepRows,
        contexts: BlockContexts,
    ) -> Result<FinalRows, EngineError> {
        self.rows.block(
            contexts,
            self.shape,
            rows.sequences,
            rows.bucket,
            rows.blocks(),
        )?;
        let arrays = |variant| {
            rows.arrays(
                contexts.tables,
                contexts.table_stride,
                contexts.context_rows,
                variant,
            )
        };
        self.rows.embed(
            arrays(0).tokens,
            self.head.vocabulary.embedding.ptr(),
            self.spec.hidden_size,
            self.activations.x.ptr(),
            self.decoder.first_norm(),
            self.activations.input(rows.bucket),
            self.activations.parts.ptr(),
        )?;
        Ok(self.decoder.forward(
            &self.kernels,
            &self.activations,
            &self.kv,
            |layer| arrays(self.variants[layer]),
            None,
        )?)
    }

    /// The best tokens of every slot of the blocks of a forward.
    pub(crate) fn block_candidates(
        &self,
        rows: &StepRows,
        last: FinalRows,
        count: usize,
    ) -> Result<(), EngineError> {
        let input = self.activations.input(rows.bucket);
        self.head
            .run(&self.kernels.linear, input, Some(last.scale))?;
        let slots = rows.sequences * rows.stride;
        Ok(self.head.select(slots, count, true, DevicePtr::NULL)?)
    }

    /// The normalised rows behind the last layer, to `staged`.
    fn final_rows(&self, bucket: usize) -> Result<(), CudaError> {
        let width = self.spec.hidden_size;
        self.rows.norm(
            self.activations.x.ptr(),
            self.final_norm.ptr(),
            self.eps,
            width,
            self.staged.ptr(),
            PackedRows::new(DevicePtr::NULL, width, bucket),
        )
    }

    /// Where packed feature rows of a row bucket are staged.
    pub(crate) fn packed_features(&self, bucket: usize) -> PackedRows {
        PackedRows::new(self.packed.ptr(), self.spec.hidden_size, bucket)
    }

    /// Computes keys and values of feature rows for all layers and stores them at `slots`, `u32::MAX` for none.
    pub(crate) fn store_context(
        &self,
        features: PackedRows,
        positions: DevicePtr,
        slots: DevicePtr,
    ) -> Result<(), CudaError> {
        self.kernels.linear.launch(
            &self.context_kv,
            features,
            None,
            Epilogue::Store {
                out: self.context_projected.ptr(),
                ld: self.context_kv.rows(),
            },
        )?;
        self.kernels.rotary.context(
            ContextRows {
                kv: self.context_projected.ptr(),
                positions,
                kv_slot: slots,
                rows: features.rows,
            },
            self.key_norms.ptr(),
            self.eps,
            self.decoder.inverse_frequencies.ptr(),
            &self.kv,
        )
    }
}

impl Drafter for CudaDrafter {
    fn spec(&self) -> &DrafterSpec {
        &self.core.spec
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
        if !rows.len().is_multiple_of(width) {
            return Err(EngineError::InvalidBatch(format!(
                "{} feature values are not a whole number of rows of {width}",
                rows.len()
            )));
        }
        let core = &self.core;
        core.device.bind()?;
        let skipped = self.contexts.begin_append(id, start, rows.len() / width)?;
        for chunk in rows[skipped * width..].chunks(MOST_BLOCK_ROWS * width) {
            let count = chunk.len() / width;
            let bucket = row_bucket(count);
            let context = self.contexts.make_room(id, count)?;
            let mut positions: Vec<u32> = (0..count).map(|i| (context.end() + i) as u32).collect();
            let mut slots: Vec<u32> = (0..count)
                .map(|i| {
                    let (block, offset) = context.table.locate(context.rows + i);
                    block.0 * BLOCK_TOKENS as u32 + offset as u32
                })
                .collect();
            positions.resize(bucket, 0);
            slots.resize(bucket, u32::MAX);
            core.staged.write(chunk)?;
            core.positions.write(&positions)?;
            core.slots.write(&slots)?;
            let packed = core.packed_features(bucket);
            core.rows.pack(core.staged.ptr(), count, width, packed)?;
            core.store_context(packed, core.positions.ptr(), core.slots.ptr())?;
            core.device.stream().synchronize()?;
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
            let key = DraftKey::of(
                group[0].shape,
                group.len(),
                &self.core.spec,
                self.longest(group)?,
            );
            let blocks: Vec<BlockRequest> = group.iter().map(|request| request.block).collect();
            let depths: Vec<usize> = group.iter().map(|request| request.max_depth).collect();
            if !self.graphs.contains_key(&key) {
                let graph = DraftGraph::capture(&self.core, &mut self.inputs, key)?;
                self.graphs.insert(key, graph);
            }
            self.fill_inputs(&blocks, &depths)?;
            let graph = &self.graphs[&key];
            let trees = graph.run(&self.core, &self.inputs, group.len())?;
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

/// What the blocks of a drafter see, and which of up to two ranges each layer takes.
fn block_shape(drafter: &DrafterCheckpoint) -> Result<(BlockShape, Vec<usize>), CudaError> {
    let config = &drafter.config;
    let mut kinds = Vec::new();
    let mut variants = Vec::with_capacity(config.attention.len());
    for attention in &config.attention {
        let kind = (attention.causal, attention.window.unwrap_or(0) as u32);
        let known = kinds.iter().position(|other| *other == kind);
        variants.push(known.unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        }));
    }
    if kinds.len() > BLOCK_VARIANTS {
        return Err(CudaError::Unsupported(format!(
            "a drafter with {} kinds of attention: up to {BLOCK_VARIANTS} work",
            kinds.len()
        )));
    }
    let mut windows = [0; BLOCK_VARIANTS];
    let mut causal = 0;
    for (index, (is_causal, window)) in kinds.iter().enumerate() {
        windows[index] = *window;
        causal |= u32::from(*is_causal) << index;
    }
    Ok((
        BlockShape {
            block_size: config.block_size,
            mask_token: config.mask_token_id,
            variants: kinds.len().max(1),
            causal,
            windows,
        },
        variants,
    ))
}
