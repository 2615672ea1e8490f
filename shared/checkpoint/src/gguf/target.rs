//! A GGUF file as a target: architecture keys to [`TargetConfig`], tensor names to Hugging Face names.

use std::ops::RangeInclusive;
use std::path::Path;

use super::GgufFile;
use crate::attention_shape::AttentionShape;
use crate::target_config::push_unique;
use crate::{Architecture, CheckpointError, StoredMatrix, TargetConfig, limits};

/// Whether `path` is meant as a GGUF file (a file rather than a directory).
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.is_file()
}

/// A target model stored as GGUF.
#[derive(Debug)]
pub(crate) struct GgufTarget {
    file: GgufFile,
    config: TargetConfig,
}

impl GgufTarget {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = GgufFile::open(path)?;
        let config = read_config(&file)?;
        refuse_other_tensors(&file, &config)?;
        Ok(Self { file, config })
    }

    pub(crate) fn config(&self) -> &TargetConfig {
        &self.config
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        self.file.total_bytes()
    }

    /// Whether a tensor is in a block format.
    pub(crate) fn is_quantised(&self) -> bool {
        self.file.is_quantised()
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        gguf_name(name).is_some_and(|stored| self.file.contains_tensor(&stored))
    }

    pub(crate) fn check(&self, name: &str, shape: &[usize]) -> Result<(), CheckpointError> {
        self.file
            .check(&gguf_name(name).unwrap_or_default(), shape, name)
    }

    /// The tensor with the Hugging Face name `name`, its rows in Hugging Face order.
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let values = self
            .file
            .tensor(&gguf_name(name).unwrap_or_default(), shape, name)?;
        if self.is_interleaved(name) {
            let columns = shape.last().copied().unwrap_or(1);
            let rows = 0..values.len() / columns;
            return Ok(rows
                .map(|row| half_split_row(row, self.config.head_dim))
                .flat_map(|row| &values[row * columns..(row + 1) * columns])
                .copied()
                .collect());
        }
        Ok(values)
    }

    /// The matrix with the Hugging Face name `name`, its rows in Hugging Face order.
    pub(crate) fn matrix(
        &self,
        name: &str,
        shape: [usize; 2],
    ) -> Result<StoredMatrix, CheckpointError> {
        let matrix = self
            .file
            .matrix(&gguf_name(name).unwrap_or_default(), shape, name)?;
        if self.is_interleaved(name) {
            return Ok(matrix.reorder_rows(|row| half_split_row(row, self.config.head_dim)));
        }
        Ok(matrix)
    }

    /// Whether the rows are stored in the order that llama.cpp's converter gives Llama's rotated projections.
    fn is_interleaved(&self, name: &str) -> bool {
        let rotated = name.ends_with(".q_proj.weight") || name.ends_with(".k_proj.weight");
        rotated && self.config.architecture == Architecture::Llama
    }
}

/// GGUF tensor names of one layer and their Hugging Face counterparts, both without the `.weight` suffix.
const LAYER_NAMES: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// `model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`; `None` for names that GGUF has no counterpart of.
fn gguf_name(name: &str) -> Option<String> {
    match name {
        "model.embed_tokens.weight" => return Some("token_embd.weight".to_owned()),
        "model.norm.weight" => return Some("output_norm.weight".to_owned()),
        "lm_head.weight" => return Some("output.weight".to_owned()),
        _ => {}
    }
    let (layer, part) = name
        .strip_prefix("model.layers.")?
        .strip_suffix(".weight")?
        .split_once('.')?;
    let (stored, _) = LAYER_NAMES.iter().find(|(_, theirs)| *theirs == part)?;
    Some(format!("blk.{layer}.{stored}.weight"))
}

/// Where row `row` of a query or key projection is stored. llama.cpp's converter stores Llama's rows so that RoPE
/// rotates neighbours (2i, 2i+1); Hugging Face, and this project, rotate (i, i + head_dim/2).
fn half_split_row(row: usize, head_dim: usize) -> usize {
    let (head, lane) = (row / head_dim, row % head_dim);
    let half = head_dim / 2;
    head * head_dim + 2 * (lane % half) + lane / half
}

/// The metadata of one architecture: keys are `ARCHITECTURE.NAME`.
struct ArchitectureKeys<'a> {
    file: &'a GgufFile,
    architecture: Architecture,
}

impl ArchitectureKeys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture.name())
    }

    fn count(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, CheckpointError> {
        let key = self.key(name);
        let Some(value) = self.file.count(&key)? else {
            return Ok(None);
        };
        match usize::try_from(value) {
            Ok(value) if range.contains(&value) => Ok(Some(value)),
            _ => {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                Err(self.file.invalid(&key, expected))
            }
        }
    }

    fn required_count(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<usize, CheckpointError> {
        self.file
            .required(&self.key(name), self.count(name, range)?)
    }

    fn positive(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        let key = self.key(name);
        match self.file.float(&key)? {
            Some(value) if !(value.is_finite() && value > 0.0) => {
                Err(self.file.invalid(&key, "a positive number"))
            }
            value => Ok(value),
        }
    }

    /// Fails unless the count `name` is absent or `neutral`.
    fn refuse_unless(&self, name: &str, neutral: usize) -> Result<(), CheckpointError> {
        match self.count(name, 0..=usize::MAX)? {
            Some(value) if value != neutral => {
                Err(self.file.unsupported(&self.key(name), neutral.to_string()))
            }
            _ => Ok(()),
        }
    }
}

fn read_config(file: &GgufFile) -> Result<TargetConfig, CheckpointError> {
    let name = file.required("general.architecture", file.text("general.architecture")?)?;
    let architecture = Architecture::from_name(&name)
        .ok_or_else(|| file.unsupported("general.architecture", Architecture::SUPPORTED))?;
    let keys = ArchitectureKeys { file, architecture };
    let hidden_size = keys.required_count("embedding_length", limits::WIDTH)?;
    let attention = read_attention(&keys, hidden_size)?;
    refuse_other_computations(&keys, attention.head_dim)?;
    let vocab_size = vocab_size(file)?;
    Ok(TargetConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size: keys.required_count("feed_forward_length", limits::WIDTH)?,
        num_layers: keys.required_count("block_count", limits::LAYERS)?,
        num_heads: attention.num_heads,
        num_kv_heads: attention.num_kv_heads,
        head_dim: attention.head_dim,
        rms_norm_eps: file.required(
            &keys.key("attention.layer_norm_rms_epsilon"),
            keys.positive("attention.layer_norm_rms_epsilon")?,
        )? as f32,
        rope_theta: keys.positive("rope.freq_base")?.unwrap_or(10_000.0),
        context_length: keys.required_count("context_length", limits::CONTEXT)?,
        tie_word_embeddings: !file.contains_tensor("output.weight"),
        eos_token_ids: eos_token_ids(file, vocab_size)?,
        bos_token_id: token_id(file, "tokenizer.ggml.bos_token_id", vocab_size)?,
    })
}

