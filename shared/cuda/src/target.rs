//! The target on a GPU.

mod forward;
mod forward_groups;
mod options;
mod outcomes;
mod prefill;
mod step_sampler;
mod verify_graph;

use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use treespec_checkpoint::{Architecture, DrafterCheckpoint, TargetCheckpoint, TargetConfig};
use treespec_engine::{
    BLOCK_TOKENS, Backend, BlockTable, EngineError, ForwardOutput, HeadRow, LoadProgress,
    PrefillMode, RowBatch, StepBatch, StepOutput, TargetSpec,
};

use crate::acceptance::AcceptanceKernels;
use crate::activations::Activations;
use crate::attention::AttentionKernels;
use crate::batch_inputs::BatchInputs;
use crate::decoder::{Decoder, DecoderShape, LayerKernels, Weights};
use crate::features::FeatureProjection;
use crate::graph_cache::GraphCache;
use crate::head_pass::HeadPass;
use crate::kv_cache::{AcceptedPaths, CompactionKernels, KvCache};
use crate::linear::LinearKernels;
use crate::rotary::RotaryKernels;
use crate::row_metadata::{RowBuffers, RowLimits};
use crate::rows::RowKernels;
use crate::vocabulary::Vocabulary;
use crate::{Device, DeviceBuffer, PackedRows};
use forward_groups::forward_groups;
pub(crate) use options::{
    KERNEL_BUILD, MOST_FORWARD_ROWS, MOST_FORWARD_SEQUENCES, MOST_SEQUENCES, MOST_STEP_ROWS,
};
pub(crate) use outcomes::{AcceptedHeads, AskedPath, wait_for_outcomes, walked};
use prefill::Prefill;
use step_sampler::StepSampler;
use treespec_tree::MAX_BUDGET;
pub(crate) use verify_graph::AcceptedBuffers;
use verify_graph::{VerifyGraph, VerifyKey};

/// Llama or Qwen3 dense target in bf16.
pub struct CudaTarget {
    pub(crate) core: TargetCore,
    graphs: GraphCache<VerifyKey, VerifyGraph>,
}

/// Weights, cache, buffers and kernels: all that the graphs of a target launch.
pub(crate) struct TargetCore {
    pub(crate) device: Arc<Device>,
    pub(crate) spec: TargetSpec,
    pub(crate) decoder: Decoder,
    pub(crate) kernels: LayerKernels,
    pub(crate) rows: RowKernels,
    pub(crate) acceptance: AcceptanceKernels,
    pub(crate) compaction: CompactionKernels,
    pub(crate) kv: KvCache,
    pub(crate) head: HeadPass,
    pub(crate) projection: Option<FeatureProjection>,
    pub(crate) inputs: BatchInputs,
    /// Made with the first step that samples.
    sampler: Option<StepSampler>,
    /// For [`treespec_engine::PrefillMode::Fast`].
    prefill: Option<Prefill>,
    activations: Activations,
    ragged: RowBuffers,
    head_input: DeviceBuffer<bf16>,
    head_parts: DeviceBuffer<f32>,
    head_rows: DeviceBuffer<u32>,
    hidden: DeviceBuffer<f32>,
}

impl CudaTarget {
    /// Loads all weights to `device`, as bf16. With a drafter's checkpoint the target also computes that drafter's
    /// features. `kv_tokens` rows of KV cache over all sequences, rounded up to whole blocks.
    ///
    /// # Errors
    /// [`EngineError::OutOfDeviceMemory`] before anything is loaded, [`EngineError::Checkpoint`] for a missing or
    /// misshapen tensor or a drafter made for another target, or a fault of the device.
    pub fn load(
        device: &Arc<Device>,
        target: &TargetCheckpoint,
        drafter: Option<&DrafterCheckpoint>,
        kv_tokens: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        let config = &target.config;
        device.bind()?;
        options::preflight(device, config, kv_tokens)?;
        let total_bytes = target.total_bytes();
        let mut report = |done: usize| {
            progress(LoadProgress {
                done_bytes: total_bytes * done as u64 / (config.num_layers as u64 + 1),
                total_bytes,
            });
        };
        report(0);
        let vocabulary = Arc::new(Vocabulary::load(device, target, true)?);
        let weights = Weights::Checkpoint(target);
        let decoder = Decoder::load(
            device,
            &weights,
            "model.layers.",
            "model.norm.weight",
            decoder_shape(config),
            &mut report,
        )?;
        let projection = drafter
            .map(|drafter| FeatureProjection::load(device, drafter, config, MOST_FORWARD_ROWS))
            .transpose()?;
        report(config.num_layers + 1);
        Self::assemble(device, config, vocabulary, decoder, projection, kv_tokens)
    }

