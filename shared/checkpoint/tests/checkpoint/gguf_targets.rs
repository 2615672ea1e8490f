//! GGUF targets: equal to their Hugging Face twin, names and row order per architecture, what is refused.

use treespec_checkpoint::{Architecture, TargetCheckpoint};

use crate::fixtures;
use crate::gguf_writer::{Gguf, Meta, Tensor, text};

#[test]
fn the_control_equals_its_hugging_face_twin() {
    let gguf = TargetCheckpoint::open(&fixtures::path("malformed/_control_ok/model.gguf")).unwrap();
    let directory = TargetCheckpoint::open(&fixtures::path("malformed/_control_ok/model")).unwrap();
    assert_eq!(gguf.config, directory.config);
    assert_eq!(gguf.total_bytes(), directory.total_bytes());
    for tensor in directory.config.tensors() {
        let ours = gguf.tensor(&tensor.name, &tensor.shape).unwrap();
        let theirs = directory.tensor(&tensor.name, &tensor.shape).unwrap();
        assert_eq!(ours, theirs, "{}", tensor.name);
        assert!(gguf.has_tensor(&tensor.name));
    }
}

const HIDDEN: usize = 32;
pub(crate) const HEAD: usize = 8;

/// A one-layer model of 4 query heads and 2 key heads of 8; every tensor counts up from 0 except the Q8_0 output.
pub(crate) fn tiny(architecture: &str) -> Gguf {
    with_hidden_size(architecture, HIDDEN)
}

/// [`tiny`] with `hidden` columns. The metadata leave the size of a head to `hidden / 4`.
pub(crate) fn with_hidden_size(architecture: &str, hidden: usize) -> Gguf {
    let mut gguf = Gguf::default();
    gguf.set("general.architecture", text(architecture));
    for (key, value) in [
        ("context_length", 64),
        ("embedding_length", hidden as u32),
        ("block_count", 1),
        ("feed_forward_length", 48),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ] {
        gguf.set(&format!("{architecture}.{key}"), Meta::U32(value));
    }
    gguf.set(
        &format!("{architecture}.attention.layer_norm_rms_epsilon"),
        Meta::F32(1e-6),
    );
    gguf.set("tokenizer.ggml.model", text("gpt2"));
    gguf.set("tokenizer.ggml.pre", text("qwen2"));
    let tokens = ["a", "b", "ab", "<|end|>", "<think>"];
    gguf.set(
        "tokenizer.ggml.tokens",
        Meta::Texts(tokens.map(str::to_owned).to_vec()),
    );
    gguf.set("tokenizer.ggml.token_type", Meta::I32s(vec![1, 1, 1, 3, 4]));
    gguf.set("tokenizer.ggml.merges", Meta::Texts(vec!["a b".to_owned()]));
    gguf.set("tokenizer.ggml.eos_token_id", Meta::U32(3));

    let counting = |index: usize| index as f32;
    gguf.f32_tensor("token_embd.weight", &[5, hidden], counting);
    gguf.f32_tensor("output_norm.weight", &[hidden], counting);
    for (name, rows, columns) in [
        ("attn_q", 4 * HEAD, hidden),
        ("attn_k", 2 * HEAD, hidden),
        ("attn_v", 2 * HEAD, hidden),
        ("attn_output", hidden, 4 * HEAD),
        ("ffn_gate", 48, hidden),
        ("ffn_up", 48, hidden),
        ("ffn_down", hidden, 48),
    ] {
        gguf.f32_tensor(&format!("blk.0.{name}.weight"), &[rows, columns], counting);
    }
    gguf.f32_tensor("blk.0.attn_norm.weight", &[hidden], counting);
    gguf.f32_tensor("blk.0.ffn_norm.weight", &[hidden], counting);
    if architecture == "qwen3" {
        gguf.f32_tensor("blk.0.attn_q_norm.weight", &[HEAD], counting);
        gguf.f32_tensor("blk.0.attn_k_norm.weight", &[HEAD], counting);
    }
    gguf
}

fn refusal(gguf: &Gguf) -> String {
    TargetCheckpoint::open(gguf.save().path())
        .unwrap_err()
        .to_string()
}

