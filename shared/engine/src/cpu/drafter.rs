//! The DFlash v1 drafter on the CPU (z-lab/dflash, `dflash/model.py` at 44947fb).

use std::ops::Range;
use std::sync::Arc;

use treespec_checkpoint::{CouplingProfile, DrafterAttention, DrafterCheckpoint, TargetCheckpoint};

use super::decoder::{DecoderLayer, LayerRows, LayerShape, Scratch};
use super::embedding::VocabularyWeights;
use super::kernels::{AttentionShape, KvLayer, NormWeights, Packer, RotaryRows, RowView};
use super::target::log_prob_rows;
use super::{CpuOptions, CpuTarget, Executor, Precision};
use crate::backend::LoadProgress;
use crate::draft_contexts::{DraftContext, DraftContexts};
use crate::drafter::{BlockRequest, ContextId, Drafter, DrafterSpec};
use crate::kv_cache::BlockId;
use crate::{EngineError, HeadRow};

/// Context rows per pass: bounds the memory of a long prefill.
const CONTEXT_ROWS: usize = 256;

/// How to load a drafter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrafterOptions {
    /// Threads, instruction set and arithmetic.
    pub cpu: CpuOptions,
    /// Context rows kept per sequence.
    pub context_window: usize,
    /// Contexts open at once.
    pub max_contexts: usize,
    /// Whether to load the target's head, needed to build trees on this side.
    pub with_head: bool,
}

impl Default for DrafterOptions {
    fn default() -> Self {
        Self {
            cpu: CpuOptions::default(),
            context_window: 2_048,
            max_contexts: 64,
            with_head: true,
        }
    }
}

/// DFlash drafter.
pub struct CpuDrafter {
    spec: DrafterSpec,
    exec: Executor,
    vocabulary: Arc<VocabularyWeights>,
    layers: Vec<DecoderLayer>,
    attention: Vec<DrafterAttention>,
    kv: Vec<KvLayer>,
    final_norm: NormWeights,
    inverse_frequencies: Vec<f32>,
    mask_embedding: Vec<f32>,
    contexts: DraftContexts,
    coupling: Option<CouplingProfile>,
    scratch: Scratch,
}

impl CpuDrafter {
    /// Loads the drafter and, from the target's checkpoint, the embedding and head that it shares.
    ///
    /// # Errors
    /// [`EngineError::Checkpoint`] for a missing or misshapen tensor, or a drafter made for another target.
    pub fn load(
        drafter: &DrafterCheckpoint,
        target: &TargetCheckpoint,
        options: &DrafterOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        drafter.check_target(&target.config)?;
        let exec = Executor::new(&options.cpu)?;
        let precision = options.cpu.precision(target);
        let mut packer = Packer::new(precision, exec.isa());
        let vocabulary = VocabularyWeights::load(target, options.with_head, &mut packer)?;
        let shared = (exec, Arc::new(vocabulary), precision);
        Self::load_on(shared, drafter, target, options, progress)
    }

    /// Loads the drafter beside `loaded`, the same target: with its embedding, head, threads and arithmetic, whatever
    /// the options say of these. Only for models that never run at the same time: one waits for the other otherwise.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_beside(
        loaded: &CpuTarget,
        drafter: &DrafterCheckpoint,
        target: &TargetCheckpoint,
        options: &DrafterOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        drafter.check_target(&target.config)?;
        let (exec, vocabulary, precision) = loaded.shared();
        let shared = (exec.beside(), vocabulary.clone(), precision);
        Self::load_on(shared, drafter, target, options, progress)
    }

    fn load_on(
        (exec, vocabulary, precision): (Executor, Arc<VocabularyWeights>, Precision),
        drafter: &DrafterCheckpoint,
        target: &TargetCheckpoint,
        options: &DrafterOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        let config = &drafter.config;
        let total_bytes = drafter.total_bytes();
        let mut report = |done: usize| {
            progress(LoadProgress {
                done_bytes: total_bytes * done as u64 / (config.num_layers as u64 + 1),
                total_bytes,
            });
        };
        report(0);
        let shape = LayerShape {
            attention: AttentionShape {
                heads: config.num_heads,
                kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
            },
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
            eps: config.rms_norm_eps,
            head_norms: true,
        };
        let mut packer = Packer::new(precision, exec.isa()).for_drafter();
        let mut mask_embedding = Vec::new();
        vocabulary.embed(config.mask_token_id, &mut mask_embedding)?;
        report(1);
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            layers.push(DecoderLayer::load(
                drafter,
                &format!("layers.{layer}"),
                shape,
                &mut packer,
            )?);
            report(layer + 2);
        }
        let contexts = DraftContexts::new(
            options.max_contexts,
            options.context_window,
            config.block_size,
            target.config.context_length,
        );
        Ok(Self {
            spec: DrafterSpec {
                block_size: config.block_size,
                hidden_size: config.hidden_size,
                vocab_size: target.config.vocab_size,
                context_window: contexts.window(),
                num_layers: config.num_layers,
            },
            exec,
            vocabulary,
            layers,
            attention: config.attention.clone(),
            kv: (0..config.num_layers)
                .map(|_| KvLayer::new(shape.attention, contexts.num_blocks()))
                .collect(),
            final_norm: NormWeights {
                weight: drafter.tensor("norm.weight", &[config.hidden_size])?,
                eps: config.rms_norm_eps,
            },
            inverse_frequencies: crate::inverse_frequencies(config.rope_theta, config.head_dim),
            mask_embedding,
            contexts,
            coupling: drafter.coupling.clone(),
            scratch: Scratch::default(),
        })
    }

    /// Appends rows that fit the window, `[n, hidden]` with `n <= CONTEXT_ROWS`.
    fn append_rows(&mut self, id: ContextId, rows: &[f32]) -> Result<(), EngineError> {
        let count = rows.len() / self.spec.hidden_size;
        let context = self.contexts.make_room(id, count)?;
        let slots: Vec<_> = (context.rows..context.rows + count)
            .map(|slot| context.table.locate(slot))
            .collect();
        let rotary = RotaryRows::new(
            &self.inverse_frequencies,
            context.end()..context.end() + count,
        );
        let mut pass = self.exec.begin();
        for (layer, kv) in self.layers.iter().zip(&mut self.kv) {
            layer.store_context(&mut pass, rows, &rotary, &slots, kv);
        }
        self.contexts.commit(id, count)
    }

    /// Makes room for the blocks and embeds their slots: the root, then masks.
    fn open_blocks(&mut self, requests: &[BlockRequest]) -> Result<Vec<f32>, EngineError> {
        let size = self.spec.block_size;
        let mut hidden = Vec::with_capacity(requests.len() * size * self.spec.hidden_size);
        for request in requests {
            self.contexts.reserve_block(request.context)?;
            self.vocabulary.embed(request.root_token, &mut hidden)?;
            for _ in 1..size {
                hidden.extend_from_slice(&self.mask_embedding);
            }
        }
        Ok(hidden)
    }
}

