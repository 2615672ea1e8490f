//! Random damage never panics, hangs or allocates by a length that the file only claims to have.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use treespec_checkpoint::{
    ChatMessage, ChatTemplate, DrafterCheckpoint, TargetCheckpoint, TextTokenizer,
};

use crate::fixtures;
use crate::gguf_writer::saved;

/// Uses everything that can be opened at `path`. Only the absence of panics counts.
fn use_everything(path: &Path) {
    if let Ok(target) = TargetCheckpoint::open(path) {
        for tensor in target.config.tensors() {
            let _ = target.tensor(&tensor.name, &tensor.shape);
            if let [rows, columns] = tensor.shape[..] {
                let matrix = target.matrix(&tensor.name, [rows, columns]);
                let _ = matrix.map(|matrix| matrix.row_f32(rows - 1));
            }
        }
    }
    if let Ok(tokenizer) = TextTokenizer::open(path) {
        let ids = tokenizer
            .encode("Hello [INST] 漢字 123", true)
            .unwrap_or_default();
        let _ = tokenizer.decode(&ids, true);
        let _ = tokenizer.decode(&[0, 1, 2, 299], false);
    }
    if let Ok(Some(template)) = ChatTemplate::open(path) {
        let message = ChatMessage {
            role: "user".to_owned(),
            content: "hi".to_owned(),
        };
        let _ = template.render(&[message], true);
    }
}

/// Overwrites bytes at relative positions inside the first `span` bytes.
fn damage(bytes: &mut [u8], span: usize, flips: &[(f64, u8)]) {
    let span = span.min(bytes.len());
    for &(position, value) in flips {
        if let Some(byte) = bytes.get_mut((position * span as f64) as usize) {
            *byte = value;
        }
    }
}

fn flips() -> impl Strategy<Value = Vec<(f64, u8)>> {
    // Extreme values make lengths and counts absurd more often than uniform ones.
    let value = prop_oneof![any::<u8>(), Just(0), Just(0xff), Just(0x7f), Just(0x80)];
    prop::collection::vec((0.0..1.0f64, value), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn damaged_gguf_files(flips in flips(), keep in prop::option::of(0.0..1.0f64), span in prop_oneof![Just(64usize), Just(1200), Just(8000), Just(usize::MAX)]) {
        let mut bytes = fs::read(fixtures::path("malformed/_control_ok/model.gguf")).unwrap();
        damage(&mut bytes, span, &flips);
        if let Some(keep) = keep {
            bytes.truncate((bytes.len() as f64 * keep) as usize);
        }
        let file = saved(&bytes);
        use_everything(file.path());
    }

    #[test]
    fn damaged_directories(
        flips in flips(),
        keep in prop::option::of(0.0..1.0f64),
        name in prop::sample::select(vec!["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]),
    ) {
        let directory = fixtures::copied(&fixtures::path("malformed/_control_ok/model"));
        let file = directory.path().join(name);
        let mut bytes = fs::read(&file).unwrap();
        damage(&mut bytes, 9000, &flips);
        if let Some(keep) = keep {
            bytes.truncate((bytes.len() as f64 * keep) as usize);
        }
        fs::write(&file, bytes).unwrap();
        use_everything(directory.path());
    }

    #[test]
    fn damaged_drafters(flips in flips(), name in prop::sample::select(vec!["config.json", "model.safetensors"])) {
        let directory = fixtures::copied(&fixtures::path("malformed/_control_ok/drafter"));
        let file = directory.path().join(name);
        let mut bytes = fs::read(&file).unwrap();
        damage(&mut bytes, 2500, &flips);
        fs::write(&file, bytes).unwrap();
        if let Ok(drafter) = DrafterCheckpoint::open(directory.path()) {
            for tensor in drafter.config.tensors() {
                let _ = drafter.tensor(&tensor.name, &tensor.shape);
            }
            let _ = drafter.projection_hash();
        }
    }
}

#[test]
fn claimed_lengths_are_not_believed() {
    let whole = fs::read(fixtures::path("malformed/_control_ok/model.gguf")).unwrap();
    // Tensor count, metadata count and the length of the first key.
    for offset in [8, 16, 24] {
        for claimed in [u64::MAX, 1 << 62, 1 << 40, whole.len() as u64] {
            let mut bytes = whole.clone();
            bytes[offset..offset + 8].copy_from_slice(&claimed.to_le_bytes());
            let file = saved(&bytes);
            assert!(TargetCheckpoint::open(file.path()).is_err());
        }
    }
    for len in [0, 3, 4, 7, 23, 24, 200, 7000, whole.len() - 1] {
        let file = saved(&whole[..len]);
        assert!(TargetCheckpoint::open(file.path()).is_err(), "{len} bytes");
    }
    for claimed in [u64::MAX, 1 << 40, 99_000_000] {
        let directory = fixtures::copied(&fixtures::path("malformed/_control_ok/model"));
        let file = directory.path().join("model.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        bytes[..8].copy_from_slice(&claimed.to_le_bytes());
        fs::write(&file, bytes).unwrap();
        let message = TargetCheckpoint::open(directory.path())
            .unwrap_err()
            .to_string();
        assert!(message.contains("model.safetensors"), "{message}");
    }
}
