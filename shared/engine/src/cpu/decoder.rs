//! One decoder layer of the Llama / Qwen3 family, shared by the target and the drafter.

use treespec_checkpoint::{CheckpointError, TensorSource};

use super::Executor;
use super::kernels::{
    AttentionShape, Epilogue, KvLayer, NormWeights, PackedLinear, RotaryRows, RowView, attend,
    rms_norm, rotate, store_rows,
};
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
    query: PackedLinear,
    /// Keys, then values.
    key_value: PackedLinear,
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
    ) -> Result<Self, CheckpointError> {
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
            query: PackedLinear::pack(&matrix("self_attn.q_proj", q, hidden)?),
            key_value: PackedLinear::pack_stacked(&[
                &matrix("self_attn.k_proj", kv, hidden)?,
                &matrix("self_attn.v_proj", kv, hidden)?,
            ]),
            query_norm: head_norm("self_attn.q_norm")?,
            key_norm: head_norm("self_attn.k_norm")?,
            output: PackedLinear::pack(&matrix("self_attn.o_proj", hidden, q)?),
            post_norm: norm("post_attention_layernorm", hidden)?,
            gate_up: PackedLinear::pack_gate_up(
                &matrix("mlp.gate_proj", inner, hidden)?,
                &matrix("mlp.up_proj", inner, hidden)?,
            ),
            down: PackedLinear::pack(&matrix("mlp.down_proj", hidden, inner)?),
        })
    }

    /// Runs the layer on `hidden`, `[rows, hidden]`, in place, and stores the rows' keys and values.
    pub(super) fn forward(
        &self,
        exec: &mut Executor,
        hidden: &mut [f32],
        rows: &LayerRows<'_>,
        kv: &mut KvLayer,
        scratch: &mut Scratch,
    ) {
        let count = rows.slots.len();
        scratch.resize(&self.shape, count);
        let Scratch {
            normed,
            queries,
            keys_values,
            attended,
            inner,
        } = scratch;
        rms_norm(&mut exec.pool, &self.input_norm, hidden, normed);
        self.project_keys_values(exec, normed, rows.rotary, keys_values);
        store_rows(kv, keys_values, rows.slots);
        exec.linear(normed, count, &self.query, queries, Epilogue::Store);
        let AttentionShape {
            heads, head_dim, ..
        } = self.shape.attention;
        rotate(
            &mut exec.pool,
            queries,
            heads * head_dim,
            heads,
            self.query_norm.as_ref(),
            rows.rotary,
            (head_dim as f32).sqrt().recip(),
        );
        attend(&mut exec.pool, exec.isa, queries, kv, rows.views, attended);
        exec.linear(attended, count, &self.output, hidden, Epilogue::AddTo);
        rms_norm(&mut exec.pool, &self.post_norm, hidden, normed);
        exec.linear(normed, count, &self.gate_up, inner, Epilogue::SwiGlu);
        exec.linear(inner, count, &self.down, hidden, Epilogue::AddTo);
    }

    /// Stores keys and values of rows that take no part otherwise: the drafter's context, which DFlash does not
    /// pass through the layer's input norm (z-lab/dflash, `dflash/model.py`).
    pub(super) fn store_context(
        &self,
        exec: &mut Executor,
        rows: &[f32],
        rotary: &RotaryRows,
        slots: &[(BlockId, usize)],
        kv: &mut KvLayer,
    ) {
        let mut keys_values = vec![0.0; slots.len() * 2 * self.shape.key_width()];
        self.project_keys_values(exec, rows, rotary, &mut keys_values);
        store_rows(kv, &keys_values, slots);
    }

    fn project_keys_values(
        &self,
        exec: &mut Executor,
        input: &[f32],
        rotary: &RotaryRows,
        out: &mut [f32],
    ) {
        let width = 2 * self.shape.key_width();
        let rows = out.len() / width;
        exec.linear(input, rows, &self.key_value, out, Epilogue::Store);
        let kv_heads = self.shape.attention.kv_heads;
        rotate(
            &mut exec.pool,
            out,
            width,
            kv_heads,
            self.key_norm.as_ref(),
            rotary,
            1.0,
        );
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
    queries: Vec<f32>,
    keys_values: Vec<f32>,
    attended: Vec<f32>,
    inner: Vec<f32>,
}

impl Scratch {
    fn resize(&mut self, shape: &LayerShape, rows: usize) {
        self.normed.resize(rows * shape.hidden, 0.0);
        self.queries.resize(rows * shape.query_width(), 0.0);
        self.keys_values.resize(rows * 2 * shape.key_width(), 0.0);
        self.attended.resize(rows * shape.query_width(), 0.0);
        self.inner.resize(rows * shape.intermediate, 0.0);
    }
}
