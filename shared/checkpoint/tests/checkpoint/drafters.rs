//! DFlash drafters: layouts, windows and causality, other kinds of drafters, fit to a target.

use std::fs;

use serde_json::{Value, json};
use treespec_checkpoint::{DrafterAttention, DrafterCheckpoint, TargetCheckpoint, TargetConfig};

use crate::fixtures;

const CASE: &str = "cases/01_llama_gqa_tied/drafter";

fn edited(edit: impl FnOnce(&mut Value)) -> Result<DrafterCheckpoint, String> {
    let directory = fixtures::edited(&fixtures::path(CASE), "config.json", edit);
    DrafterCheckpoint::open(directory.path()).map_err(|error| error.to_string())
}

fn target() -> TargetConfig {
    TargetCheckpoint::open(&fixtures::model("01_llama_gqa_tied"))
        .unwrap()
        .config
}

#[test]
fn every_fixture_drafter_loads() {
    for case in fixtures::CASES {
        for name in ["drafter", "drafter_fit"] {
            let drafter =
                DrafterCheckpoint::open(&fixtures::path(&format!("cases/{case}/{name}"))).unwrap();
            for tensor in drafter.config.tensors() {
                let count: usize = tensor.shape.iter().product();
                assert_eq!(
                    drafter.tensor(&tensor.name, &tensor.shape).unwrap().len(),
                    count
                );
            }
        }
    }
    let config = DrafterCheckpoint::open(&fixtures::path(CASE))
        .unwrap()
        .config;
    assert_eq!((config.block_size, config.mask_token_id), (6, 4));
    assert_eq!(config.taps, [1, 3]);
    assert_eq!(
        config.attention,
        vec![
            DrafterAttention {
                causal: false,
                window: None
            };
            2
        ]
    );
}

#[test]
fn the_newer_layout_nests_block_size_and_theta() {
    let drafter = edited(|config| {
        config.as_object_mut().unwrap().remove("rope_theta");
        config.as_object_mut().unwrap().remove("rope_scaling");
        config["rope_parameters"] = json!({"rope_theta": 5e5, "rope_type": "default"});
        config["dflash_config"]["block_size"] = json!(8);
        config["layer_types"] = json!(["sliding_attention", "full_attention"]);
        config["sliding_window"] = json!(128);
    })
    .unwrap();
    assert_eq!(
        (drafter.config.block_size, drafter.config.rope_theta),
        (8, 5e5)
    );
    let sliding = DrafterAttention {
        causal: true,
        window: Some(128),
    };
    let full = DrafterAttention {
        causal: false,
        window: None,
    };
    assert_eq!(drafter.config.attention, [sliding, full]);
}

#[test]
fn is_causal_overrides_the_layer_type() {
    for causal in [true, false] {
        let drafter = edited(|config| {
            config["is_causal"] = json!(causal);
            config["layer_types"] = json!(["sliding_attention", "full_attention"]);
            config["sliding_window"] = json!(16);
        })
        .unwrap();
        assert!(
            drafter
                .config
                .attention
                .iter()
                .all(|layer| layer.causal == causal)
        );
    }
    let message =
        edited(|config| config["layer_types"][0] = json!("sliding_attention")).unwrap_err();
    assert!(
        message.contains("field sliding_window is missing"),
        "{message}"
    );
}

#[test]
fn absent_taps_take_the_reference_default() {
    let drafter = edited(|config| {
        config["dflash_config"]
            .as_object_mut()
            .unwrap()
            .remove("target_layer_ids");
    })
    .unwrap();
    assert_eq!(drafter.config.taps, [1, 2]);
}

#[test]
fn other_kinds_of_drafters_are_refused_by_name() {
    for (key, value) in [
        ("conv_kernel_size", json!(2)),
        ("selector_rank", json!(256)),
        ("projector_type", json!("domino")),
        ("sample_from_anchor", json!(true)),
        ("causal_head", json!(true)),
        ("output_multiplier", json!(0.196)),
        ("final_logit_softcapping", json!(20.0)),
    ] {
        let nested = edited(|config| config["dflash_config"][key] = value.clone()).unwrap_err();
        assert!(
            nested.contains(&format!("dflash_config.{key} = {value}")),
            "{nested}"
        );
        let flat = edited(|config| config[key] = value.clone()).unwrap_err();
        assert!(flat.contains(&format!("{key} = {value}")), "{flat}");
    }
    edited(|config| {
        config["dflash_config"]["sample_from_anchor"] = json!(false);
        config["dflash_config"]["projector_type"] = Value::Null;
        config["output_multiplier"] = json!(1.0);
    })
    .unwrap();
    let message =
        edited(|config| config["architectures"] = json!(["DFlashSpeculator"])).unwrap_err();
    assert!(message.contains("DFlashSpeculator"), "{message}");
}

/// A copy of the fixture drafter whose safetensors header has been edited as text, keeping its length.
fn with_renamed_tensor(from: &str, to: &str) -> tempfile::TempDir {
    let directory = fixtures::copied(&fixtures::path(CASE));
    let file = directory.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + header_len])
        .unwrap()
        .replace(from, to);
    let mut renamed = (header.len() as u64).to_le_bytes().to_vec();
    renamed.extend(header.bytes());
    renamed.extend(&bytes[8 + header_len..]);
    fs::write(&file, renamed).unwrap();
    directory
}

#[test]
fn tensor_names_may_have_the_model_prefix() {
    let prefixed = with_renamed_tensor("\"fc.weight\"", "\"model.fc.weight\"");
    let drafter = DrafterCheckpoint::open(prefixed.path()).unwrap();
    let plain = DrafterCheckpoint::open(&fixtures::path(CASE)).unwrap();
    assert!(drafter.has_tensor("fc.weight"));
    assert_eq!(
        drafter.projection_hash().unwrap(),
        plain.projection_hash().unwrap()
    );
    assert_eq!(plain.projection_hash().unwrap().len(), 64);
    let fitted =
        DrafterCheckpoint::open(&fixtures::path("cases/03_qwen3_headdim/drafter")).unwrap();
    assert_ne!(
        fitted.projection_hash().unwrap(),
        plain.projection_hash().unwrap()
    );
}

#[test]
fn foreign_tensors_are_refused_by_name() {
    let foreign = with_renamed_tensor(
        "\"norm.weight\"",
        "\"candidate_selector.predecessor_codebook\"",
    );
    let message = DrafterCheckpoint::open(foreign.path())
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("candidate_selector.predecessor_codebook"),
        "{message}"
    );
}

#[test]
fn a_drafter_must_fit_its_target() {
    let drafter = DrafterCheckpoint::open(&fixtures::path(CASE)).unwrap();
    drafter.check_target(&target()).unwrap();
    let message = |edit: &dyn Fn(&mut TargetConfig)| {
        let mut target = target();
        edit(&mut target);
        drafter.check_target(&target).unwrap_err().to_string()
    };
    assert!(
        message(&|target| target.num_layers = 3)
            .contains("target_layer_ids contains 3 but the target has only 3 layers (0..2)")
    );
    assert!(message(&|target| target.num_layers = 4).contains("the target's last layer"));
    assert!(
        message(&|target| target.num_layers = 6)
            .contains("num_target_layers is 5 but the target has 6")
    );
    assert!(
        message(&|target| target.hidden_size = 128)
            .contains("hidden_size is 64 but the target's is 128")
    );
    assert!(message(&|target| target.vocab_size = 4).contains("mask_token_id is 4"));
}
