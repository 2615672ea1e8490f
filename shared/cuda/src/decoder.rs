//! The decoder layers of the Llama / Qwen3 family on the device, shared by the target and the drafter.

use std::sync::Arc;

use treespec_checkpoint::{CheckpointError, StoredMatrix, TensorSource};
use treespec_engine::{EngineError, inverse_frequencies};

use crate::activations::Activations;
use crate::attention::{AttentionKernels, AttentionShape, Visibility};
use crate::kv_cache::{KvCache, KvShape};
use crate::linear::{Epilogue, Layout, LinearKernels, PackedLinear, PrefillLinear, RowScale, Tap};
use crate::rotary::{HeadNorms, RotaryKernels};
use crate::row_metadata::RowArrays;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, PackedRows};

/// Sizes of the layers of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DecoderShape {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) layers: usize,
    pub(crate) eps: f32,
    pub(crate) rope_theta: f64,
    /// RMS norm per head on queries and keys (Qwen3 and DFlash).
    pub(crate) head_norms: bool,
}

impl DecoderShape {
    pub(crate) fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub(crate) fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    pub(crate) fn attention(&self) -> AttentionShape {
        AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// A cache of `blocks` blocks for these layers.
    pub(crate) fn cache(&self, blocks: usize) -> KvShape {
        KvShape {
            layers: self.layers,
            blocks,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        }
    }

    pub(crate) fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.key_width()
    }

    fn check(&self) -> Result<(), CudaError> {
        if !self.hidden.is_multiple_of(8) {
            return Err(CudaError::Unsupported(format!(
                "hidden size {} is not a multiple of 8",
                self.hidden
            )));
        }
        self.attention().check()
    }
}

/// Where the matrices of a model come from.
pub(crate) enum Weights<'a, S> {
    Checkpoint(&'a S),
    /// Random values made on the device, for benchmarks of shapes without a checkpoint.
    Random,
}

impl<S: TensorSource> Weights<'_, S> {
    pub(crate) fn matrices(
        &self,
        device: &Arc<Device>,
        names: &[(String, [usize; 2])],
        layout: Layout,
        seed: u64,
    ) -> Result<PackedLinear, EngineError> {
        match self {
            Self::Checkpoint(source) => {
                let stored = names
                    .iter()
                    .map(|(name, shape)| source.matrix(name, *shape))
                    .collect::<Result<Vec<StoredMatrix>, CheckpointError>>()?;
                let stacked: Vec<&StoredMatrix> = stored.iter().collect();
                Ok(PackedLinear::pack(device, &stacked, layout)?)
            }
            Self::Random => {
                let rows = names.iter().map(|(_, [rows, _])| rows).sum();
                let depth = names.first().map_or(0, |(_, [_, depth])| *depth);
                let scale = 1.0 / (depth as f32).sqrt();
                Ok(PackedLinear::random(
                    device, rows, depth, layout, seed, scale,
                )?)
            }
        }
    }

    fn vector(
        &self,
        device: &Arc<Device>,
        name: &str,
        len: usize,
    ) -> Result<DeviceBuffer<f32>, EngineError> {
        let values = match self {
            Self::Checkpoint(source) => source.tensor(name, &[len])?,
            Self::Random => vec![1.0; len],
        };
        Ok(DeviceBuffer::from_slice(device, &values)?)
    }
}

/// The kernels that a layer runs.
pub(crate) struct LayerKernels {
    pub(crate) linear: LinearKernels,
    pub(crate) rotary: RotaryKernels,
    pub(crate) attention: AttentionKernels,
}

struct DecoderLayer {
    input_norm: DeviceBuffer<f32>,
    /// Queries, keys, values.
    qkv: PackedLinear,
    head_norms: Option<(DeviceBuffer<f32>, DeviceBuffer<f32>)>,
    output: PackedLinear,
    post_norm: DeviceBuffer<f32>,
    gate_up: PackedLinear,
    down: PackedLinear,
}

/// All layers of a model, and the norm behind them.
pub(crate) struct Decoder {
    pub(crate) shape: DecoderShape,
    layers: Vec<DecoderLayer>,
    final_norm: DeviceBuffer<f32>,
    pub(crate) inverse_frequencies: DeviceBuffer<f32>,
}

/// The residual stream behind the last layer, ready for a linear layer behind the final norm.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FinalRows {
    /// Scale of each row: the rest of the final norm.
    pub(crate) scale: RowScale,
}

