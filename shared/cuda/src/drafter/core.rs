//! The models and memory of a drafter, and the kernels that its graphs launch.

use std::sync::Arc;

use half::bf16;
use treespec_checkpoint::{DrafterCheckpoint, TensorSource};
use treespec_engine::{DraftContexts, DrafterSpec, EngineError};

use super::MOST_BLOCK_ROWS;
use crate::activations::Activations;
use crate::attention::AttentionKernels;
use crate::candidate_ranking::CandidateRanking;
use crate::decoder::{Decoder, DecoderShape, FinalRows, LayerKernels, Weights};
use crate::draft_tree::DraftTreeKernels;
use crate::head_pass::HeadPass;
use crate::kv_cache::KvCache;
use crate::linear::{Epilogue, Layout, LinearKernels, PackedLinear};
use crate::rotary::{ContextRows, RotaryKernels};
use crate::rows::{BLOCK_VARIANTS, BlockContexts, BlockShape, RowKernels};
use crate::step_rows::{RowKind, StepRows, context_bucket};
use crate::vocabulary::Vocabulary;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, PackedRows};

/// Weights, cache, buffers and kernels: all that the graphs of a drafter launch.
pub(crate) struct DraftCore {
    pub(crate) device: Arc<Device>,
    pub(crate) spec: DrafterSpec,
    pub(crate) kernels: LayerKernels,
    pub(crate) rows: RowKernels,
    pub(crate) trees: DraftTreeKernels,
    pub(crate) head: HeadPass,
    pub(crate) ranking: CandidateRanking,
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
    pub(super) staged: DeviceBuffer<f32>,
    pub(super) packed: DeviceBuffer<bf16>,
}

impl DraftCore {
    pub(super) fn load(
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
            ranking: CandidateRanking::load(
                device,
                drafter.coupling.as_ref(),
                spec.block_size.saturating_sub(1),
            )?,
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
    pub(super) fn final_rows(&self, bucket: usize) -> Result<(), CudaError> {
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
