//! Number formats of GGUF tensors.

use candle_core::Device;
use candle_core::quantized::{GgmlDType, ggml_file};

/// The format with the number `id`, when its values can be converted to f32.
pub(super) fn from_id(id: u32) -> Option<GgmlDType> {
    Some(match id {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}

/// ggml's name of a format that [`from_id`] does not know, for messages.
pub(super) fn name_of_unsupported(id: u32) -> String {
    let name = match id {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        other => return format!("ggml type {other}"),
    };
    name.to_owned()
}

/// Bytes of `elements` values, `None` when they are not whole blocks or the size overflows.
pub(super) fn stored_len(dtype: GgmlDType, elements: usize) -> Option<usize> {
    let blocks = elements / dtype.block_size();
    elements
        .is_multiple_of(dtype.block_size())
        .then_some(blocks)?
        .checked_mul(dtype.type_size())
}

/// Converts whole blocks to f32, in pieces: candle copies its input twice, and an embedding can be gigabytes.
///
/// `bytes` must be a whole number of blocks; a trailing part of one is ignored.
pub(super) fn dequantize(dtype: GgmlDType, bytes: &[u8]) -> candle_core::Result<Vec<f32>> {
    const BLOCKS_PER_PIECE: usize = 1 << 14;
    // candle reads the bytes through a pointer to its block type, which is aligned to four bytes at most.
    if bytes.as_ptr().align_offset(4) != 0 {
        candle_core::bail!("the tensor data is not aligned");
    }
    let blocks = bytes.len() / dtype.type_size();
    let mut values = Vec::with_capacity(blocks * dtype.block_size());
    for piece in bytes.chunks(BLOCKS_PER_PIECE * dtype.type_size()) {
        let elements = piece.len() / dtype.type_size() * dtype.block_size();
        let tensor = ggml_file::qtensor_from_ggml(dtype, piece, vec![elements], &Device::Cpu)?;
        values.extend(tensor.dequantize(&Device::Cpu)?.to_vec1::<f32>()?);
    }
    Ok(values)
}
