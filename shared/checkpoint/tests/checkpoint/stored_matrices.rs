//! Stored matrices: their values are candle's, bit by bit.

use candle_core::quantized::GgmlDType;
use proptest::prelude::*;
use treespec_checkpoint::{MatrixFormat, Q4_1Block, Q4KBlock, StoredMatrix};

use crate::reference_blocks::{bits, blocks, dequantised};

/// The quantised formats, with candle's names.
const QUANTISED: [(MatrixFormat, GgmlDType); 5] = [
    (MatrixFormat::Q8_0, GgmlDType::Q8_0),
    (MatrixFormat::Q4_0, GgmlDType::Q4_0),
    (MatrixFormat::Q4_1, GgmlDType::Q4_1),
    (MatrixFormat::Q4_K, GgmlDType::Q4K),
    (MatrixFormat::Q6_K, GgmlDType::Q6K),
];

/// A format, and two rows of two blocks each.
fn two_rows() -> impl Strategy<Value = (MatrixFormat, GgmlDType, Vec<u8>)> {
    prop::sample::select(QUANTISED.to_vec())
        .prop_flat_map(|(format, dtype)| (Just(format), Just(dtype), blocks(dtype, 4)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn rows_have_the_values_of_the_reference((format, dtype, bytes) in two_rows()) {
        let columns = 2 * dtype.block_size();
        let expected = dequantised(dtype, &bytes);
        let matrix = StoredMatrix::new(format, [2, columns], bytes).unwrap();
        prop_assert_eq!((matrix.rows(), matrix.columns()), (2, columns));
        for row in 0..2 {
            let values = &expected[row * columns..(row + 1) * columns];
            prop_assert_eq!(bits(&matrix.row_f32(row)), bits(values), "{:?}", format);
        }
    }

    #[test]
    fn fused_operations_give_the_same_values(
        q4_1 in blocks(GgmlDType::Q4_1, 2),
        q4_k in blocks(GgmlDType::Q4K, 2),
    ) {
        for block in Q4_1Block::of(&q4_1) {
            let (scale, min) = (block.scale.to_f32(), block.min.to_f32());
            let fused = block.quants().map(|q| scale.mul_add(f32::from(q), min));
            prop_assert_eq!(bits(&fused), bits(&block.values()));
        }
        for block in Q4KBlock::of(&q4_k) {
            let (scale, min) = (block.scale.to_f32(), block.min.to_f32());
            let quants = block.quants();
            let fused: Vec<f32> = (0..quants.len())
                .map(|i| (i / Q4KBlock::GROUP, f32::from(quants[i])))
                .map(|(group, q)| {
                    let scale = scale * f32::from(block.scales[group]);
                    let min = min * f32::from(block.mins[group]);
                    scale.mul_add(q, -min)
                })
                .collect();
            prop_assert_eq!(bits(&fused), bits(&block.values()));
        }
    }
}

#[test]
fn rows_are_whole_blocks() {
    for (format, dtype) in QUANTISED {
        let block = dtype.block_size();
        assert_eq!(format.row_bytes(3 * block), Some(3 * dtype.type_size()));
        for columns in [1, block - 1, block + 1, block / 2 * 3] {
            assert_eq!(format.row_bytes(columns), None, "{format:?} {columns}");
        }
        let bytes = vec![0; 3 * dtype.type_size()];
        assert!(StoredMatrix::new(format, [3, block], bytes.clone()).is_some());
        assert!(StoredMatrix::new(format, [2, block], bytes.clone()).is_none());
        assert!(StoredMatrix::new(format, [3, 0], bytes).is_none());
    }
    assert_eq!(MatrixFormat::F32.row_bytes(3), Some(12));
    assert_eq!(MatrixFormat::Bf16.row_bytes(3), Some(6));
    assert_eq!(MatrixFormat::F32.row_bytes(usize::MAX), None);
}
