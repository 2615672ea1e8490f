//! Blocks of ggml's number formats with arbitrary contents, and what candle makes of them.

use candle_core::quantized::{GgmlDType, ggml_file};
use candle_core::{Device, Tensor};
use proptest::prelude::*;

/// Where the f16 numbers of a block are.
fn scale_positions(dtype: GgmlDType) -> &'static [usize] {
    match dtype {
        GgmlDType::F16 => &[0],
        GgmlDType::Q8_0 | GgmlDType::Q4_0 | GgmlDType::Q5_0 => &[0],
        GgmlDType::Q4_1 | GgmlDType::Q5_1 | GgmlDType::Q4K | GgmlDType::Q5K => &[0, 2],
        GgmlDType::Q2K => &[80, 82],
        GgmlDType::Q3K => &[108],
        GgmlDType::Q6K => &[208],
        other => panic!("no blocks of {other:?} are made"),
    }
}

/// Makes the f16 number at `position` finite: a power of two below the non-finite number with the same bits.
fn make_finite(block: &mut [u8], position: usize) {
    let bits = u16::from_le_bytes([block[position], block[position + 1]]);
    if !half::f16::from_bits(bits).is_finite() {
        block[position..position + 2].copy_from_slice(&(bits ^ 0x0400).to_le_bytes());
    }
}

/// Whole blocks of random bytes whose scales are finite, often zero or subnormal, of either sign.
pub(crate) fn blocks(dtype: GgmlDType, count: usize) -> impl Strategy<Value = Vec<u8>> {
    let scale = prop_oneof![
        4 => any::<u16>(),
        1 => prop::sample::select(vec![0u16, 0x8000, 1, 0x8001, 0x03ff, 0x83ff, 0x7bff, 0xfbff]),
    ];
    let block = (
        prop::collection::vec(any::<u8>(), dtype.type_size()),
        prop::collection::vec(scale, scale_positions(dtype).len()),
    )
        .prop_map(move |(mut block, scales)| {
            for (&position, bits) in scale_positions(dtype).iter().zip(scales) {
                block[position..position + 2].copy_from_slice(&bits.to_le_bytes());
                make_finite(&mut block, position);
            }
            block
        });
    prop::collection::vec(block, count).prop_map(|blocks| blocks.concat())
}

/// Whole blocks of some bytes, the same every time, whose scales are finite.
pub(crate) fn some_blocks(dtype: GgmlDType, count: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..(count * dtype.type_size()) as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).rotate_left(15) ^ i).wrapping_mul(0x9e37_79b1))
        .map(|hash| (hash >> 24) as u8)
        .collect();
    for block in bytes.chunks_exact_mut(dtype.type_size()) {
        for &position in scale_positions(dtype) {
            make_finite(block, position);
        }
    }
    bytes
}

/// The values of whole blocks.
pub(crate) fn dequantised(dtype: GgmlDType, bytes: &[u8]) -> Vec<f32> {
    let elements = bytes.len() / dtype.type_size() * dtype.block_size();
    // candle reads through a pointer to its block type.
    assert_eq!(bytes.as_ptr().align_offset(4), 0);
    ggml_file::qtensor_from_ggml(dtype, bytes, vec![elements], &Device::Cpu)
        .and_then(|tensor| tensor.dequantize(&Device::Cpu))
        .and_then(|tensor: Tensor| tensor.to_vec1())
        .unwrap()
}

/// Bits, which tell the zeros apart.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
