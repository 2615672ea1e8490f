//! Weights in the formats of files: widened to f32 by bits, and in integers against the plain definition.

use half::bf16;
use proptest::prelude::*;
use treespec_checkpoint::MatrixFormat;

use super::*;
use crate::cpu::kernels::panel::BLOCK;

const BLOCK_FORMATS: [MatrixFormat; 5] = [
    MatrixFormat::Q4_0,
    MatrixFormat::Q4_1,
    MatrixFormat::Q8_0,
    MatrixFormat::Q4_K,
    MatrixFormat::Q6_K,
];

/// Random stored bytes with sane scales.
fn stored(format: MatrixFormat, rows: usize, columns: usize, seed: usize) -> StoredMatrix {
    let width = format.row_bytes(columns).unwrap();
    // Bytes of a block, and the upper bytes of its f16 with a value near 0.01.
    let (block, halves): (usize, &[(usize, u8)]) = match format {
        MatrixFormat::F32 => (4, &[(3, 0x3d)]),
        MatrixFormat::Bf16 => (2, &[(1, 0x3d)]),
        MatrixFormat::Q8_0 => (34, &[(1, 0x21)]),
        MatrixFormat::Q4_0 => (18, &[(1, 0xa1)]),
        MatrixFormat::Q4_1 => (20, &[(1, 0x21), (3, 0xa3)]),
        MatrixFormat::Q4_K => (144, &[(1, 0x11), (3, 0x15)]),
        MatrixFormat::Q6_K => (210, &[(209, 0x11)]),
    };
    let byte = |i: usize| (((i + seed) * 2_654_435_761) >> 7) as u8;
    let mut bytes: Vec<u8> = (0..rows * width).map(byte).collect();
    for block in bytes.chunks_exact_mut(block) {
        halves
            .iter()
            .for_each(|&(place, upper)| block[place] = upper);
    }
    StoredMatrix::new(format, [rows, columns], bytes).unwrap()
}

fn activations(n: usize, seed: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i + seed) as f32 * 0.73).sin() * [0.01, 1.0, 30.0][(i / 40) % 3])
        .collect()
}

#[test]
fn in_f32_they_give_the_bits_of_their_values() {
    let (columns, depth) = (70, 256);
    for format in [MatrixFormat::Bf16].into_iter().chain(BLOCK_FORMATS) {
        let matrix = stored(format, columns, depth, 0);
        let values: Vec<f32> = (0..columns).flat_map(|row| matrix.row_f32(row)).collect();
        let last = matrix.row_f32(columns - 1);
        let own = pack(Precision::F32, Isa::Portable, matrix);
        let widened = packed(&values, depth);
        for isa in Isa::available() {
            for rows in [1, 2, 5, 12, 13, 17] {
                let x = ramp(rows * depth, 3.0);
                assert_eq!(
                    run(isa, 2, &x, rows, &own),
                    run(isa, 1, &x, rows, &widened),
                    "{format:?} {isa:?} {rows}"
                );
            }
        }
        let mut row = vec![0.0; depth];
        own.copy_row(columns - 1, &mut row);
        assert_eq!(row, last, "{format:?}");
    }
}

/// Scales and whole quants of a stored row: of every group its scale, its minimum and its centred values.
fn groups(matrix: &StoredMatrix, row: usize) -> Vec<(f32, f32, Vec<i32>)> {
    use treespec_checkpoint::{Q4_0Block, Q4_1Block, Q4KBlock, Q6KBlock, Q8_0Block};
    let bytes = matrix.row(row);
    let centred =
        |quants: &[u8], centre: i32| quants.iter().map(|&q| i32::from(q) - centre).collect();
    match matrix.format() {
        MatrixFormat::Q4_0 => Q4_0Block::of(bytes)
            .map(|b| (b.scale.to_f32(), 0.0, centred(&b.quants(), 8)))
            .collect(),
        MatrixFormat::Q4_1 => Q4_1Block::of(bytes)
            .map(|b| (b.scale.to_f32(), b.min.to_f32(), centred(&b.quants(), 0)))
            .collect(),
        MatrixFormat::Q8_0 => Q8_0Block::of(bytes)
            .map(|b| (b.scale.to_f32(), 0.0, b.quants.map(i32::from).to_vec()))
            .collect(),
        MatrixFormat::Q4_K => Q4KBlock::of(bytes)
            .flat_map(|b| {
                let groups = b.quants();
                let groups: Vec<_> = groups.chunks(32).map(|quants| centred(quants, 0)).collect();
                groups.into_iter().enumerate().map(move |(g, quants)| {
                    let scale = b.scale.to_f32() * f32::from(b.scales[g]);
                    (scale, -(b.min.to_f32() * f32::from(b.mins[g])), quants)
                })
            })
            .collect(),
        MatrixFormat::Q6_K => Q6KBlock::of(bytes)
            .flat_map(|b| {
                let groups = b.quants();
                let groups: Vec<_> = groups
                    .chunks(16)
                    .map(|quants| centred(quants, 32))
                    .collect();
                groups.into_iter().enumerate().map(move |(g, quants)| {
                    (b.scale.to_f32() * f32::from(b.scales[g]), 0.0, quants)
                })
            })
            .collect(),
        MatrixFormat::F32 | MatrixFormat::Bf16 => unreachable!("no blocks"),
    }
}