impl Drafter for CpuDrafter {
    fn spec(&self) -> &DrafterSpec {
        &self.spec
    }

    fn coupling_profile(&self) -> Option<&CouplingProfile> {
        self.coupling.as_ref()
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
        let hidden = self.spec.hidden_size;
        let count = self.spec.context_rows(rows)?;
        let skipped = self.contexts.begin_append(id, start, count)?;
        for rows in rows[skipped * hidden..].chunks(CONTEXT_ROWS * hidden) {
            self.append_rows(id, rows)?;
        }
        Ok(())
    }

    fn block_hidden(&mut self, requests: &[BlockRequest]) -> Result<Vec<f32>, EngineError> {
        self.first_slots(requests, &vec![self.spec.block_size - 1; requests.len()])
    }

    fn first_slots(
        &mut self,
        requests: &[BlockRequest],
        slots: &[usize],
    ) -> Result<Vec<f32>, EngineError> {
        let size = self.spec.block_size;
        let mut hidden = self.open_blocks(requests)?;
        let contexts = requests
            .iter()
            .map(|request| self.contexts.get(request.context))
            .collect::<Result<Vec<_>, _>>()?;
        let blocks = BlockRows::new(&contexts, size, &self.inverse_frequencies);
        let first_rows = slots.iter().enumerate().map(|(block, &slots)| {
            let first = block * size + 1;
            first..first + slots.min(size - 1)
        });
        let kept: Vec<usize> = first_rows.flatten().collect();
        let mut pass = self.exec.begin();
        let last = self.layers.len() - 1;
        let layers = self.layers.iter().zip(&mut self.kv).zip(&self.attention);
        for (index, ((layer, kv), attention)) in layers.enumerate() {
            let views = blocks.views(&contexts, attention);
            let rows = LayerRows {
                rotary: &blocks.rotary,
                slots: &blocks.slots,
                views: &views,
            };
            let scratch = &mut self.scratch;
            if index == last {
                layer.forward_kept(&mut pass, &mut hidden, &rows, &kept, kv, scratch);
            } else {
                layer.forward(&mut pass, &mut hidden, &rows, kv, scratch);
            }
        }
        self.final_norm.apply(pass.isa, &mut hidden);
        Ok(hidden)
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        let head = self.vocabulary.head().ok_or(EngineError::NoHead)?;
        log_prob_rows(&mut self.exec.begin(), hidden, k, head)
    }
}

/// Where the slots of some blocks lie.
struct BlockRows {
    size: usize,
    rotary: RotaryRows,
    slots: Vec<(BlockId, usize)>,
    /// Cache slots of every block's rows, `[blocks * size]`.
    tails: Vec<u32>,
}

impl BlockRows {
    fn new(contexts: &[&DraftContext], size: usize, inverse_frequencies: &[f32]) -> Self {
        let own_slots = |c: &DraftContext| c.rows..c.rows + size;
        Self {
            size,
            rotary: RotaryRows::new(
                inverse_frequencies,
                contexts.iter().flat_map(|c| c.end()..c.end() + size),
            ),
            slots: contexts
                .iter()
                .flat_map(|c| own_slots(c).map(|slot| c.table.locate(slot)))
                .collect(),
            tails: contexts
                .iter()
                .flat_map(|c| own_slots(c).map(|slot| slot as u32))
                .collect(),
        }
    }

    /// Every slot sees the context and, unless the layer is causal, the whole block (z-lab/dflash).
    fn views<'a>(
        &'a self,
        contexts: &[&'a DraftContext],
        attention: &DrafterAttention,
    ) -> Vec<RowView<'a>> {
        let mut views = Vec::with_capacity(self.slots.len());
        for (context, tail) in contexts.iter().zip(self.tails.chunks_exact(self.size)) {
            for slot in 0..self.size {
                let seen = if attention.causal {
                    slot + 1
                } else {
                    self.size
                };
                // Visible iff query - key < window, in positions.
                let oldest = attention
                    .window
                    .map_or(0, |window| (context.rows + slot + 1).saturating_sub(window));
                views.push(RowView {
                    table: &context.table,
                    prefix: oldest.min(context.rows)..context.rows,
                    tail: &tail[oldest.saturating_sub(context.rows)..seen],
                });
            }
        }
        views
    }
}