    /// A target of the given shape with random weights made on the device, for benchmarks.
    ///
    /// # Errors
    /// As [`CudaTarget::load`].
    pub fn random(
        device: &Arc<Device>,
        config: &TargetConfig,
        kv_tokens: usize,
    ) -> Result<Self, EngineError> {
        device.bind()?;
        options::preflight(device, config, kv_tokens)?;
        let vocabulary = Arc::new(Vocabulary::random(device, config)?);
        let weights = Weights::<TargetCheckpoint>::Random;
        let shape = decoder_shape(config);
        let decoder = Decoder::load(device, &weights, "", "", shape, &mut |_| {})?;
        Self::assemble(device, config, vocabulary, decoder, None, kv_tokens)
    }

    fn assemble(
        device: &Arc<Device>,
        config: &TargetConfig,
        vocabulary: Arc<Vocabulary>,
        decoder: Decoder,
        projection: Option<FeatureProjection>,
        kv_tokens: usize,
    ) -> Result<Self, EngineError> {
        let shape = decoder.shape;
        let num_blocks = kv_tokens.div_ceil(BLOCK_TOKENS);
        // A request holds room for its tree behind the last position, too.
        let most_rows = config.context_length + MAX_BUDGET + 1;
        let blocks_per_sequence = most_rows.div_ceil(BLOCK_TOKENS).min(num_blocks);
        let kernels = LayerKernels {
            linear: LinearKernels::load(device)?,
            rotary: RotaryKernels::load(device, shape.attention())?,
            attention: AttentionKernels::load(device, shape.attention())?,
        };
        let (major, minor) = device.capability();
        let most_parts = decoder.most_parts();
        let core = TargetCore {
            spec: TargetSpec {
                architecture: config.architecture.name(),
                vocab_size: config.vocab_size,
                hidden_size: config.hidden_size,
                num_layers: config.num_layers,
                context_length: config.context_length,
                num_blocks,
                feature_size: projection.as_ref().map(FeatureProjection::width),
                numerics_profile: format!("bf16/sm_{major}{minor}/tp1/k{KERNEL_BUILD}"),
            },
            rows: RowKernels::load(device)?,
            acceptance: AcceptanceKernels::load(device)?,
            compaction: CompactionKernels::load(device)?,
            kv: KvCache::new(device, shape.cache(num_blocks))?,
            head: HeadPass::new(device, vocabulary, MOST_STEP_ROWS, crate::MOST_TOP)?,
            inputs: BatchInputs::new(device, MOST_SEQUENCES, blocks_per_sequence, 0)?,
            sampler: None,
            prefill: None,
            activations: Activations::new(device, shape, MOST_FORWARD_ROWS, most_parts)?,
            ragged: RowBuffers::new(
                device,
                RowLimits {
                    rows: MOST_FORWARD_ROWS,
                    sequences: MOST_FORWARD_SEQUENCES,
                    blocks: blocks_per_sequence,
                },
            )?,
            head_input: DeviceBuffer::zeroed(
                device,
                PackedRows::len(MOST_STEP_ROWS, shape.hidden),
            )?,
            head_parts: DeviceBuffer::zeroed(device, MOST_STEP_ROWS * most_parts)?,
            head_rows: DeviceBuffer::zeroed(device, MOST_STEP_ROWS)?,
            hidden: DeviceBuffer::zeroed(device, MOST_STEP_ROWS * shape.hidden)?,
            device: device.clone(),
            decoder,
            kernels,
            projection,
        };
        let mut target = Self {
            core,
            graphs: GraphCache::new(device),
        };
        let features = target.core.projection.is_some();
        for key in VerifyKey::usual(features) {
            target.graph(key)?;
        }
        Ok(target)
    }

    /// The graph of a step; those that a batch of one needs are captured when the target is loaded, the others here.
    fn graph(&mut self, key: VerifyKey) -> Result<(), EngineError> {
        if self.graphs.contains(&key) {
            return Ok(());
        }
        self.graphs.make_room()?;
        let graph = match VerifyGraph::capture(&mut self.core, key) {
            Ok(graph) => graph,
            Err(error) => {
                self.graphs.free_memory(error)?;
                VerifyGraph::capture(&mut self.core, key)?
            }
        };
        self.graphs.insert(key, graph);
        Ok(())
    }

    /// Bytes of all matrices that a forward with its head reads.
    pub fn weight_bytes(&self) -> u64 {
        let head = self.core.head.vocabulary.head.as_ref();
        self.core.decoder.bytes() + head.map_or(0, crate::PackedLinear::bytes)
    }

