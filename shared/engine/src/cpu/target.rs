//! The target on the CPU.

use treespec_checkpoint::{Architecture, DrafterCheckpoint, TargetCheckpoint, TargetConfig};

use super::Executor;
use super::decoder::{DecoderLayer, LayerRows, LayerShape, Scratch};
use super::embedding::VocabularyWeights;
use super::kernels::{
    AttentionShape, Epilogue, Isa, KvLayer, NormWeights, PackedLinear, RotaryRows, RowView,
    rms_norm, select,
};
use crate::backend::{Backend, ForwardOutput, LoadProgress, TargetSpec};
use crate::batch::{HeadRequest, RowBatch, RowShape};
use crate::kv_cache::{BLOCK_TOKENS, BlockId, BlockTable};
use crate::{EngineError, HeadRow};

/// How to load a target.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TargetOptions {
    /// Threads of a forward; 0 takes one per core.
    pub threads: usize,
    /// Rows of the KV cache over all sequences, rounded up to whole blocks.
    pub kv_tokens: usize,
    /// Instruction set of the kernels; `None` takes the best.
    pub isa: Option<Isa>,
}

/// Llama or Qwen3 dense target in f32.
pub struct CpuTarget {
    spec: TargetSpec,
    exec: Executor,
    vocabulary: VocabularyWeights,
    layers: Vec<DecoderLayer>,
    kv: Vec<KvLayer>,
    final_norm: NormWeights,
    inverse_frequencies: Vec<f32>,
    projection: Option<FeatureProjection>,
    scratch: Scratch,
}

/// The drafter's input side, run by the target: `hidden_norm(fc(concat taps))` (z-lab/dflash).
struct FeatureProjection {
    taps: Vec<usize>,
    fc: PackedLinear,
    hidden_norm: NormWeights,
}

impl CpuTarget {
    /// Loads all weights. With a drafter's checkpoint the target also computes that drafter's features.
    ///
    /// # Errors
    /// [`EngineError::Checkpoint`] for a missing or misshapen tensor, or a drafter made for another target.
    pub fn load(
        target: &TargetCheckpoint,
        drafter: Option<&DrafterCheckpoint>,
        options: &TargetOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, EngineError> {
        let config = &target.config;
        let total_bytes = target.total_bytes();
        let mut report = |done: usize| {
            progress(LoadProgress {
                done_bytes: total_bytes * done as u64 / (config.num_layers as u64 + 1),
                total_bytes,
            });
        };
        report(0);
        let exec = Executor::new(options.threads, options.isa)?;
        let shape = layer_shape(config);
        let vocabulary = VocabularyWeights::load(target, true)?;
        report(1);
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            let prefix = format!("model.layers.{layer}");
            layers.push(DecoderLayer::load(target, &prefix, shape)?);
            report(layer + 2);
        }
        let final_norm = NormWeights {
            weight: target.tensor("model.norm.weight", &[config.hidden_size])?,
            eps: config.rms_norm_eps,
        };
        let projection = drafter
            .map(|drafter| FeatureProjection::load(drafter, config))
            .transpose()?;
        let num_blocks = options.kv_tokens.div_ceil(BLOCK_TOKENS);
        Ok(Self {
            spec: TargetSpec {
                architecture: config.architecture.name(),
                vocab_size: config.vocab_size,
                hidden_size: config.hidden_size,
                num_layers: config.num_layers,
                context_length: config.context_length,
                num_blocks,
                feature_size: projection.as_ref().map(|p| p.fc.columns()),
                numerics_profile: exec.numerics_profile(),
            },
            kv: (0..config.num_layers)
                .map(|_| KvLayer::new(shape.attention, num_blocks))
                .collect(),
            inverse_frequencies: crate::inverse_frequencies(config.rope_theta, config.head_dim),
            exec,
            vocabulary,
            layers,
            final_norm,
            projection,
            scratch: Scratch::default(),
        })
    }

    fn head(
        &mut self,
        hidden: &[f32],
        requests: &[HeadRequest],
    ) -> Result<Vec<HeadRow>, EngineError> {
        let head = self.vocabulary.head().ok_or(EngineError::NoHead)?;
        checked_select(&mut self.exec, hidden, requests, head)
    }

