//! What the engine has to know about a target model, and which tensors that implies.

use crate::CheckpointError;
use crate::attention_shape::AttentionShape;
use crate::config_file::ConfigFile;
use crate::limits;
use crate::rope;

/// The supported decoder architectures. Both are pre-norm, SwiGLU, grouped-query attention with half-split RoPE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama: no norm inside the attention.
    Llama,
    /// Qwen3 (dense): RMS norm over each query and key head before RoPE.
    Qwen3,
}

impl Architecture {
    /// The name used by `model_type` in config.json and by `general.architecture` in GGUF.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen3 => "qwen3",
        }
    }

    pub(crate) const SUPPORTED: &'static str = "'llama', 'qwen3'";

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [Self::Llama, Self::Qwen3]
            .into_iter()
            .find(|architecture| architecture.name() == name)
    }
}

/// The hyper-parameters of a target. All sizes are checked: none is zero, `num_heads` is a multiple of `num_kv_heads`,
/// `head_dim` is even.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetConfig {
    /// Which forward pass applies.
    pub architecture: Architecture,
    /// Rows of the embedding and of the head; can exceed the tokenizer's ids (padding).
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP between its projections.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Width of one head; `num_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// Whether the head is the embedding (then there is no `lm_head.weight`).
    pub tie_word_embeddings: bool,
    /// Tokens that end a generation: generation_config.json's first, then config.json's, without repetition.
    pub eos_token_ids: Vec<u32>,
    /// The token that starts a document, when the model has one.
    pub bos_token_id: Option<u32>,
}

/// Name and shape of a tensor that a checkpoint has to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Hugging Face name.
    pub name: String,
    /// Row-major shape, outermost dimension first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    pub(crate) fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
        }
    }
}

impl TargetConfig {
    /// Reads config.json and, when there is one, generation_config.json (only its `eos_token_id`: sampling defaults of
    /// a checkpoint are never applied).
    pub(crate) fn from_hugging_face(
        config: &ConfigFile,
        generation: Option<&ConfigFile>,
    ) -> Result<Self, CheckpointError> {
        let model_type = config.required("model_type", config.text("model_type")?)?;
        let architecture = Architecture::from_name(model_type).ok_or_else(|| {
            config.unsupported(
                "model_type",
                format!("'{model_type}'"),
                Architecture::SUPPORTED,
            )
        })?;
        refuse_other_computations(config)?;

        let num_layers = config.required_count("num_hidden_layers", limits::LAYERS)?;
        refuse_other_layers(config, num_layers)?;
        let hidden_size = config.required_count("hidden_size", limits::WIDTH)?;
        let attention = AttentionShape::from_config(config, hidden_size)?;
        let vocab_size = config.required_count("vocab_size", limits::VOCABULARY)?;
        let token_ids = 0..=vocab_size - 1;
        let mut eos_token_ids = Vec::new();
        for file in generation.into_iter().chain([config]) {
            for id in file
                .counts("eos_token_id", token_ids.clone())?
                .unwrap_or_default()
            {
                push_unique(&mut eos_token_ids, id as u32);
            }
        }
        Ok(Self {
            architecture,
            vocab_size,
            hidden_size,
            intermediate_size: config.required_count("intermediate_size", limits::WIDTH)?,
            num_layers,
            num_heads: attention.num_heads,
            num_kv_heads: attention.num_kv_heads,
            head_dim: attention.head_dim,
            rms_norm_eps: config.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope_theta: rope::theta(config)?,
            context_length: config.required_count("max_position_embeddings", limits::CONTEXT)?,
            tie_word_embeddings: config.flag("tie_word_embeddings")?.unwrap_or(false),
            eos_token_ids,
            bos_token_id: config.count("bos_token_id", token_ids)?.map(|id| id as u32),
        })
    }

    /// Every tensor of the model under its Hugging Face name, in forward order.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let mut tensors = vec![TensorSpec::new(
            "model.embed_tokens.weight",
            &[self.vocab_size, hidden],
        )];
        for layer in 0..self.num_layers {
            let attention = AttentionShape {
                num_heads: self.num_heads,
                num_kv_heads: self.num_kv_heads,
                head_dim: self.head_dim,
            };
            let head_norms = self.architecture == Architecture::Qwen3;
            let prefix = format!("model.layers.{layer}");
            tensors.extend(layer_tensors(&prefix, hidden, inner, attention, head_norms));
        }
        tensors.push(TensorSpec::new("model.norm.weight", &[hidden]));
        if !self.tie_word_embeddings {
            tensors.push(TensorSpec::new(
                "lm_head.weight",
                &[self.vocab_size, hidden],
            ));
        }
        tensors
    }
}

/// The tensors of one decoder layer; drafter layers have the same ones.
pub(crate) fn layer_tensors(
    prefix: &str,
    hidden: usize,
    inner: usize,
    attention: AttentionShape,
    head_norms: bool,
) -> Vec<TensorSpec> {
    let AttentionShape {
        num_heads,
        num_kv_heads,
        head_dim,
    } = attention;
    let (query, key) = (num_heads * head_dim, num_kv_heads * head_dim);
    let mut shapes: Vec<(&str, Vec<usize>)> = vec![
        ("input_layernorm", vec![hidden]),
        ("self_attn.q_proj", vec![query, hidden]),
        ("self_attn.k_proj", vec![key, hidden]),
        ("self_attn.v_proj", vec![key, hidden]),
        ("self_attn.o_proj", vec![hidden, query]),
        ("post_attention_layernorm", vec![hidden]),
        ("mlp.gate_proj", vec![inner, hidden]),
        ("mlp.up_proj", vec![inner, hidden]),
        ("mlp.down_proj", vec![hidden, inner]),
    ];
    if head_norms {
        shapes.push(("self_attn.q_norm", vec![head_dim]));
        shapes.push(("self_attn.k_norm", vec![head_dim]));
    }
    shapes
        .into_iter()
        .map(|(name, shape)| TensorSpec::new(format!("{prefix}.{name}.weight"), &shape))
        .collect()
}

/// Refuses what would change the forward pass of a layer, for targets and drafters alike.
pub(crate) fn refuse_other_computations(config: &ConfigFile) -> Result<(), CheckpointError> {
    for field in ["attention_bias", "mlp_bias"] {
        if config.flag(field)? == Some(true) {
            return Err(config.unsupported(field, true, "false"));
        }
    }
    if let Some(activation) = config.text("hidden_act")?.filter(|&name| name != "silu") {
        return Err(config.unsupported("hidden_act", format!("'{activation}'"), "'silu'"));
    }
    if let Some(quantization) = config.value("quantization_config") {
        return Err(config.unsupported(
            "quantization_config",
            quantization,
            "f32, f16 or bf16 weights (or a GGUF file)",
        ));
    }
    Ok(())
}

fn refuse_other_layers(config: &ConfigFile, num_layers: usize) -> Result<(), CheckpointError> {
    if config.flag("use_sliding_window")? == Some(true) {
        return Err(config.unsupported("use_sliding_window", true, "false"));
    }
    let Some(kinds) = config.texts("layer_types")? else {
        return Ok(());
    };
    if kinds.len() != num_layers {
        return Err(config.invalid(
            "layer_types",
            format!("a list of {}", kinds.len()),
            format!("one entry for each of the {num_layers} layers"),
        ));
    }
    match kinds.iter().position(|&kind| kind != "full_attention") {
        Some(layer) => Err(config.unsupported(
            &format!("layer_types[{layer}]"),
            format!("'{}'", kinds[layer]),
            "'full_attention'",
        )),
        None => Ok(()),
    }
}

pub(crate) fn push_unique(ids: &mut Vec<u32>, id: u32) {
    if !ids.contains(&id) {
        ids.push(id);
    }
}