#[test]
fn only_llama_stores_interleaved_rows() {
    for (architecture, second_row) in [("qwen3", HIDDEN as f32), ("llama", 2.0 * HIDDEN as f32)] {
        let file = tiny(architecture).save();
        let target = TargetCheckpoint::open(file.path()).unwrap();
        assert_eq!(target.config.architecture.name(), architecture);
        assert!(target.config.tie_word_embeddings);
        assert_eq!(
            (target.config.head_dim, target.config.vocab_size),
            (HEAD, 5)
        );
        assert_eq!(target.config.eos_token_ids, [3]);
        for (name, rows) in [("q_proj", 4 * HEAD), ("k_proj", 2 * HEAD)] {
            let name = format!("model.layers.0.self_attn.{name}.weight");
            let values = target.tensor(&name, &[rows, HIDDEN]).unwrap();
            assert_eq!((values[0], values[HIDDEN]), (0.0, second_row));
        }
        let values = target
            .tensor(
                "model.layers.0.self_attn.v_proj.weight",
                &[2 * HEAD, HIDDEN],
            )
            .unwrap();
        assert_eq!(values[HIDDEN], HIDDEN as f32);
        let norms = target.has_tensor("model.layers.0.self_attn.q_norm.weight");
        assert_eq!(norms, target.config.architecture == Architecture::Qwen3);
    }
}

#[test]
fn quantised_blocks_are_converted() {
    // One Q8_0 block a row: scale 0.5 (f16), then 32 signed bytes.
    let mut gguf = tiny("qwen3");
    let mut bytes = Vec::new();
    for row in 0..5i8 {
        bytes.extend(half::f16::from_f32(0.5).to_le_bytes());
        bytes.extend((0..32i8).map(|column| (column - 10 * row) as u8));
    }
    gguf.tensors.push(Tensor {
        name: "output.weight".to_owned(),
        shape: vec![5, HIDDEN],
        type_id: 8,
        bytes,
    });
    let file = gguf.save();
    let target = TargetCheckpoint::open(file.path()).unwrap();
    assert!(!target.config.tie_word_embeddings);
    let head = target.tensor("lm_head.weight", &[5, HIDDEN]).unwrap();
    assert_eq!(
        (head[0], head[31], head[32], head[4 * 32 + 1]),
        (0.0, 15.5, -5.0, -19.5)
    );
}

#[test]
fn unknown_tensors_and_types_are_refused_by_name() {
    let mut biased = tiny("llama");
    biased.f32_tensor("blk.0.attn_q.bias", &[HIDDEN], |_| 0.0);
    assert!(refusal(&biased).contains("tensor blk.0.attn_q.bias does not belong to llama"));

    let mut unknown = tiny("llama");
    unknown.tensors[0].type_id = 23;
    let message = refusal(&unknown);
    assert!(
        message.contains("token_embd.weight") && message.contains("IQ4_XS"),
        "{message}"
    );

    let mut missing = tiny("qwen3");
    missing
        .tensors
        .retain(|tensor| tensor.name != "blk.0.attn_k_norm.weight");
    let message = refusal(&missing);
    assert!(
        message.contains("tensor model.layers.0.self_attn.k_norm.weight is missing"),
        "{message}"
    );
}

#[test]
fn unsupported_metadata_is_named_with_its_value() {
    let cases = [
        (
            "general.architecture",
            text("gemma3"),
            "general.architecture = 'gemma3'",
        ),
        (
            "llama.rope.scaling.type",
            text("yarn"),
            "llama.rope.scaling.type = 'yarn'",
        ),
        (
            "llama.rope.scaling.factor",
            Meta::F32(4.0),
            "llama.rope.scaling.factor = 4",
        ),
        (
            "llama.rope.dimension_count",
            Meta::U32(4),
            "llama.rope.dimension_count = 4",
        ),
        ("llama.expert_count", Meta::U32(8), "llama.expert_count = 8"),
        (
            "llama.attention.head_count_kv",
            Meta::U32(3),
            "llama.attention.head_count_kv is 3",
        ),
        (
            "llama.attention.head_count",
            Meta::U32(0),
            "llama.attention.head_count is 0",
        ),
        (
            "llama.attention.head_count",
            Meta::I32s(vec![4]),
            "llama.attention.head_count is an array of 1",
        ),
        (
            "llama.block_count",
            Meta::U32(u32::MAX),
            "llama.block_count is 4294967295",
        ),
        (
            "tokenizer.ggml.eos_token_id",
            Meta::U32(5),
            "tokenizer.ggml.eos_token_id is 5",
        ),
        ("general.alignment", Meta::U32(0), "general.alignment is 0"),
    ];
    for (key, value, expected) in cases {
        let mut gguf = tiny("llama");
        gguf.set(key, value);
        let message = refusal(&gguf);
        assert!(message.contains(expected), "{message}");
    }
}