    /// Runs the layers over `hidden`, `[rows, hidden]`, in place. Returns the tapped rows, `[rows, taps * hidden]`,
    /// when `tap` is set and a projection is loaded.
    fn run_layers(
        &mut self,
        hidden: &mut [f32],
        rows: &LayerRows<'_>,
        tap: bool,
    ) -> Option<Vec<f32>> {
        let width = self.spec.hidden_size;
        let projection = self.projection.as_ref().filter(|_| tap);
        let mut tapped = projection.map(|p| vec![0.0; rows.slots.len() * p.taps.len() * width]);
        for (index, (layer, kv)) in self.layers.iter().zip(&mut self.kv).enumerate() {
            layer.forward(&mut self.exec, hidden, rows, kv, &mut self.scratch);
            let (Some(projection), Some(tapped)) = (projection, &mut tapped) else {
                continue;
            };
            for (place, _) in projection
                .taps
                .iter()
                .enumerate()
                .filter(|(_, t)| **t == index)
            {
                let rows = tapped.chunks_exact_mut(projection.taps.len() * width);
                for (out, row) in rows.zip(hidden.chunks_exact(width)) {
                    out[place * width..(place + 1) * width].copy_from_slice(row);
                }
            }
        }
        tapped
    }
}

impl Backend for CpuTarget {
    fn spec(&self) -> &TargetSpec {
        &self.spec
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<Vec<ForwardOutput>, EngineError> {
        let width = self.spec.hidden_size;
        let mut hidden = Vec::new();
        for sequence in &batch.sequences {
            sequence.validate(self.spec.vocab_size, self.spec.context_length)?;
            if sequence.features && self.projection.is_none() {
                return Err(EngineError::InvalidBatch(
                    "features of a target that was loaded without a drafter".into(),
                ));
            }
            for &token in sequence.tokens {
                self.vocabulary.embed(token, &mut hidden)?;
            }
        }
        let layout = Layout::new(batch, &self.inverse_frequencies);
        let views = layout.views(batch);
        let rows = LayerRows {
            rotary: &layout.rotary,
            slots: &layout.slots,
            views: &views,
        };
        let wants_features = batch.sequences.iter().any(|s| s.features);
        let tapped = self.run_layers(&mut hidden, &rows, wants_features);

        let mut head_hidden = Vec::new();
        let mut requests = Vec::new();
        let all_requests = batch.sequences.iter().flat_map(|s| s.head);
        for (row, request) in hidden.chunks_exact(width).zip(all_requests) {
            if let Some(request) = request {
                head_hidden.extend_from_slice(row);
                requests.push(*request);
            }
        }
        head_hidden
            .chunks_exact_mut(width)
            .for_each(|row| self.final_norm.apply(row));
        let mut head_rows = self.head(&head_hidden, &requests)?.into_iter();
        let mut start = 0;
        let mut outputs = Vec::with_capacity(batch.sequences.len());
        for sequence in &batch.sequences {
            let wanted = sequence.head.iter().flatten().count();
            let rows = sequence.tokens.len();
            let features = match (&self.projection, &tapped) {
                (Some(projection), Some(tapped)) if sequence.features => {
                    projection.run(&mut self.exec, tapped, start, rows)
                }
                _ => Vec::new(),
            };
            outputs.push(ForwardOutput {
                head: head_rows.by_ref().take(wanted).collect(),
                features,
            });
            start += rows;
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
        // A row never moves behind itself, so ascending copies overwrite only rows that are done with.
        for (target, &source) in path.iter().enumerate().filter(|(t, s)| t != *s) {
            let (from, to) = (
                table.locate(committed + source),
                table.locate(committed + target),
            );
            self.kv
                .iter_mut()
                .for_each(|layer| layer.move_row(from, to));
        }
        Ok(())
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        let head = self.vocabulary.head().ok_or(EngineError::NoHead)?;
        log_prob_rows(&mut self.exec, hidden, k, head)
    }
}

/// The k best tokens with log-probabilities of every row of `hidden`.
pub(super) fn log_prob_rows(
    exec: &mut Executor,
    hidden: &[f32],
    k: usize,
    head: &PackedLinear,
) -> Result<Vec<HeadRow>, EngineError> {
    if !hidden.len().is_multiple_of(head.depth()) {
        return Err(EngineError::InvalidBatch(format!(
            "{} values are not a whole number of rows of {}",
            hidden.len(),
            head.depth()
        )));
    }
    let request = HeadRequest {
        top_k: k.min(head.columns()),
        normaliser: true,
        gather: None,
    };
    let requests = vec![request; hidden.len() / head.depth()];
    checked_select(exec, hidden, &requests, head)
}

fn checked_select(
    exec: &mut Executor,
    hidden: &[f32],
    requests: &[HeadRequest],
    head: &PackedLinear,
) -> Result<Vec<HeadRow>, EngineError> {
    let rows = select(&mut exec.pool, exec.isa, hidden, requests, head);
    let broken = |(row, request): (&HeadRow, &HeadRequest)| {
        request.top_k > 0 && row.top.first().is_none_or(|best| !best.score.is_finite())
    };
    match rows.iter().zip(requests).position(broken) {
        Some(row) => Err(EngineError::NonFiniteLogits { row }),
        None => Ok(rows),
    }
}

fn layer_shape(config: &TargetConfig) -> LayerShape {
    LayerShape {
        attention: AttentionShape {
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
        },
        hidden: config.hidden_size,
        intermediate: config.intermediate_size,
        eps: config.rms_norm_eps,
        head_norms: config.architecture == Architecture::Qwen3,
    }
}

impl FeatureProjection {
    fn load(drafter: &DrafterCheckpoint, target: &TargetConfig) -> Result<Self, EngineError> {
        drafter.check_target(target)?;
        let config = &drafter.config;
        let (hidden, taps) = (config.hidden_size, config.taps.clone());
        let fc = drafter.matrix("fc.weight", [hidden, taps.len() * hidden])?;
        Ok(Self {
            fc: PackedLinear::pack(&fc),
            hidden_norm: NormWeights {
                weight: drafter.tensor("hidden_norm.weight", &[hidden])?,
                eps: config.rms_norm_eps,
            },
            taps,
        })
    }

    /// Features of rows `start..start + rows` of the tapped rows.
    fn run(&self, exec: &mut Executor, tapped: &[f32], start: usize, rows: usize) -> Vec<f32> {
        let depth = self.fc.depth();
        let input = &tapped[start * depth..(start + rows) * depth];
        let mut projected = vec![0.0; rows * self.fc.columns()];
        exec.linear(input, rows, &self.fc, &mut projected, Epilogue::Store);
        let mut features = vec![0.0; projected.len()];
        rms_norm(&mut exec.pool, &self.hidden_norm, &projected, &mut features);
        features
    }
}

/// Where the rows of a batch lie in the cache, and what each sees.
struct Layout {
    rotary: RotaryRows,
    slots: Vec<(BlockId, usize)>,
    /// Slots of all rows' tails, one after the other.
    tails: Vec<u32>,
    /// End of each row's tail in `tails`.
    tail_ends: Vec<usize>,
}

impl Layout {
    fn new(batch: &RowBatch<'_>, inverse_frequencies: &[f32]) -> Self {
        let positions = batch
            .sequences
            .iter()
            .flat_map(|s| (0..s.tokens.len()).map(|row| s.position(row)));
        let mut layout = Self {
            rotary: RotaryRows::new(inverse_frequencies, positions),
            slots: Vec::new(),
            tails: Vec::new(),
            tail_ends: Vec::new(),
        };
        for sequence in &batch.sequences {
            for row in 0..sequence.tokens.len() {
                layout
                    .slots
                    .push(sequence.table.locate(sequence.committed + row));
                if let RowShape::Tree { ancestors, .. } = sequence.shape {
                    let slots = ancestors.iter(row).map(|a| (sequence.committed + a) as u32);
                    layout.tails.extend(slots);
                }
                layout.tail_ends.push(layout.tails.len());
            }
        }
        layout
    }

    fn views<'a>(&'a self, batch: &'a RowBatch<'_>) -> Vec<RowView<'a>> {
        let mut views = Vec::with_capacity(self.slots.len());
        let mut start = 0;
        for sequence in &batch.sequences {
            for row in 0..sequence.tokens.len() {
                let end = self.tail_ends[views.len()];
                let prefix = match sequence.shape {
                    RowShape::Chain => 0..sequence.committed + row + 1,
                    RowShape::Tree { .. } => 0..sequence.committed,
                };
                views.push(RowView {
                    table: sequence.table,
                    prefix,
                    tail: &self.tails[start..end],
                });
                start = end;
            }
        }
        views
    }
}
