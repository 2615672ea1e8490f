//! The malformed inputs of the fixtures end in errors that say what the fixtures ask for.

use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};

use crate::fixtures;

#[test]
fn each_malformed_input_is_named() {
    let cases = fixtures::json(&fixtures::path("malformed/malformed.json"));
    for case in cases["cases"].as_array().unwrap() {
        let model = fixtures::path("malformed").join(case["model"].as_str().unwrap());
        let target = TargetCheckpoint::open(&model);
        let message = match case["drafter"].as_str() {
            None => target.unwrap_err().to_string(),
            Some(drafter) => DrafterCheckpoint::open(&fixtures::path("malformed").join(drafter))
                .and_then(|drafter| drafter.check_target(&target.unwrap().config))
                .unwrap_err()
                .to_string(),
        };
        assert!(!message.contains('\n'), "{message}");
        for word in case["should_mention"].as_array().unwrap() {
            assert!(
                message.contains(word.as_str().unwrap()),
                "{}: {message}",
                case["name"]
            );
        }
    }
}

#[test]
fn messages_say_what_is_wrong() {
    let open = |path: &str| {
        TargetCheckpoint::open(&fixtures::path(path))
            .unwrap_err()
            .to_string()
    };
    let missing = open("malformed/01_missing_tensor/model");
    assert!(
        missing.starts_with("tensor model.layers.1.mlp.up_proj.weight is missing from "),
        "{missing}"
    );
    let truncated = open("malformed/02_truncated_safetensors/model");
    assert!(
        truncated.contains(
            "model.safetensors is truncated: its header describes more bytes of tensor data"
        ),
        "{truncated}"
    );
    let magic = open("malformed/04_gguf_wrong_magic/model.gguf");
    assert!(
        magic.contains("not a GGUF file: the magic is 'GGML', not 'GGUF'"),
        "{magic}"
    );

    let target = TargetCheckpoint::open(&fixtures::path("malformed/_control_ok/model")).unwrap();
    let drafter = DrafterCheckpoint::open(&fixtures::path(
        "malformed/03_drafter_layer_ids_out_of_range/drafter",
    ))
    .unwrap();
    assert_eq!(
        drafter
            .check_target(&target.config)
            .unwrap_err()
            .to_string(),
        "drafter's target_layer_ids contains 6 but the target has only 2 layers (0..1)"
    );
}

#[test]
fn the_control_loads_in_both_formats() {
    let directory = TargetCheckpoint::open(&fixtures::path("malformed/_control_ok/model")).unwrap();
    let gguf = TargetCheckpoint::open(&fixtures::path("malformed/_control_ok/model.gguf")).unwrap();
    let drafter =
        DrafterCheckpoint::open(&fixtures::path("malformed/_control_ok/drafter")).unwrap();
    drafter.check_target(&directory.config).unwrap();
    drafter.check_target(&gguf.config).unwrap();
}
