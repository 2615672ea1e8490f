//! One decoder layer of the Llama / Qwen3 family, shared by the target and the drafter.

use treespec_checkpoint::{CheckpointError, TensorSource};

use super::kernels::{
    AttentionShape, Epilogue, Heads, KvLayer, NormWeights, PackedLinear, Packer, RotaryRows,
    RowView, store_rows,
};
use super::{PackedWeights, Pass};
use crate::EngineError;
use crate::kv_cache::BlockId;

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LayerShape {
    pub(super) attention: AttentionShape,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) eps: f32,
    /// RMS norm per head on queries and keys (Qwen3 and DFlash).
    pub(super) head_norms: bool,
}

impl LayerShape {
    fn query_width(&self) -> usize {
        self.attention.heads * self.attention.head_dim
    }

    fn key_width(&self) -> usize {
        self.attention.kv_heads * self.attention.head_dim
    }
}

/// Weights of one layer.
pub(super) struct DecoderLayer {
    shape: LayerShape,
    input_norm: NormWeights,
    /// Queries; then keys and values, which can be computed alone.
    qkv: PackedLinear,
    query_norm: Option<NormWeights>,
    key_norm: Option<NormWeights>,
    output: PackedLinear,
    post_norm: NormWeights,
    gate_up: PackedLinear,
    down: PackedLinear,
}

impl DecoderLayer {
    /// Loads the tensors below `prefix`, for example `model.layers.3`.
    pub(super) fn load(
        source: &impl TensorSource,
        prefix: &str,
        shape: LayerShape,
        packer: &mut Packer,
    ) -> Result<Self, EngineError> {
        let (hidden, head_dim) = (shape.hidden, shape.attention.head_dim);
        let norm = |name: &str, width: usize| {
            let weight = source.tensor(&format!("{prefix}.{name}.weight"), &[width])?;
            Ok::<_, CheckpointError>(NormWeights {
                weight,
                eps: shape.eps,
            })
        };
        let head_norm = |name: &str| shape.head_norms.then(|| norm(name, head_dim)).transpose();
        let matrix = |name: &str, rows: usize, columns: usize| {
            source.matrix(&format!("{prefix}.{name}.weight"), [rows, columns])
        };
        let (q, kv, inner) = (shape.query_width(), shape.key_width(), shape.intermediate);
        Ok(Self {
            shape,
            input_norm: norm("input_layernorm", hidden)?,
            qkv: packer.pack_groups(vec![
                vec![matrix("self_attn.q_proj", q, hidden)?],
                vec![
                    matrix("self_attn.k_proj", kv, hidden)?,
                    matrix("self_attn.v_proj", kv, hidden)?,
                ],
            ])?,
            query_norm: head_norm("self_attn.q_norm")?,
            key_norm: head_norm("self_attn.k_norm")?,
            output: packer.pack(matrix("self_attn.o_proj", hidden, q)?)?,
            post_norm: norm("post_attention_layernorm", hidden)?,
            gate_up: packer.pack_gate_up(
                matrix("mlp.gate_proj", inner, hidden)?,
                matrix("mlp.up_proj", inner, hidden)?,
            )?,
            down: packer.pack(matrix("mlp.down_proj", hidden, inner)?)?,
        })
    }

    /// What its linear layers take.
    pub(super) fn weights(&self) -> PackedWeights {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
            .map(PackedLinear::weights)
            .into_iter()
            .sum()
    }

