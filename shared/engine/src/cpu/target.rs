//! The target on the CPU.

mod layout;
mod weights;

use std::sync::Arc;

use treespec_checkpoint::{Architecture, DrafterCheckpoint, TargetCheckpoint, TargetConfig};

pub use self::weights::TargetWeights;

use self::layout::Layout;
use super::decoder::{DecoderLayer, LayerRows, LayerShape, Scratch};
use super::embedding::VocabularyWeights;
use super::kernels::{
    AttentionShape, Epilogue, HeadPass, KvLayer, NormWeights, PackedLinear, Packer,
};
use super::{CpuOptions, Executor, Pass, Precision};
use crate::backend::{Backend, ForwardOutput, LoadProgress, TargetSpec};
use crate::batch::{HeadRequest, RowBatch};
use crate::kv_cache::{BLOCK_TOKENS, BlockTable};
use crate::{EngineError, HeadRow, RowSampling};

/// How to load a target.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TargetOptions {
    /// Threads, instruction set and arithmetic.
    pub cpu: CpuOptions,
    /// Rows of the KV cache over all sequences, rounded up to whole blocks.
    pub kv_tokens: usize,
}

/// Llama or Qwen3 dense target.
pub struct CpuTarget {
    spec: TargetSpec,
    exec: Executor,
    vocabulary: Arc<VocabularyWeights>,
    precision: Precision,
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
        let exec = Executor::new(&options.cpu)?;
        let precision = options.cpu.precision(target);
        let mut packer = Packer::new(precision, exec.isa());
        let shape = layer_shape(config);
        let vocabulary = VocabularyWeights::load(target, true, &mut packer)?;
        report(1);
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            let prefix = format!("model.layers.{layer}");
            layers.push(DecoderLayer::load(target, &prefix, shape, &mut packer)?);
            report(layer + 2);
        }
        let final_norm = NormWeights {
            weight: target.tensor("model.norm.weight", &[config.hidden_size])?,
            eps: config.rms_norm_eps,
        };
        let projection = drafter
            .map(|drafter| FeatureProjection::load(drafter, config, &mut packer.for_drafter()))
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
                numerics_profile: exec.numerics_profile(precision),
            },
            kv: (0..config.num_layers)
                .map(|_| KvLayer::new(shape.attention, num_blocks))
                .collect(),
            inverse_frequencies: crate::inverse_frequencies(config.rope_theta, config.head_dim),
            exec,
            vocabulary: Arc::new(vocabulary),
            precision,
            layers,
            final_norm,
            projection,
            scratch: Scratch::default(),
        })
    }

    /// What a drafter beside this target shares with it.
    pub(super) fn shared(&self) -> (&Executor, &Arc<VocabularyWeights>, Precision) {
        (&self.exec, &self.vocabulary, self.precision)
    }
}

