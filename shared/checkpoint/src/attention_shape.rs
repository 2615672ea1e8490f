//! The geometry of a grouped-query attention block, checked once for targets and drafters in either format.

use crate::CheckpointError;
use crate::config_file::ConfigFile;
use crate::limits;

/// Head counts and head size that satisfy: heads divisible by KV heads, head size even (half-split RoPE).
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionShape {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl AttentionShape {
    /// Reads `num_attention_heads`, `num_key_value_heads` (default: as many) and `head_dim` (default: hidden / heads).
    pub(crate) fn from_config(
        config: &ConfigFile,
        hidden_size: usize,
    ) -> Result<Self, CheckpointError> {
        let num_heads = config.required_count("num_attention_heads", limits::HEADS)?;
        let num_kv_heads = config
            .count("num_key_value_heads", limits::HEADS)?
            .unwrap_or(num_heads);
        let head_dim = config.count("head_dim", limits::HEAD_DIM)?;
        Self::new(hidden_size, num_heads, num_kv_heads, head_dim)
            .map_err(|(field, value, expected)| config.invalid(field, value, expected))
    }

    /// Checks the geometry. The error is (Hugging Face field, value, what was expected).
    pub(crate) fn new(
        hidden_size: usize,
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: Option<usize>,
    ) -> Result<Self, (&'static str, usize, String)> {
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            let expected = format!("a divisor of the {num_heads} attention heads");
            return Err(("num_key_value_heads", num_kv_heads, expected));
        }
        let head_dim = match head_dim {
            Some(head_dim) => head_dim,
            None if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => {
                hidden_size / num_heads
            }
            None => {
                let expected =
                    format!("a divisor of hidden_size {hidden_size} when head_dim is absent");
                return Err(("num_attention_heads", num_heads, expected));
            }
        };
        if !limits::HEAD_DIM.contains(&head_dim) || head_dim % 2 != 0 {
            let expected = format!("an even number up to {}", limits::HEAD_DIM.end());
            return Err(("head_dim", head_dim, expected));
        }
        Ok(Self {
            num_heads,
            num_kv_heads,
            head_dim,
        })
    }
}