    /// Runs some trees, all with one graph, and returns where their outcome will be.
    fn step_trees(
        &mut self,
        batch: &[treespec_engine::TreeRows<'_>],
    ) -> Result<Vec<treespec_engine::VerifiedTree>, EngineError> {
        let key = VerifyKey::of(batch);
        self.core
            .prepare_sampling(batch.iter().map(|rows| rows.sampling), key.stride())?;
        self.graph(key)?;
        let graph = self
            .graphs
            .get_mut(&key)
            .expect("invariant: the graph was captured above");
        let outcome = graph.run(&mut self.core, batch);
        if outcome.is_err() {
            self.graphs.remove(&key);
        }
        outcome
    }
}

impl Backend for CudaTarget {
    fn spec(&self) -> &TargetSpec {
        &self.core.spec
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<Vec<ForwardOutput>, EngineError> {
        let core = &mut self.core;
        core.device.bind()?;
        for sequence in &batch.sequences {
            sequence.validate(core.spec.vocab_size, core.spec.context_length)?;
            if sequence.features && core.projection.is_none() {
                return Err(EngineError::InvalidBatch(
                    "features of a target that was loaded without a drafter".into(),
                ));
            }
        }
        let mut outputs = vec![ForwardOutput::default(); batch.sequences.len()];
        for group in forward_groups(&batch.sequences, core.most_forward_rows())? {
            let parts = core.forward_group(&batch.sequences, &group)?;
            for ((owner, _), output) in group.iter().zip(parts) {
                outputs[*owner].head.extend(output.head);
                outputs[*owner].features.extend(output.features);
            }
        }
        Ok(outputs)
    }

    fn compact(
        &mut self,
        table: &BlockTable,
        committed: usize,
        path: &[usize],
    ) -> Result<(), EngineError> {
        table.check_path(committed, path)?;
        if path.is_empty() {
            return Ok(());
        }
        self.core.device.bind()?;
        let words = |values: Vec<u32>| DeviceBuffer::from_slice(&self.core.device, &values);
        let path = words(path.iter().map(|&row| row as u32).collect())?;
        let count = words(vec![path.len() as u32])?;
        let start = words(vec![committed as u32])?;
        let blocks = words(table.blocks().iter().map(|block| block.0).collect())?;
        self.core.compaction.compact(
            &self.core.kv,
            AcceptedPaths {
                sequences: 1,
                path: path.ptr(),
                path_stride: path.len(),
                counts: count.ptr(),
                committed: start.ptr(),
                tables: blocks.ptr(),
                table_stride: blocks.len(),
            },
        )?;
        // The buffers of the call go with it.
        Ok(self.core.device.stream().synchronize()?)
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        let core = &self.core;
        core.device.bind()?;
        core.head.select_hidden(
            &core.kernels.linear,
            &core.rows,
            &core.hidden,
            &core.head_input,
            hidden,
            k,
        )
    }

    fn step(&mut self, batch: &StepBatch<'_>) -> Result<StepOutput, EngineError> {
        let started = Instant::now();
        let (vocab_size, context_length) =
            (self.core.spec.vocab_size, self.core.spec.context_length);
        for tree in &batch.trees {
            tree.validate(vocab_size, context_length)?;
            if tree.features && self.core.projection.is_none() {
                return Err(EngineError::InvalidBatch(
                    "features of a target that was loaded without a drafter".into(),
                ));
            }
        }
        let rows = if batch.rows.is_empty() {
            Vec::new()
        } else {
            self.forward(&RowBatch {
                sequences: batch.rows.clone(),
            })?
        };
        self.core.device.bind()?;
        let mut trees = Vec::with_capacity(batch.trees.len());
        for group in verify_graph::groups(&batch.trees) {
            trees.extend(self.step_trees(group)?);
        }
        Ok(StepOutput {
            rows,
            trees,
            forward: started.elapsed(),
            accept: std::time::Duration::ZERO,
        })
    }

    fn set_prefill(&mut self, mode: PrefillMode) -> Result<(), EngineError> {
        self.core.set_prefill(mode)
    }
}

fn decoder_shape(config: &TargetConfig) -> DecoderShape {
    DecoderShape {
        hidden: config.hidden_size,
        intermediate: config.intermediate_size,
        heads: config.num_heads,
        kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        layers: config.num_layers,
        eps: config.rms_norm_eps,
        rope_theta: config.rope_theta,
        head_norms: config.architecture == Architecture::Qwen3,
    }
}
