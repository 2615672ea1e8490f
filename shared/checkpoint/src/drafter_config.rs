//! The configuration of a DFlash v1 drafter.
//!
//! Layout: z-lab/dflash checkpoints. Fields moved between releases, so each is looked up in `dflash_config` first, then
//! at the top level, then takes its default.

use serde_json::Value;

use crate::attention_shape::AttentionShape;
use crate::config_file::ConfigFile;
use crate::target_config::{layer_tensors, refuse_other_computations};
use crate::{CheckpointError, TensorSpec, limits, rope};

/// The hyper-parameters of a drafter. All sizes are checked like those of a target.
#[derive(Debug, Clone, PartialEq)]
pub struct DrafterConfig {
    /// Width of the residual stream, equal to the target's.
    pub hidden_size: usize,
    /// Width of the MLP between its projections.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Size of the vocabulary that it was trained on (it has neither embedding nor head of its own).
    pub vocab_size: usize,
    /// Epsilon of every RMS norm, `hidden_norm` included; independent of the target's.
    pub rms_norm_eps: f32,
    /// Base of the rotary embedding; independent of the target's.
    pub rope_theta: f64,
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// Slots of a block: the root and `block_size - 1` guesses.
    pub block_size: usize,
    /// The token whose embedding stands in the slots to be guessed.
    pub mask_token_id: u32,
    /// Target layers whose outputs are concatenated, in this order, as the drafter's context.
    pub taps: Vec<usize>,
    /// Layers of the target that it was trained for, when the configuration says.
    pub num_target_layers: Option<usize>,
    /// How each layer attends, one entry per layer.
    pub attention: Vec<DrafterAttention>,
}

/// Visibility inside one drafter layer. With `d` = query position - key position, a key is visible iff
/// `d < window` and, when causal, `d >= 0`, otherwise `-d < window`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrafterAttention {
    /// Whether a slot sees only itself and what is before it.
    pub causal: bool,
    /// Sliding window in positions; `None` sees everything.
    pub window: Option<usize>,
}

impl DrafterConfig {
    pub(crate) fn from_config(config: &ConfigFile) -> Result<Self, CheckpointError> {
        require_dflash(config)?;
        refuse_variants(config)?;
        refuse_other_computations(config)?;
        let hidden_size = config.required_count("hidden_size", limits::WIDTH)?;
        let attention = AttentionShape::from_config(config, hidden_size)?;
        let num_layers = config.required_count("num_hidden_layers", limits::LAYERS)?;
        let num_target_layers =
            config.count(&field(config, "num_target_layers"), limits::LAYERS)?;
        let block_size = field(config, "block_size");
        let mask_token_id = field(config, "mask_token_id");
        Ok(Self {
            hidden_size,
            intermediate_size: config.required_count("intermediate_size", limits::WIDTH)?,
            num_layers,
            num_heads: attention.num_heads,
            num_kv_heads: attention.num_kv_heads,
            head_dim: attention.head_dim,
            vocab_size: config.required_count("vocab_size", limits::VOCABULARY)?,
            rms_norm_eps: config.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope_theta: rope::theta(config)?,
            context_length: config.required_count("max_position_embeddings", limits::CONTEXT)?,
            block_size: config.required_count(&block_size, limits::BLOCK)?,
            mask_token_id: config.required_count(&mask_token_id, limits::TOKEN_ID)? as u32,
            taps: taps(config, num_target_layers, num_layers)?,
            num_target_layers,
            attention: layer_attention(config, num_layers)?,
        })
    }

    /// Every tensor of the drafter under its name without the optional `model.` prefix.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let hidden = self.hidden_size;
        let attention = AttentionShape {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
        };
        let mut tensors = vec![
            TensorSpec::new("fc.weight", &[hidden, self.taps.len() * hidden]),
            TensorSpec::new("hidden_norm.weight", &[hidden]),
        ];
        for layer in 0..self.num_layers {
            let prefix = format!("layers.{layer}");
            tensors.extend(layer_tensors(
                &prefix,
                hidden,
                self.intermediate_size,
                attention,
                true,
            ));
        }
        tensors.push(TensorSpec::new("norm.weight", &[hidden]));
        tensors
    }
}

/// The place of `name`: inside `dflash_config` when it is there, else the top level.
fn field(config: &ConfigFile, name: &str) -> String {
    let nested = format!("dflash_config.{name}");
    if config.value(&nested).is_some() {
        nested
    } else {
        name.to_owned()
    }
}

fn require_dflash(config: &ConfigFile) -> Result<(), CheckpointError> {
    const CLASS: &str = "DFlashDraftModel";
    match config.texts("architectures")? {
        Some(classes) if classes.contains(&CLASS) => Ok(()),
        Some(classes) => Err(config.unsupported(
            "architectures",
            format!("{classes:?}"),
            format!("[\"{CLASS}\"]"),
        )),
        None if config.value("dflash_config").is_some() => Ok(()),
        None => config.required("dflash_config", None),
    }
}

