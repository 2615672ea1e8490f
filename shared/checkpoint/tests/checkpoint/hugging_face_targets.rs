//! Hugging Face directories: configuration styles, what is refused, shards.

use std::fs;

use serde_json::{Value, json};
use treespec_checkpoint::{Architecture, CheckpointError, TargetCheckpoint};

use crate::fixtures;

fn refusal(case: &str, edit: impl FnOnce(&mut Value)) -> String {
    let directory = fixtures::edited(&fixtures::model(case), "config.json", edit);
    TargetCheckpoint::open(directory.path())
        .unwrap_err()
        .to_string()
}

#[test]
fn both_configuration_styles_are_read() {
    let llama = TargetCheckpoint::open(&fixtures::model("01_llama_gqa_tied"))
        .unwrap()
        .config;
    assert_eq!(llama.architecture, Architecture::Llama);
    assert_eq!(
        (
            llama.num_layers,
            llama.num_heads,
            llama.num_kv_heads,
            llama.head_dim
        ),
        (5, 4, 2, 16)
    );
    assert_eq!((llama.rope_theta, llama.rms_norm_eps), (50_000.0, 1e-5));
    assert_eq!(
        (llama.bos_token_id, llama.eos_token_ids),
        (Some(0), vec![1])
    );
    assert!(llama.tie_word_embeddings);

    let qwen = TargetCheckpoint::open(&fixtures::model("03_qwen3_headdim"))
        .unwrap()
        .config;
    assert_eq!(qwen.architecture, Architecture::Qwen3);
    assert_eq!(
        (
            qwen.hidden_size,
            qwen.num_heads,
            qwen.num_kv_heads,
            qwen.head_dim
        ),
        (80, 3, 1, 40)
    );
    assert_eq!((qwen.rope_theta, qwen.vocab_size), (1_000_000.0, 832));
    assert_eq!(
        (qwen.bos_token_id, qwen.eos_token_ids),
        (None, vec![798, 796])
    );
}

#[test]
fn head_dim_defaults_to_hidden_over_heads() {
    let directory = fixtures::edited(
        &fixtures::model("01_llama_gqa_tied"),
        "config.json",
        |config| {
            config.as_object_mut().unwrap().remove("head_dim");
        },
    );
    assert_eq!(
        TargetCheckpoint::open(directory.path())
            .unwrap()
            .config
            .head_dim,
        16
    );
}

#[test]
fn unsupported_computations_are_named_with_their_value() {
    let cases: [(&str, Value, &str); 9] = [
        ("attention_bias", json!(true), "attention_bias = true"),
        ("mlp_bias", json!(true), "mlp_bias = true"),
        ("hidden_act", json!("gelu"), "hidden_act = 'gelu'"),
        ("model_type", json!("mistral"), "model_type = 'mistral'"),
        (
            "use_sliding_window",
            json!(true),
            "use_sliding_window = true",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0}),
            "rope_scaling.rope_type = 'llama3'",
        ),
        (
            "rope_scaling",
            json!({"factor": 8.0}),
            "rope_scaling = {\"factor\":8.0}",
        ),
        (
            "partial_rotary_factor",
            json!(0.5),
            "partial_rotary_factor = 0.5",
        ),
        (
            "quantization_config",
            json!({"bits": 4}),
            "quantization_config = {\"bits\":4}",
        ),
    ];
    for (field, value, expected) in cases {
        let message = refusal("01_llama_gqa_tied", |config| config[field] = value);
        assert!(message.contains(expected), "{message}");
    }
    let message = refusal("03_qwen3_headdim", |config| {
        config["layer_types"][2] = json!("sliding_attention")
    });
    assert!(
        message.contains("layer_types[2] = 'sliding_attention'"),
        "{message}"
    );
    let hybrid = TargetCheckpoint::open(&fixtures::model("05_qwen35_hybrid"))
        .unwrap_err()
        .to_string();
    assert!(hybrid.contains("model_type = 'qwen3_5_text'"), "{hybrid}");
}

#[test]
fn absurd_numbers_are_refused() {
    let cases: [(&str, Value); 13] = [
        ("num_attention_heads", json!(0)),
        ("num_key_value_heads", json!(0)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(15)),
        ("hidden_size", json!(1u64 << 60)),
        ("num_hidden_layers", json!(4_000_000_000u64)),
        ("num_hidden_layers", json!(-1)),
        ("vocab_size", json!("560")),
        ("vocab_size", json!(560.5)),
        ("rms_norm_eps", json!(0.0)),
        ("rope_theta", json!(-5)),
        ("eos_token_id", json!(560)),
        ("max_position_embeddings", json!(0)),
    ];
    for (field, value) in cases {
        let message = refusal("01_llama_gqa_tied", |config| config[field] = value.clone());
        assert!(
            message.contains(&format!("{field} is {value}, expected")),
            "{message}"
        );
    }
    let missing = refusal("01_llama_gqa_tied", |config| {
        config["hidden_size"] = Value::Null
    });
    assert!(
        missing.ends_with("config.json: field hidden_size is missing"),
        "{missing}"
    );
}