/// The layers whose output a drafter reads, and where it goes.
#[derive(Debug, Clone)]
pub(crate) struct Taps {
    /// Layers in the order of the drafter's `fc`.
    pub(crate) layers: Vec<usize>,
    /// Packed rows of `layers.len() * hidden` values.
    pub(crate) out: DevicePtr,
}

impl Decoder {
    /// Loads the layers below `prefix`, for example `model.layers.`, and the norm `final_norm`.
    pub(crate) fn load<S: TensorSource>(
        device: &Arc<Device>,
        weights: &Weights<'_, S>,
        prefix: &str,
        final_norm: &str,
        shape: DecoderShape,
        mut loaded: impl FnMut(usize),
    ) -> Result<Self, EngineError> {
        shape.check()?;
        let mut layers = Vec::with_capacity(shape.layers);
        for index in 0..shape.layers {
            let name = format!("{prefix}{index}");
            layers.push(DecoderLayer::load(
                device,
                weights,
                &name,
                shape,
                index as u64 * 8,
            )?);
            loaded(index + 1);
        }
        let frequencies = inverse_frequencies(shape.rope_theta, shape.head_dim);
        Ok(Self {
            layers,
            final_norm: weights.vector(device, final_norm, shape.hidden)?,
            inverse_frequencies: DeviceBuffer::from_slice(device, &frequencies)?,
            shape,
        })
    }

    /// Weight of the norm in front of the first layer.
    pub(crate) fn first_norm(&self) -> DevicePtr {
        self.layers
            .first()
            .map_or(self.final_norm.ptr(), |layer| layer.input_norm.ptr())
    }

    /// The most parts of a sum of squares that a layer writes.
    pub(crate) fn most_parts(&self) -> usize {
        self.layers
            .iter()
            .flat_map(|layer| [layer.output.parts(), layer.down.parts()])
            .max()
            .unwrap_or(1)
    }

    /// Bytes of all matrices.
    pub(crate) fn bytes(&self) -> u64 {
        self.matrices().map(PackedLinear::bytes).sum()
    }

    /// All matrices.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = &PackedLinear> {
        self.layers
            .iter()
            .flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down])
    }

    /// The keys-and-values part of a layer's checkpoint names: the drafter's context goes through it alone.
    pub(crate) fn key_value_names(&self, prefix: &str, layer: usize) -> [(String, [usize; 2]); 2] {
        let (kv, hidden) = (self.shape.key_width(), self.shape.hidden);
        ["k_proj", "v_proj"].map(|name| {
            (
                format!("{prefix}{layer}.self_attn.{name}.weight"),
                [kv, hidden],
            )
        })
    }

    /// Runs all layers on embedded rows (see [`Activations`]) and stores their keys and values. `rows_of` describes the
    /// rows to a layer: a drafter's layers differ in what they see. `prefill` multiplies in place of the kernels.
    pub(crate) fn forward(
        &self,
        kernels: &LayerKernels,
        activations: &Activations,
        kv: &KvCache,
        rows_of: impl Fn(usize) -> RowArrays,
        taps: Option<&Taps>,
        prefill: Option<&PrefillLinear>,
    ) -> Result<FinalRows, CudaError> {
        let mut parts = 1;
        for (index, layer) in self.layers.iter().enumerate() {
            let next_norm = self
                .layers
                .get(index + 1)
                .map_or(self.final_norm.ptr(), |next| next.input_norm.ptr());
            let run = LayerRun {
                decoder: self,
                kernels,
                activations,
                kv,
                prefill,
                rows: rows_of(index),
                layer: index,
            };
            parts = run.layer(layer, parts, next_norm, taps)?;
        }
        Ok(FinalRows {
            scale: self.scale(activations, parts),
        })
    }

    fn scale(&self, activations: &Activations, parts: u32) -> RowScale {
        RowScale {
            parts: activations.parts.ptr(),
            count: parts,
            eps: self.shape.eps,
            width: self.shape.hidden as u32,
        }
    }
}

/// One pass through one layer.
struct LayerRun<'a> {
    decoder: &'a Decoder,
    kernels: &'a LayerKernels,
    activations: &'a Activations,
    kv: &'a KvCache,
    prefill: Option<&'a PrefillLinear>,
    rows: RowArrays,
    layer: usize,
}

