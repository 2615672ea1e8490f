//! Widening of little-endian stored floats to f32. All conversions are exact.

/// `bytes` as little-endian f32; a trailing partial value is ignored.
pub(crate) fn from_f32(bytes: &[u8]) -> Vec<f32> {
    widen(bytes, f32::from_le_bytes)
}

/// `bytes` as little-endian IEEE half precision.
pub(crate) fn from_f16(bytes: &[u8]) -> Vec<f32> {
    widen(bytes, |value| half::f16::from_le_bytes(value).to_f32())
}

/// `bytes` as little-endian bfloat16.
pub(crate) fn from_bf16(bytes: &[u8]) -> Vec<f32> {
    widen(bytes, |value| half::bf16::from_le_bytes(value).to_f32())
}

fn widen<const WIDTH: usize>(bytes: &[u8], convert: impl Fn([u8; WIDTH]) -> f32) -> Vec<f32> {
    let (values, _) = bytes.as_chunks::<WIDTH>();
    values.iter().map(|&value| convert(value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stored_width_is_widened_exactly() {
        let values = [0.0f32, -1.5, 0.15625, 65504.0, f32::INFINITY];
        let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let f16s: Vec<u8> = values
            .iter()
            .flat_map(|&v| half::f16::from_f32(v).to_le_bytes())
            .collect();
        assert_eq!(from_f32(&f32s), values);
        assert_eq!(from_f16(&f16s), values);
        let bf16s: Vec<u8> = values[..3]
            .iter()
            .flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())
            .collect();
        assert_eq!(from_bf16(&bf16s), values[..3]);
    }
}