fn read_attention(
    keys: &ArchitectureKeys<'_>,
    hidden_size: usize,
) -> Result<AttentionShape, CheckpointError> {
    let num_heads = keys.required_count("attention.head_count", limits::HEADS)?;
    let num_kv_heads = keys
        .count("attention.head_count_kv", limits::HEADS)?
        .unwrap_or(num_heads);
    let head_dim = keys.count("attention.key_length", limits::HEAD_DIM)?;
    AttentionShape::new(hidden_size, num_heads, num_kv_heads, head_dim).map_err(
        |(field, _, expected)| {
            let name = match field {
                "num_key_value_heads" => "attention.head_count_kv",
                "head_dim" => "attention.key_length",
                _ => "attention.head_count",
            };
            keys.file.invalid(&keys.key(name), expected)
        },
    )
}

fn refuse_other_computations(
    keys: &ArchitectureKeys<'_>,
    head_dim: usize,
) -> Result<(), CheckpointError> {
    keys.refuse_unless("attention.value_length", head_dim)?;
    keys.refuse_unless("rope.dimension_count", head_dim)?;
    keys.refuse_unless("attention.sliding_window", 0)?;
    keys.refuse_unless("expert_count", 0)?;
    let scaling = keys.key("rope.scaling.type");
    match keys.file.text(&scaling)?.as_deref() {
        None | Some("none") => {}
        Some(_) => return Err(keys.file.unsupported(&scaling, "'none'")),
    }
    for name in ["rope.scaling.factor", "rope.scale_linear"] {
        if keys.positive(name)?.is_some_and(|factor| factor != 1.0) {
            return Err(keys.file.unsupported(&keys.key(name), "1"));
        }
    }
    Ok(())
}

/// The number of tokens listed; the metadata key `vocab_size` is optional and not always right.
fn vocab_size(file: &GgufFile) -> Result<usize, CheckpointError> {
    const KEY: &str = "tokenizer.ggml.tokens";
    let tokens = file.required(KEY, file.texts(KEY)?)?.len();
    if limits::VOCABULARY.contains(&tokens) {
        return Ok(tokens);
    }
    let expected = format!(
        "{} to {} tokens",
        limits::VOCABULARY.start(),
        limits::VOCABULARY.end()
    );
    Err(file.invalid(KEY, expected))
}

fn eos_token_ids(file: &GgufFile, vocab_size: usize) -> Result<Vec<u32>, CheckpointError> {
    let mut ids = Vec::new();
    for key in [
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
    ] {
        if let Some(id) = token_id(file, key, vocab_size)? {
            push_unique(&mut ids, id);
        }
    }
    Ok(ids)
}

/// A token id inside the vocabulary, `None` when the key is absent.
fn token_id(file: &GgufFile, key: &str, vocab_size: usize) -> Result<Option<u32>, CheckpointError> {
    match file.count(key)? {
        None => Ok(None),
        Some(id) if id < vocab_size as u64 => Ok(Some(id as u32)),
        Some(_) => Err(file.invalid(key, format!("a token id below {vocab_size}"))),
    }
}

/// Refuses biases, RoPE factors, experts and whatever else the forward pass would have to use but does not know.
fn refuse_other_tensors(file: &GgufFile, config: &TargetConfig) -> Result<(), CheckpointError> {
    let known: std::collections::HashSet<String> = config
        .tensors()
        .iter()
        .filter_map(|tensor| gguf_name(&tensor.name))
        .collect();
    match file
        .tensor_names()
        .filter(|&name| !known.contains(name))
        .min()
    {
        Some(name) => Err(CheckpointError::UnexpectedTensor {
            name: name.to_owned(),
            path: file.path().to_owned(),
            model: config.architecture.name(),
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_of_both_architectures_has_a_gguf_name() {
        assert_eq!(
            gguf_name("model.layers.12.self_attn.q_proj.weight").as_deref(),
            Some("blk.12.attn_q.weight")
        );
        assert_eq!(
            gguf_name("lm_head.weight").as_deref(),
            Some("output.weight")
        );
        assert_eq!(gguf_name("model.layers.1.self_attn.q_proj.bias"), None);
    }

    #[test]
    fn interleaved_rows_become_half_split_in_every_head() {
        // Two heads of four rows, one value a row: pairs (0,1), (2,3) become halves (0,2), (1,3).
        let order: Vec<usize> = (0..8).map(|row| half_split_row(row, 4)).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