/// Keys of DFlash2, DSpark, Domino, JetSpec, MiMo and speculators checkpoints, which compute something else than v1.
/// The second entry is the value with which v1 is meant after all.
const VARIANT_KEYS: [(&str, Neutral); 24] = [
    ("candidate_selector", Neutral::Absent),
    ("selector_rank", Neutral::Absent),
    ("selector_top_k", Neutral::Absent),
    ("conv_kernel_size", Neutral::Absent),
    ("conv_group_size", Neutral::Absent),
    ("projector_type", Neutral::Absent),
    ("gru_hidden_dim", Neutral::Absent),
    ("emb_dim", Neutral::Absent),
    ("pure_draft_prefix_len", Neutral::Number(0.0)),
    ("thresh_head_direct_len", Neutral::Absent),
    ("shift_label", Neutral::False),
    ("sample_from_anchor", Neutral::False),
    ("causal", Neutral::False),
    ("causal_head", Neutral::False),
    ("attention_sink_bias", Neutral::False),
    ("sliding_window_non_causal", Neutral::False),
    ("swa_window_size", Neutral::Absent),
    ("attention_value_scale", Neutral::Number(1.0)),
    ("input_embedding_scale", Neutral::Number(1.0)),
    ("output_multiplier", Neutral::Number(1.0)),
    ("final_logit_softcapping", Neutral::Absent),
    ("draft_vocab_size", Neutral::Absent),
    ("transformer_layer_config", Neutral::Absent),
    ("speculators_model_type", Neutral::Absent),
];

#[derive(Clone, Copy)]
enum Neutral {
    Absent,
    False,
    Number(f64),
}

impl Neutral {
    fn matches(self, value: &Value) -> bool {
        match self {
            Self::Absent => false,
            Self::False => value == &Value::Bool(false),
            Self::Number(number) => value.as_f64() == Some(number),
        }
    }

    fn describe(self) -> String {
        match self {
            Self::Absent => "DFlash v1, which has no such field".to_owned(),
            Self::False => "false (DFlash v1)".to_owned(),
            Self::Number(number) => format!("{number} (DFlash v1)"),
        }
    }
}

fn refuse_variants(config: &ConfigFile) -> Result<(), CheckpointError> {
    for (key, neutral) in VARIANT_KEYS {
        for place in [format!("dflash_config.{key}"), key.to_owned()] {
            if let Some(value) = config.value(&place).filter(|value| !neutral.matches(value)) {
                return Err(config.unsupported(&place, value, neutral.describe()));
            }
        }
    }
    Ok(())
}

fn taps(
    config: &ConfigFile,
    num_target_layers: Option<usize>,
    num_layers: usize,
) -> Result<Vec<usize>, CheckpointError> {
    let place = field(config, "target_layer_ids");
    let listed = config.counts(&place, limits::LAYER_ID)?;
    let taps = match (listed, num_target_layers) {
        (Some(taps), _) => taps,
        (None, Some(target_layers)) => default_taps(target_layers, num_layers),
        (None, None) => return config.required("dflash_config.target_layer_ids", None),
    };
    if taps.is_empty() || taps.len() > *limits::LAYERS.end() {
        return Err(config.invalid(
            &place,
            format!("a list of {}", taps.len()),
            "at least one layer",
        ));
    }
    Ok(taps)
}

/// The taps of a drafter with `num_layers` layers for a target of `target_layers` that lists none: evenly spread from
/// layer 1 to the fourth last. Source: z-lab/dflash `build_target_layer_ids`, whose Python `round` is half to even.
fn default_taps(target_layers: usize, num_layers: usize) -> Vec<usize> {
    if num_layers == 1 {
        return vec![target_layers / 2];
    }
    let span = target_layers as f64 - 4.0;
    let steps = (num_layers - 1) as f64;
    (0..num_layers)
        .map(|layer| {
            let tap = (1.0 + layer as f64 * span / steps).round_ties_even();
            // A target of fewer than four layers would give negative ids; layer 0 always exists.
            tap.max(0.0) as usize
        })
        .collect()
}

/// Causality follows the newer z-lab reference: `is_causal` when set, else sliding layers are causal and full ones are
/// not.
fn layer_attention(
    config: &ConfigFile,
    num_layers: usize,
) -> Result<Vec<DrafterAttention>, CheckpointError> {
    let is_causal = config.flag(&field(config, "is_causal"))?;
    let place = field(config, "layer_types");
    let kinds = match config.texts(&place)? {
        Some(kinds) => kinds,
        None => vec!["full_attention"; num_layers],
    };
    if kinds.len() != num_layers {
        let value = format!("a list of {}", kinds.len());
        return Err(config.invalid(
            &place,
            value,
            format!("one entry for each of the {num_layers} layers"),
        ));
    }
    kinds
        .iter()
        .map(|&kind| match kind {
            "full_attention" => Ok(DrafterAttention {
                causal: is_causal.unwrap_or(false),
                window: None,
            }),
            "sliding_attention" => Ok(DrafterAttention {
                causal: is_causal.unwrap_or(true),
                window: Some(
                    config.required_count(&field(config, "sliding_window"), limits::CONTEXT)?,
                ),
            }),
            other => Err(config.unsupported(
                &place,
                format!("'{other}'"),
                "'full_attention', 'sliding_attention'",
            )),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_taps_round_half_to_even() {
        // Published lists: Qwen3-4B (36 layers, 5 taps).
        assert_eq!(default_taps(36, 5), [1, 9, 17, 25, 33]);
        // 34 layers: 1 + 7.5 = 8.5 rounds to 8 in Python, not to 9.
        assert_eq!(default_taps(34, 5), [1, 8, 16, 24, 31]);
        assert_eq!(default_taps(30, 5), [1, 8, 14, 20, 27]);
        assert_eq!(default_taps(36, 1), [18]);
        assert_eq!(default_taps(2, 3), [1, 0, 0]);
    }
}