/// Runs the layers over `hidden`, `[rows, hidden]`, in place. Returns the tapped rows, `[rows, taps * hidden]`, of the
/// projection, if there is one.
fn run_layers(
    pass: &mut Pass<'_>,
    (layers, kv): (&[DecoderLayer], &mut [KvLayer]),
    scratch: &mut Scratch,
    hidden: &mut [f32],
    rows: &LayerRows<'_>,
    projection: Option<&FeatureProjection>,
) -> Vec<f32> {
    let count = rows.slots.len();
    let width = hidden.len() / count;
    let mut tapped = vec![0.0; projection.map_or(0, |p| count * p.taps.len() * width)];
    for (index, (layer, kv)) in layers.iter().zip(kv).enumerate() {
        layer.forward(pass, hidden, rows, kv, scratch);
        let taps = projection.map_or(&[][..], |p| &p.taps);
        for (place, _) in taps.iter().enumerate().filter(|(_, tap)| **tap == index) {
            let rows = tapped.chunks_exact_mut(taps.len() * width);
            for (out, row) in rows.zip(hidden.chunks_exact(width)) {
                out[place * width..(place + 1) * width].copy_from_slice(row);
            }
        }
    }
    tapped
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
        let projection = self.projection.as_ref().filter(|_| wants_features);
        let mut pass = self.exec.begin();
        let weights = (&self.layers[..], &mut self.kv[..]);
        let scratch = &mut self.scratch;
        let tapped = run_layers(&mut pass, weights, scratch, &mut hidden, &rows, projection);

        let mut head_hidden = Vec::new();
        let mut requests = Vec::new();
        let mut sampling = Vec::new();
        let all_requests = batch.sequences.iter().flat_map(|sequence| {
            let requests = sequence.head.iter().enumerate();
            requests.map(move |(row, request)| (sequence, row, request))
        });
        for (hidden, (sequence, row, request)) in hidden.chunks_exact(width).zip(all_requests) {
            if let Some(request) = request {
                head_hidden.extend_from_slice(hidden);
                requests.push(*request);
                let chooses = request.top_k > 0;
                sampling.push(chooses.then(|| RowSampling::of(sequence, row)).flatten());
            }
        }
        self.final_norm.apply(pass.isa, &mut head_hidden);
        let head = self.vocabulary.head().ok_or(EngineError::NoHead)?;
        let head_rows = pass.select(HeadPass {
            hidden: &head_hidden,
            requests: &requests,
            sampling: &sampling,
            head,
        });
        let mut head_rows = check_choices(head_rows, &requests, &sampling)?.into_iter();
        let mut start = 0;
        let mut outputs = Vec::with_capacity(batch.sequences.len());
        for sequence in &batch.sequences {
            let wanted = sequence.head.iter().flatten().count();
            let rows = sequence.tokens.len();
            let features = match projection.filter(|_| sequence.features) {
                Some(projection) => projection.run(&mut pass, &tapped, start, rows),
                None => Vec::new(),
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
        log_prob_rows(&mut self.exec.begin(), hidden, k, head)
    }
}

/// The k best tokens with log-probabilities of every row of `hidden`.
pub(super) fn log_prob_rows(
    pass: &mut Pass<'_>,
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
        ..HeadRequest::ARGMAX
    };
    let requests = vec![request; hidden.len() / head.depth()];
    let rows = pass.select(HeadPass {
        hidden,
        requests: &requests,
        sampling: &[],
        head,
    });
    check_numbers(rows, &requests)
}

/// Every row that samples has chosen.
fn check_choices(
    rows: Vec<HeadRow>,
    requests: &[HeadRequest],
    sampling: &[Option<RowSampling<'_>>],
) -> Result<Vec<HeadRow>, EngineError> {
    let rows = check_numbers(rows, requests)?;
    let undecided = |(row, sampling): (&HeadRow, &Option<RowSampling<'_>>)| {
        sampling.is_some() && row.chosen.is_none()
    };
    match rows.iter().zip(sampling).position(undecided) {
        Some(row) => Err(EngineError::NonFiniteLogits { row }),
        None => Ok(rows),
    }
}

fn check_numbers(
    rows: Vec<HeadRow>,
    requests: &[HeadRequest],
) -> Result<Vec<HeadRow>, EngineError> {
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
    fn load(
        drafter: &DrafterCheckpoint,
        target: &TargetConfig,
        packer: &mut Packer,
    ) -> Result<Self, EngineError> {
        drafter.check_target(target)?;
        let config = &drafter.config;
        let (hidden, taps) = (config.hidden_size, config.taps.clone());
        let fc = drafter.matrix("fc.weight", [hidden, taps.len() * hidden])?;
        Ok(Self {
            fc: packer.pack(fc)?,
            hidden_norm: NormWeights {
                weight: drafter.tensor("hidden_norm.weight", &[hidden])?,
                eps: config.rms_norm_eps,
            },
            taps,
        })
    }

    /// Features of rows `start..start + rows` of the tapped rows.
    fn run(&self, pass: &mut Pass<'_>, tapped: &[f32], start: usize, rows: usize) -> Vec<f32> {
        let depth = self.fc.depth();
        let input = &tapped[start * depth..(start + rows) * depth];
        let mut projected = vec![0.0; rows * self.fc.columns()];
        pass.linear(input, rows, &self.fc, &mut projected, Epilogue::Store);
        let mut features = vec![0.0; projected.len()];
        pass.rms_norm(&self.hidden_norm, &projected, &mut features);
        features
    }
}
