//! Quantisation to Q8_0: candle's bytes, and how far values move.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::bf16;
use proptest::prelude::*;
use treespec_checkpoint::{MatrixFormat, Q8_0Block, StoredMatrix};

const BLOCK: usize = MatrixFormat::BLOCK;

/// Two blocks of values, each with a magnitude of its own from below what f16 resolves to about the largest possible.
fn row() -> impl Strategy<Value = Vec<f32>> {
    let block =
        (-40..=22i32, prop::collection::vec(-1.0..1.0f32, BLOCK)).prop_map(|(exponent, block)| {
            let unit = 2f32.powi(exponent);
            block.iter().map(|value| value * unit).collect::<Vec<f32>>()
        });
    prop::collection::vec(block, 2).prop_map(|blocks| blocks.concat())
}

fn candle_bytes(values: &[f32]) -> Vec<u8> {
    Tensor::new(values, &Device::Cpu)
        .and_then(|tensor| QTensor::quantize(&tensor, GgmlDType::Q8_0))
        .and_then(|tensor| Ok(tensor.data()?.into_owned()))
        .unwrap()
}

fn largest(values: &[f32]) -> f64 {
    values.iter().fold(0.0, |largest: f64, &value| {
        largest.max(f64::from(value).abs())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn rows_are_quantised_as_by_the_reference(rows in prop::collection::vec(row(), 1..4)) {
        let matrix = StoredMatrix::from_f32(&rows.concat(), 2 * BLOCK);
        let quantised = matrix.quantised_q8_0().unwrap();
        prop_assert_eq!(quantised.format(), MatrixFormat::Q8_0);
        prop_assert_eq!((quantised.rows(), quantised.columns()), (rows.len(), 2 * BLOCK));
        for (i, row) in rows.iter().enumerate() {
            prop_assert_eq!(quantised.row(i), candle_bytes(row));
        }
    }

    #[test]
    fn a_value_moves_by_half_a_step_and_the_rounding_of_the_step(row in row()) {
        let quantised = StoredMatrix::from_f32(&row, row.len()).quantised_q8_0().unwrap();
        for (before, after) in row.chunks(BLOCK).zip(quantised.row_f32(0).chunks(BLOCK)) {
            let step = largest(before) / 127.0;
            let rounding = (step * 2f64.powi(-11)).max(2f64.powi(-25));
            // The quotient is rounded to f32 before it is rounded to a whole number.
            let bound = step * (0.5 + 1e-4) + 127.0 * rounding;
            for (&before, &after) in before.iter().zip(after) {
                let error = (f64::from(before) - f64::from(after)).abs();
                prop_assert!(error <= bound, "{before} -> {after}: {error} > {bound}");
            }
        }
    }

    #[test]
    fn bf16_values_are_quantised_like_their_f32(row in row()) {
        let narrow: Vec<bf16> = row.iter().map(|&value| bf16::from_f32(value)).collect();
        let wide: Vec<f32> = narrow.iter().map(|value| value.to_f32()).collect();
        let bytes = narrow.iter().flat_map(|value| value.to_le_bytes()).collect();
        let narrow = StoredMatrix::new(MatrixFormat::Bf16, [1, row.len()], bytes).unwrap();
        let wide = StoredMatrix::from_f32(&wide, row.len());
        prop_assert_eq!(narrow.quantised_q8_0(), wide.quantised_q8_0());
    }

    #[test]
    fn any_bits_are_quantised_in_range_or_refused(
        bits in prop::collection::vec(any::<u32>(), BLOCK),
        exponents in any::<u8>(),
    ) {
        // Random exponents are nearly always too large for a whole block.
        let mask = u32::from(exponents) << 23 | 0x807f_ffff;
        let values: Vec<f32> = bits.into_iter().map(|bits| f32::from_bits(bits & mask)).collect();
        let matrix = StoredMatrix::from_f32(&values, BLOCK);
        match matrix.quantised_q8_0() {
            Some(quantised) => {
                let block = Q8_0Block::of(quantised.row(0)).next().unwrap();
                prop_assert!(block.scale.is_finite() && !block.quants.contains(&i8::MIN));
            }
            None => prop_assert!(values.iter().any(|value| value.is_nan() || value.abs() > 8.3e6)),
        }
    }
}

#[test]
fn halves_are_rounded_away_from_zero() {
    let mut values = [0.0; BLOCK];
    values[..5].copy_from_slice(&[127.0, 2.5, -2.5, 0.5, -1.4]);
    let matrix = StoredMatrix::from_f32(&values, BLOCK);
    let quantised = matrix.quantised_q8_0().unwrap();
    let block = Q8_0Block::of(quantised.row(0)).next().unwrap();
    assert_eq!(block.scale.to_f32(), 1.0);
    assert_eq!(block.quants[..6], [127, 3, -3, 1, -1, 0]);
}

#[test]
fn zeros_and_magnitudes_below_f16_become_zeros() {
    // The last one has a scale whose inverse is infinite.
    for magnitude in [0.0, -0.0, 1e-8, f32::from_bits(200)] {
        let mut values = [magnitude; BLOCK];
        values[1] = -magnitude;
        values[2] = 0.0;
        let matrix = StoredMatrix::from_f32(&values, BLOCK);
        let quantised = matrix.quantised_q8_0().unwrap();
        assert_eq!(quantised.row_f32(0), [0.0; BLOCK], "{magnitude}");
        let block = Q8_0Block::of(quantised.row(0)).next().unwrap();
        assert!(!block.quants.contains(&i8::MIN), "{magnitude}");
    }
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let with_last = |columns: usize, last: f32| {
        let mut values = vec![1.0; 2 * columns];
        values[2 * columns - 1] = last;
        StoredMatrix::from_f32(&values, columns).quantised_q8_0()
    };
    assert!(with_last(2 * BLOCK, 8.3e6).is_some());
    for last in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -8.4e6] {
        assert_eq!(with_last(2 * BLOCK, last), None, "{last}");
    }
    for columns in [1, BLOCK - 1, BLOCK + BLOCK / 2] {
        assert_eq!(with_last(columns, 1.0), None, "{columns} columns");
    }
    let quantised = with_last(BLOCK, 1.0).unwrap();
    assert_eq!(quantised.quantised_q8_0(), None);
}
