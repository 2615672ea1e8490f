//! Number formats of GGUF tensors: which are kept as stored, and that all have candle's values, bit by bit.

use candle_core::quantized::GgmlDType;
use treespec_checkpoint::{MatrixFormat, TargetCheckpoint};

use crate::gguf_targets::{HEAD, with_hidden_size};
use crate::gguf_writer::{Gguf, Meta};
use crate::reference_blocks::{bits, dequantised, some_blocks};

/// ggml's number of a format, candle's name, and the format of the matrix.
const FORMATS: [(u32, GgmlDType, MatrixFormat); 11] = [
    (1, GgmlDType::F16, MatrixFormat::F32),
    (2, GgmlDType::Q4_0, MatrixFormat::Q4_0),
    (3, GgmlDType::Q4_1, MatrixFormat::Q4_1),
    (6, GgmlDType::Q5_0, MatrixFormat::F32),
    (7, GgmlDType::Q5_1, MatrixFormat::F32),
    (8, GgmlDType::Q8_0, MatrixFormat::Q8_0),
    (10, GgmlDType::Q2K, MatrixFormat::F32),
    (11, GgmlDType::Q3K, MatrixFormat::F32),
    (12, GgmlDType::Q4K, MatrixFormat::Q4_K),
    (13, GgmlDType::Q5K, MatrixFormat::F32),
    (14, GgmlDType::Q6K, MatrixFormat::Q6_K),
];

const HIDDEN: usize = 512;

/// Matrices of [`HIDDEN`] columns: their name in the file, their Hugging Face name, and their rows.
const MATRICES: [(&str, &str, usize); 5] = [
    ("token_embd.weight", "model.embed_tokens.weight", 5),
    (
        "blk.0.attn_q.weight",
        "model.layers.0.self_attn.q_proj.weight",
        4 * HEAD,
    ),
    (
        "blk.0.attn_k.weight",
        "model.layers.0.self_attn.k_proj.weight",
        2 * HEAD,
    ),
    (
        "blk.0.attn_v.weight",
        "model.layers.0.self_attn.v_proj.weight",
        2 * HEAD,
    ),
    (
        "blk.0.ffn_up.weight",
        "model.layers.0.mlp.up_proj.weight",
        48,
    ),
];

/// Bytes of [`HIDDEN`] columns in the format.
fn row_bytes(dtype: GgmlDType) -> usize {
    HIDDEN / dtype.block_size() * dtype.type_size()
}

fn stored_bytes(dtype: GgmlDType, rows: usize) -> Vec<u8> {
    some_blocks(dtype, rows * HIDDEN / dtype.block_size())
}

fn model(architecture: &str, type_id: u32, dtype: GgmlDType) -> Gguf {
    let mut gguf = with_hidden_size(architecture, HIDDEN);
    let head = Meta::U32(HEAD as u32);
    gguf.set(&format!("{architecture}.attention.key_length"), head);
    for (name, _, rows) in MATRICES {
        gguf.store(name, type_id, stored_bytes(dtype, rows));
    }
    gguf
}

/// Where row `row` is in the file, which has the rows of Llama's query and key heads in the order 0, 4, 1, 5, 2, 6, 3, 7.
fn stored_row(architecture: &str, name: &str, row: usize) -> usize {
    if architecture != "llama" || !(name.contains("attn_q") || name.contains("attn_k")) {
        return row;
    }
    row / HEAD * HEAD + [0, 2, 4, 6, 1, 3, 5, 7][row % HEAD]
}

#[test]
fn matrices_of_every_format_have_the_values_of_the_reference() {
    for (type_id, dtype, format) in FORMATS {
        for architecture in ["qwen3", "llama"] {
            let file = model(architecture, type_id, dtype).save();
            let target = TargetCheckpoint::open(file.path()).unwrap();
            assert_eq!(target.is_quantised(), dtype != GgmlDType::F16, "{dtype:?}");
            for (stored, name, rows) in MATRICES {
                let context = format!("{dtype:?} {architecture} {name}");
                let expected = dequantised(dtype, &stored_bytes(dtype, rows));
                let matrix = target.matrix(name, [rows, HIDDEN]).unwrap();
                let values = target.tensor(name, &[rows, HIDDEN]).unwrap();
                assert_eq!(matrix.format(), format, "{context}");
                assert_eq!((matrix.rows(), matrix.columns()), (rows, HIDDEN));
                for row in 0..rows {
                    let start = stored_row(architecture, stored, row) * HIDDEN;
                    let expected = bits(&expected[start..start + HIDDEN]);
                    assert_eq!(bits(&matrix.row_f32(row)), expected, "{context} {row}");
                    let row = row * HIDDEN..(row + 1) * HIDDEN;
                    assert_eq!(bits(&values[row]), expected, "{context}");
                }
            }
        }
    }
}

#[test]
fn stored_formats_keep_their_bytes() {
    for (type_id, dtype, format) in FORMATS {
        if format == MatrixFormat::F32 {
            continue;
        }
        assert_eq!(format.row_bytes(HIDDEN), Some(row_bytes(dtype)));
        let file = model("llama", type_id, dtype).save();
        let target = TargetCheckpoint::open(file.path()).unwrap();
        for (stored, name, rows) in MATRICES {
            let bytes = stored_bytes(dtype, rows);
            let matrix = target.matrix(name, [rows, HIDDEN]).unwrap();
            for row in 0..rows {
                let start = stored_row("llama", stored, row) * row_bytes(dtype);
                let expected = &bytes[start..start + row_bytes(dtype)];
                assert_eq!(matrix.row(row), expected, "{format:?} {name} {row}");
            }
        }
    }
}

#[test]
fn rows_that_are_not_whole_superblocks_are_refused() {
    for (type_id, dtype) in [(12, GgmlDType::Q4K), (14, GgmlDType::Q6K)] {
        // The rows together are whole superblocks, but none is one.
        let mut gguf = with_hidden_size("qwen3", 32);
        gguf.store(
            "blk.0.attn_v.weight",
            type_id,
            some_blocks(dtype, 2 * HEAD * 32 / 256),
        );
        let error = TargetCheckpoint::open(gguf.save().path()).unwrap_err();
        let message = error.to_string();
        let expected = "tensor blk.0.attn_v.weight has the impossible shape [16, 32]";
        assert!(message.contains(expected), "{message}");
    }
}