#[test]
fn tensors_are_checked_by_name_and_shape() {
    let target = TargetCheckpoint::open(&fixtures::model("01_llama_gqa_tied")).unwrap();
    assert_eq!(target.tensor("model.norm.weight", &[64]).unwrap().len(), 64);
    assert!(target.has_tensor("model.embed_tokens.weight"));
    assert!(!target.has_tensor("lm_head.weight"));
    let message = target
        .tensor("model.norm.weight", &[65])
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("model.norm.weight")
            && message.contains("[64]")
            && message.contains("[65]"),
        "{message}"
    );
    let missing = target.tensor("model.nothing", &[1]);
    assert!(
        matches!(missing, Err(CheckpointError::MissingTensor { .. })),
        "{missing:?}"
    );
    let misshapen = refusal("01_llama_gqa_tied", |config| {
        config["intermediate_size"] = json!(145)
    });
    assert!(
        misshapen.contains("model.layers.0.mlp.gate_proj.weight"),
        "{misshapen}"
    );
}

/// Writes a safetensors file with `tensors` of zeros: (name, dtype, shape, bytes).
fn write_safetensors(path: &std::path::Path, tensors: &[(&str, &str, &[usize], &[u8])]) {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(
            (*name).to_owned(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}),
        );
        data.extend_from_slice(bytes);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    fs::write(path, file).unwrap();
}

/// Moves model.norm.weight of a copied case into a file of its own, stored as `dtype`.
fn with_separate_norm(dtype: &str, bytes: &[u8]) -> tempfile::TempDir {
    let source = fixtures::model("01_llama_gqa_tied");
    let directory = fixtures::copied(&source);
    let whole = fs::read(source.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&whole).unwrap();
    let rest: Vec<_> = stored
        .tensors()
        .into_iter()
        .filter(|(name, _)| name != "model.norm.weight")
        .collect();
    let rest: Vec<_> = rest
        .iter()
        .map(|(name, view)| (name.as_str(), "F32", view.shape(), view.data()))
        .collect();
    fs::remove_file(directory.path().join("model.safetensors")).unwrap();
    write_safetensors(&directory.path().join("a.safetensors"), &rest);
    write_safetensors(
        &directory.path().join("b.safetensors"),
        &[("model.norm.weight", dtype, &[64], bytes)],
    );
    directory
}

#[test]
fn shards_are_found_with_and_without_an_index() {
    let bf16: Vec<u8> = (0..64)
        .flat_map(|_| half::bf16::from_f32(1.5).to_le_bytes())
        .collect();
    let directory = with_separate_norm("BF16", &bf16);
    let target = TargetCheckpoint::open(directory.path()).unwrap();
    assert_eq!(
        target.tensor("model.norm.weight", &[64]).unwrap(),
        vec![1.5; 64]
    );

    let index = |files: Value| {
        let index = json!({"metadata": {}, "weight_map": files});
        fs::write(
            directory.path().join("model.safetensors.index.json"),
            index.to_string(),
        )
        .unwrap();
        TargetCheckpoint::open(directory.path())
    };
    index(
        json!({"model.norm.weight": "b.safetensors", "model.embed_tokens.weight": "a.safetensors"}),
    )
    .unwrap();
    let wrong = index(json!({"model.norm.weight": "a.safetensors"}))
        .unwrap_err()
        .to_string();
    assert!(
        wrong.contains("tensor model.norm.weight is missing from")
            && wrong.contains("a.safetensors"),
        "{wrong}"
    );
    let absent = index(json!({"model.norm.weight": "c.safetensors"}))
        .unwrap_err()
        .to_string();
    assert!(absent.contains("c.safetensors"), "{absent}");
    let outside = index(json!({"model.norm.weight": "../b.safetensors"}))
        .unwrap_err()
        .to_string();
    assert!(
        outside.contains("weight_map is \"../b.safetensors\""),
        "{outside}"
    );
}

#[test]
fn other_number_formats_are_named() {
    let directory = with_separate_norm("I32", &[0; 256]);
    let message = TargetCheckpoint::open(directory.path())
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("model.norm.weight") && message.contains("I32"),
        "{message}"
    );
}

#[test]
fn missing_files_are_named() {
    let source = fixtures::model("01_llama_gqa_tied");
    for name in ["config.json", "model.safetensors"] {
        let directory = fixtures::copied(&source);
        fs::remove_file(directory.path().join(name)).unwrap();
        let error = TargetCheckpoint::open(directory.path()).unwrap_err();
        assert!(
            matches!(error, CheckpointError::NotFound { .. }) && error.to_string().contains(name),
            "{error}"
        );
    }
    let error = TargetCheckpoint::open(&source.join("nowhere")).unwrap_err();
    assert!(matches!(error, CheckpointError::NotFound { .. }), "{error}");
}