/// The definition: activations rounded per block of 32, whole sums, blocks added in ascending order.
fn reference(matrix: &StoredMatrix, column: usize, x: &[f32]) -> f32 {
    let groups = groups(matrix, column);
    let per_block = groups.len() / (x.len() / BLOCK);
    let mut acc = 0.0_f32;
    for (block, x) in x.chunks_exact(BLOCK).enumerate() {
        let largest = x.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let rounded: Vec<i32> = x
            .iter()
            .map(|x| (f64::from(*x) * f64::from(inverse)).round_ties_even() as i32)
            .collect();
        let scale = largest / 127.0;
        let mut start = 0;
        for (weight_scale, min, quants) in &groups[block * per_block..(block + 1) * per_block] {
            let own = &rounded[start..start + quants.len()];
            let sum: i32 = own.iter().zip(quants).map(|(x, q)| x * q).sum();
            acc = (sum as f32 * weight_scale).mul_add(scale, acc);
            if matches!(matrix.format(), MatrixFormat::Q4_1 | MatrixFormat::Q4_K) {
                acc = min.mul_add(scale * own.iter().sum::<i32>() as f32, acc);
            }
            start += quants.len();
        }
    }
    acc
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn in_integers_they_give_the_bits_of_the_definition(
        format in prop::sample::select(&BLOCK_FORMATS[..]),
        columns in 1usize..80,
        blocks in 1usize..6,
        rows in 1usize..30,
        seed in 0usize..10_000,
    ) {
        let depth = match format {
            MatrixFormat::Q4_K | MatrixFormat::Q6_K => MatrixFormat::SUPERBLOCK * blocks.min(2),
            _ => BLOCK * blocks,
        };
        let matrix = stored(format, columns, depth, seed);
        let x = activations(rows * depth, seed);
        let expected: Vec<f32> = x
            .chunks_exact(depth)
            .flat_map(|x| (0..columns).map(|column| reference(&matrix, column, x)).collect::<Vec<_>>())
            .collect();
        let largest = expected.iter().fold(1.0_f32, |m, x| m.max(x.abs()));
        for isa in Isa::available() {
            let own = pack(Precision::Quantised, isa, matrix.clone());
            let out = run(isa, 2, &x, rows, &own);
            if isa == Isa::Portable {
                // Without fused operations: other roundings.
                let close = out.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-5 * largest);
                prop_assert!(close, "{isa:?}");
            } else {
                prop_assert_eq!(out, expected.clone(), "{:?}", isa);
            }
        }
    }
}

#[test]
fn in_bfloat16_they_are_near_the_products_of_rounded_inputs() {
    let (columns, depth, rows) = (70, 75, 21);
    let matrix = stored(MatrixFormat::Bf16, columns, depth, 5);
    let x = activations(rows * depth, 5);
    for isa in Isa::available() {
        let own = pack(Precision::Quantised, isa, matrix.clone());
        let out = run(isa, 2, &x, rows, &own);
        for (i, y) in out.iter().enumerate() {
            let (x, w) = (
                &x[i / columns * depth..][..depth],
                matrix.row_f32(i % columns),
            );
            let products = x.iter().zip(&w).map(|(x, w)| {
                let x = if isa.multiplies_bf16() {
                    bf16::from_f32(*x).to_f32()
                } else {
                    *x
                };
                f64::from(x) * f64::from(*w)
            });
            let (sum, size) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
            assert!((sum - f64::from(*y)).abs() <= 1e-6 * size, "{isa:?} {i}");
        }
        let one = run(isa, 1, &x[3 * depth..4 * depth], 1, &own);
        assert_eq!(one, out[3 * columns..4 * columns], "{isa:?}");
    }
}

#[test]
fn values_that_are_no_numbers_reach_the_output() {
    let depth = 64;
    for format in [MatrixFormat::Q4_0, MatrixFormat::Q4_1, MatrixFormat::Q8_0] {
        for isa in Isa::available() {
            let own = pack(Precision::Quantised, isa, stored(format, 40, depth, 1));
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = activations(2 * depth, 1);
                x[depth + 40] = bad;
                let out = run(isa, 1, &x, 2, &own);
                assert!(out[..40].iter().all(|y| y.is_finite()), "{isa:?}");
                assert!(out[40..].iter().all(|y| y.is_nan()), "{isa:?} {bad}");
            }
        }
    }
}

#[test]
fn tiny_values_are_zero_and_not_noise() {
    let matrix = stored(MatrixFormat::Q4_1, 40, 64, 1);
    let x: Vec<f32> = (0..64).map(|i| i as f32 * f32::from_bits(1)).collect();
    for isa in Isa::available() {
        let own = pack(Precision::Quantised, isa, matrix.clone());
        assert!(
            run(isa, 1, &x, 1, &own).iter().all(|y| y.abs() < 1e-30),
            "{isa:?}"
        );
    }
}

#[test]
fn parts_of_different_formats_follow_each_other() {
    let depth = 256;
    let formats = [
        MatrixFormat::Q4_K,
        MatrixFormat::Q6_K,
        MatrixFormat::Q6_K,
        MatrixFormat::F32,
    ];
    let matrices: Vec<_> = formats
        .iter()
        .enumerate()
        .map(|(seed, &format)| stored(format, 33, depth, seed))
        .collect();
    let x = activations(3 * depth, 9);
    for isa in Isa::available() {
        let whole = Packer::new(Precision::Quantised, isa)
            .pack_groups(vec![matrices.clone()])
            .unwrap();
        let out = run(isa, 2, &x, 3, &whole);
        for (index, matrix) in matrices.iter().enumerate() {
            let alone = pack(Precision::Quantised, isa, matrix.clone());
            let expected = run(isa, 1, &x, 3, &alone);
            for row in 0..3 {
                let columns = row * 132 + index * 33..row * 132 + (index + 1) * 33;
                assert_eq!(out[columns], expected[row * 33..(row + 1) * 33], "{isa:?}");
            }
            let mut row = vec![0.0; depth];
            whole.copy_row(index * 33 + 32, &mut row);
            assert_eq!(row, matrix.row_f32(32));
        }
    }
}
