//! Rotary embedding parameters in the styles of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).

use serde_json::Value;

use crate::CheckpointError;
use crate::config_file::ConfigFile;

/// transformers' default for Llama and Qwen3 when a configuration does not say.
const DEFAULT_THETA: f64 = 10_000.0;

/// The base of the plain rotary embedding; every scaled or partial variant is refused by the name of its field.
pub(crate) fn theta(config: &ConfigFile) -> Result<f64, CheckpointError> {
    for field in [
        "rope_parameters.rope_type",
        "rope_parameters.type",
        "rope_scaling.rope_type",
        "rope_scaling.type",
    ] {
        match config.text(field)? {
            None | Some("default") => {}
            Some(other) => {
                return Err(config.unsupported(field, format!("'{other}'"), "'default'"));
            }
        }
    }
    // A scaling object of another make than those above (for instance one per layer type) is not understood.
    for field in ["rope_scaling", "rope_parameters"] {
        let Some(value) = config.value(field) else {
            continue;
        };
        let understood = value.as_object().is_some_and(|object| {
            object
                .iter()
                .all(|(key, value)| is_understood(key) || value.is_null())
        });
        if !understood {
            return Err(config.unsupported(
                field,
                value,
                "null, or rope_theta with rope_type 'default'",
            ));
        }
    }
    for field in [
        "rope_parameters.partial_rotary_factor",
        "partial_rotary_factor",
    ] {
        if let Some(factor) = config.value(field).filter(|value| !is_one(value)) {
            return Err(config.unsupported(field, factor, "1"));
        }
    }
    let nested = config.positive("rope_parameters.rope_theta")?;
    let flat = config.positive("rope_theta")?;
    Ok(nested.or(flat).unwrap_or(DEFAULT_THETA))
}

fn is_understood(key: &str) -> bool {
    matches!(
        key,
        "rope_theta" | "rope_type" | "type" | "partial_rotary_factor"
    )
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}
