//! A drafter that knows nothing: the configuration of a real one with random weights. Its drafts are useless, and no token
//! may depend on them.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result};
use safetensors::{Dtype, tensor::TensorView};
use treespec_checkpoint::DrafterCheckpoint;

/// Half the width of the uniform distribution of the weights.
const SCALE: f32 = 0.05;

/// Writes it into `directory`, which exists.
///
/// # Errors
/// The operating system's.
pub(super) fn write(real: &DrafterCheckpoint, directory: &Path) -> Result<()> {
    let config = real.path().join("config.json");
    fs::copy(&config, directory.join("config.json"))
        .with_context(|| format!("cannot copy {}", config.display()))?;
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut tensors = BTreeMap::new();
    for spec in real.config.tensors() {
        let values: Vec<u8> = (0..spec.shape.iter().product())
            .flat_map(|_| weight(&mut state).to_le_bytes())
            .collect();
        tensors.insert(spec.name, (spec.shape, values));
    }
    let views = tensors.iter().map(|(name, (shape, values))| {
        let view = TensorView::new(Dtype::F32, shape.clone(), values);
        view.map(|view| (name.clone(), view))
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    let path = directory.join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A linear congruential generator (Knuth, MMIX) is random enough.
fn weight(state: &mut u64) -> f32 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 40) as f32 / 16_777_216.0 * 2.0 - 1.0) * SCALE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::engine::tests::fixture;

    #[test]
    fn it_loads_where_the_real_one_does() {
        let real = fixture("cases/01_llama_gqa_tied/drafter_fit");
        let real = DrafterCheckpoint::open(&real).unwrap();
        let directory = tempfile::tempdir().unwrap();
        write(&real, directory.path()).unwrap();
        let random = DrafterCheckpoint::open(directory.path()).unwrap();
        assert_eq!(random.config, real.config);
    }
}