    /// Runs the layer on `hidden`, `[rows, hidden]`, in place, and stores the rows' keys and values.
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_>,
        hidden: &mut [f32],
        rows: &LayerRows<'_>,
        kv: &mut KvLayer,
        scratch: &mut Scratch,
    ) {
        let count = rows.slots.len();
        scratch.resize(&self.shape, count);
        let Scratch {
            normed,
            projected,
            queries,
            keys_values,
            ..
        } = scratch;
        pass.rms_norm(&self.input_norm, hidden, normed);
        pass.linear(normed, count, &self.qkv, projected, Epilogue::Store);
        self.rotate_queries(pass, projected, rows.rotary, queries);
        self.rotate_keys(pass, projected, rows.rotary, keys_values);
        store_rows(kv, keys_values, rows.slots);
        self.attend_and_mix(pass, hidden, rows.views, kv, scratch);
    }

    /// Likewise for a last layer of which only the rows `kept` matter, in ascending order: `hidden` has just those
    /// afterwards, with the bits that [`Self::forward`] gives them.
    pub(super) fn forward_kept(
        &self,
        pass: &mut Pass<'_>,
        hidden: &mut Vec<f32>,
        rows: &LayerRows<'_>,
        kept: &[usize],
        kv: &mut KvLayer,
        scratch: &mut Scratch,
    ) {
        let (all, width) = (rows.slots.len(), self.shape.hidden);
        scratch.resize(&self.shape, all);
        pass.rms_norm(&self.input_norm, hidden, &mut scratch.normed);
        self.store_context(pass, &scratch.normed, rows.rotary, rows.slots, kv);
        let gather = |from: &[f32]| -> Vec<f32> {
            let row = |&row: &usize| from[row * width..(row + 1) * width].to_vec();
            kept.iter().flat_map(row).collect()
        };
        let normed = gather(&scratch.normed);
        *hidden = gather(hidden);
        scratch.resize(&self.shape, kept.len());
        let queries = self.shape.query_width();
        let projected = &mut scratch.projected[..kept.len() * queries];
        pass.linear_columns(&normed, kept.len(), (&self.qkv, 0..queries), projected);
        let rotary = rows.rotary.select(kept);
        self.rotate_queries(pass, projected, &rotary, &mut scratch.queries);
        let views: Vec<_> = kept.iter().map(|&row| rows.views[row].clone()).collect();
        self.attend_and_mix(pass, hidden, &views, kv, scratch);
    }

    /// Attention of the queries in `scratch`, its output projection, and the MLP.
    fn attend_and_mix(
        &self,
        pass: &mut Pass<'_>,
        hidden: &mut [f32],
        views: &[RowView<'_>],
        kv: &KvLayer,
        scratch: &mut Scratch,
    ) {
        let count = views.len();
        let Scratch {
            normed,
            queries,
            attended,
            inner,
            ..
        } = scratch;
        pass.attend(queries, kv, views, attended);
        pass.linear(attended, count, &self.output, hidden, Epilogue::AddTo);
        pass.rms_norm(&self.post_norm, hidden, normed);
        pass.linear(normed, count, &self.gate_up, inner, Epilogue::SwiGlu);
        pass.linear(inner, count, &self.down, hidden, Epilogue::AddTo);
    }

    /// Stores keys and values of rows that take no part otherwise: the drafter's context, which DFlash does not
    /// pass through the layer's input norm (z-lab/dflash, `dflash/model.py`).
    pub(super) fn store_context(
        &self,
        pass: &mut Pass<'_>,
        rows: &[f32],
        rotary: &RotaryRows,
        slots: &[(BlockId, usize)],
        kv: &mut KvLayer,
    ) {
        let width = 2 * self.shape.key_width();
        let mut projected = vec![0.0; slots.len() * width];
        let columns = self.shape.query_width()..self.qkv.columns();
        pass.linear_columns(rows, slots.len(), (&self.qkv, columns), &mut projected);
        let mut keys_values = vec![0.0; projected.len()];
        self.rotate_keys(pass, &projected, rotary, &mut keys_values);
        store_rows(kv, &keys_values, slots);
    }

    /// Queries, rotated and scaled, of rows of projections that begin with them.
    fn rotate_queries(
        &self,
        pass: &mut Pass<'_>,
        projected: &[f32],
        rotary: &RotaryRows,
        out: &mut [f32],
    ) {
        let width = self.shape.query_width();
        let heads = Heads {
            rows: projected,
            width: projected.len() / (out.len() / width).max(1),
            first: 0,
            count: self.shape.attention.heads,
            norm: self.query_norm.as_ref(),
            scale: (self.shape.attention.head_dim as f32).sqrt().recip(),
        };
        pass.rotate(heads, rotary, out, width);
    }

    /// Keys, rotated, and values of rows of projections that end with them.
    fn rotate_keys(
        &self,
        pass: &mut Pass<'_>,
        projected: &[f32],
        rotary: &RotaryRows,
        out: &mut [f32],
    ) {
        let keys = self.shape.key_width();
        let width = projected.len() / (out.len() / (2 * keys)).max(1);
        let key_heads = Heads {
            rows: projected,
            width,
            first: width - 2 * keys,
            count: self.shape.attention.kv_heads,
            norm: self.key_norm.as_ref(),
            scale: 1.0,
        };
        pass.rotate(key_heads, rotary, out, 2 * keys);
        let rows = projected.chunks_exact(width);
        for (out, row) in out.chunks_exact_mut(2 * keys).zip(rows) {
            out[keys..].copy_from_slice(&row[width - keys..]);
        }
    }
}

/// What the rows of a forward are to the attention of a layer.
pub(super) struct LayerRows<'a> {
    pub(super) rotary: &'a RotaryRows,
    /// Where each row's keys and values go.
    pub(super) slots: &'a [(BlockId, usize)],
    pub(super) views: &'a [RowView<'a>],
}

/// Activations of one layer, kept between calls.
#[derive(Default)]
pub(super) struct Scratch {
    normed: Vec<f32>,
    projected: Vec<f32>,
    queries: Vec<f32>,
    keys_values: Vec<f32>,
    attended: Vec<f32>,
    inner: Vec<f32>,
}

impl Scratch {
    fn resize(&mut self, shape: &LayerShape, rows: usize) {
        self.normed.resize(rows * shape.hidden, 0.0);
        let projected = shape.query_width() + 2 * shape.key_width();
        self.projected.resize(rows * projected, 0.0);
        self.queries.resize(rows * shape.query_width(), 0.0);
        self.keys_values.resize(rows * 2 * shape.key_width(), 0.0);
        self.attended.resize(rows * shape.query_width(), 0.0);
        self.inner.resize(rows * shape.intermediate, 0.0);
    }
}
