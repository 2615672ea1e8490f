//! Targets that are known by their sizes only: random weights cost the same time as trained ones.

use clap::ValueEnum;
use treespec_checkpoint::{Architecture, DrafterConfig, TargetConfig};

/// Bytes of a weight on a GPU (bf16).
const WEIGHT_BYTES: usize = 2;

/// The sizes of a published model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shape {
    /// Qwen/Qwen3-8B: 36 layers of width 4096, 32 query and 8 key heads, vocabulary 151,936, a head of its own
    #[value(name = "qwen3-8b")]
    Qwen3_8b,
}

impl Shape {
    /// As the command line writes it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Qwen3_8b => "qwen3-8b",
        }
    }

    /// What the model's config.json says.
    pub(super) fn config(self) -> TargetConfig {
        match self {
            Self::Qwen3_8b => TargetConfig {
                architecture: Architecture::Qwen3,
                vocab_size: 151_936,
                hidden_size: 4_096,
                intermediate_size: 12_288,
                num_layers: 36,
                num_heads: 32,
                num_kv_heads: 8,
                head_dim: 128,
                rms_norm_eps: 1e-6,
                rope_theta: 1e6,
                context_length: 40_960,
                tie_word_embeddings: false,
                eos_token_ids: vec![151_645],
                bos_token_id: Some(151_643),
            },
        }
    }
}

/// Bytes of the matrices that a forward of a few rows reads in bf16: all but an embedding that is no head. With a drafter
/// the projection of its features comes on top.
pub(super) fn weight_bytes(target: &TargetConfig, drafter: Option<&DrafterConfig>) -> u64 {
    let values: usize = target
        .tensors()
        .iter()
        .filter(|tensor| target.tie_word_embeddings || !tensor.name.contains("embed_tokens"))
        .filter(|tensor| tensor.shape.len() == 2)
        .map(|tensor| tensor.shape.iter().product::<usize>())
        .sum();
    let projection = drafter.map_or(0, |drafter| {
        drafter.hidden_size * drafter.taps.len() * drafter.hidden_size
    });
    ((values + projection) * WEIGHT_BYTES) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_the_published_parameters_without_the_embedding() {
        let config = Shape::Qwen3_8b.config();
        // 8,190,735,360 parameters: the embedding is looked up, and the norms are vectors.
        let norms = 36 * (2 * 4_096 + 2 * 128) + 4_096;
        let expected = 8_190_735_360u64 - 151_936 * 4_096 - norms;
        assert_eq!(weight_bytes(&config, None), 2 * expected);
    }

    #[test]
    fn a_tied_embedding_is_read_as_the_head() {
        let mut config = Shape::Qwen3_8b.config();
        let untied = weight_bytes(&config, None);
        config.tie_word_embeddings = true;
        assert_eq!(weight_bytes(&config, None), untied);
    }
}