impl LayerRun<'_> {
    /// Returns the parts of the sum of squares that the layer leaves.
    fn layer(
        &self,
        layer: &DecoderLayer,
        parts: u32,
        next_norm: DevicePtr,
        taps: Option<&Taps>,
    ) -> Result<u32, CudaError> {
        let (decoder, act) = (self.decoder, self.activations);
        let nb = self.rows.bucket;
        self.multiply(
            &layer.qkv,
            act.input(nb),
            Some(decoder.scale(act, parts)),
            Epilogue::Store {
                out: act.qkv.ptr(),
                ld: decoder.shape.qkv_width(),
            },
        )?;
        self.kernels.rotary.rotate(
            act.qkv.ptr(),
            &self.rows,
            layer.head_norms.as_ref().map(|(query, key)| HeadNorms {
                query: query.ptr(),
                key: key.ptr(),
                eps: decoder.shape.eps,
            }),
            decoder.inverse_frequencies.ptr(),
            act.queries.ptr(),
            self.kv.layer(self.layer),
        )?;
        self.kernels.attention.attend(
            act.queries.ptr(),
            self.kv.layer(self.layer),
            &self.rows,
            Visibility::Rows,
            act.attended(nb),
        )?;
        self.multiply(
            &layer.output,
            act.attended(nb),
            None,
            Epilogue::Residual {
                x: act.x.ptr(),
                next_weight: layer.post_norm.ptr(),
                next: act.input(nb),
                parts: act.parts.ptr(),
                tap: None,
            },
        )?;
        self.multiply(
            &layer.gate_up,
            act.input(nb),
            Some(decoder.scale(act, layer.output.parts() as u32)),
            Epilogue::SwiGlu { out: act.inner(nb) },
        )?;
        self.multiply(
            &layer.down,
            act.inner(nb),
            None,
            Epilogue::Residual {
                x: act.x.ptr(),
                next_weight: next_norm,
                next: act.input(nb),
                parts: act.parts.ptr(),
                tap: taps.and_then(|taps| self.tap(taps)),
            },
        )?;
        Ok(layer.down.parts() as u32)
    }

    fn multiply(
        &self,
        linear: &PackedLinear,
        x: PackedRows,
        scale: Option<RowScale>,
        epilogue: Epilogue,
    ) -> Result<(), CudaError> {
        match self.prefill {
            None => self.kernels.linear.launch(linear, x, scale, epilogue),
            Some(prefill) => prefill.launch(linear, x, scale, epilogue),
        }
    }

    fn tap(&self, taps: &Taps) -> Option<Tap> {
        let place = taps.layers.iter().position(|&layer| layer == self.layer)?;
        let hidden = self.decoder.shape.hidden;
        Some(Tap {
            out: taps.out,
            k32: (taps.layers.len() * hidden).div_ceil(32) as u32,
            offset: (place * hidden) as u32,
        })
    }
}

impl DecoderLayer {
    fn load<S: TensorSource>(
        device: &Arc<Device>,
        weights: &Weights<'_, S>,
        prefix: &str,
        shape: DecoderShape,
        seed: u64,
    ) -> Result<Self, EngineError> {
        let (hidden, inner) = (shape.hidden, shape.intermediate);
        let (q, kv) = (shape.query_width(), shape.key_width());
        let matrix = |name: &str, rows: usize, depth: usize| {
            (format!("{prefix}.{name}.weight"), [rows, depth])
        };
        let norm = |name: &str, width: usize| {
            weights.vector(device, &format!("{prefix}.{name}.weight"), width)
        };
        let pack = |names: &[(String, [usize; 2])], layout, part: u64| {
            weights.matrices(device, names, layout, seed + part)
        };
        let head_norms = if shape.head_norms {
            Some((
                norm("self_attn.q_norm", shape.head_dim)?,
                norm("self_attn.k_norm", shape.head_dim)?,
            ))
        } else {
            None
        };
        Ok(Self {
            input_norm: norm("input_layernorm", hidden)?,
            qkv: pack(
                &[
                    matrix("self_attn.q_proj", q, hidden),
                    matrix("self_attn.k_proj", kv, hidden),
                    matrix("self_attn.v_proj", kv, hidden),
                ],
                Layout::Plain,
                1,
            )?,
            head_norms,
            output: pack(&[matrix("self_attn.o_proj", hidden, q)], Layout::Plain, 2)?,
            post_norm: norm("post_attention_layernorm", hidden)?,
            gate_up: pack(
                &[
                    matrix("mlp.gate_proj", inner, hidden),
                    matrix("mlp.up_proj", inner, hidden),
                ],
                Layout::GateUp,
                3,
            )?,
            down: pack(&[matrix("mlp.down_proj", hidden, inner)], Layout::Plain, 4)?,
        })
    }
}
