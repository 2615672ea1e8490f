use super::super::packed::Packer;
use super::*;
use crate::Precision;
use treespec_checkpoint::StoredMatrix;

mod stored;

fn ramp(n: usize, scale: f32) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 2_654_435_761) % 1_000) as f32 / 1_000.0 * scale - scale / 2.0)
        .collect()
}

fn pack(precision: Precision, isa: Isa, matrix: StoredMatrix) -> PackedLinear {
    Packer::new(precision, isa).pack(matrix).unwrap()
}

fn packed(weights: &[f32], depth: usize) -> PackedLinear {
    let matrix = StoredMatrix::from_f32(weights, depth);
    pack(Precision::F32, Isa::Portable, matrix)
}

fn multiply(
    isa: Isa,
    threads: usize,
    x: &[f32],
    w: &PackedLinear,
    out: &mut [f32],
    epilogue: Epilogue,
) {
    let mut pool = ThreadPool::new(threads).unwrap();
    let mut scratch = InputScratch::default();
    let input = scratch.encode(&mut pool, isa, x, x.len() / w.depth(), w);
    linear(&mut pool, isa, &input, w, out, epilogue);
}

fn run(isa: Isa, threads: usize, x: &[f32], rows: usize, w: &PackedLinear) -> Vec<f32> {
    let mut out = vec![0.0; rows * w.columns()];
    multiply(isa, threads, x, w, &mut out, Epilogue::Store);
    out
}

#[test]
fn equals_the_definition_on_every_instruction_set() {
    let (columns, depth, rows) = (70, 45, 13);
    let (w, x) = (ramp(columns * depth, 2.0), ramp(rows * depth, 3.0));
    let packed = packed(&w, depth);
    for isa in Isa::available() {
        let out = run(isa, 2, &x, rows, &packed);
        for (i, y) in out.iter().enumerate() {
            let (r, c) = (i / columns, i % columns);
            let exact: f64 = (0..depth)
                .map(|k| f64::from(x[r * depth + k]) * f64::from(w[c * depth + k]))
                .sum();
            assert!((exact - f64::from(*y)).abs() < 1e-4, "{isa:?} {r} {c}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch() {
    let (columns, depth) = (96, 64);
    let packed = packed(&ramp(columns * depth, 2.0), depth);
    let x = ramp(300 * depth, 3.0);
    for isa in Isa::available() {
        let all = run(isa, 2, &x, 300, &packed);
        for rows in [1, 2, 5, 17, 65] {
            assert_eq!(
                run(isa, 1, &x[..rows * depth], rows, &packed),
                all[..rows * columns]
            );
        }
    }
}

#[test]
fn fused_instruction_sets_give_the_same_bits() {
    let packed = packed(&ramp(64 * 100, 2.0), 100);
    let x = ramp(7 * 100, 3.0);
    let fused: Vec<_> = Isa::available()
        .filter(|isa| *isa != Isa::Portable || cfg!(target_arch = "aarch64"))
        .map(|isa| run(isa, 1, &x, 7, &packed))
        .collect();
    assert!(fused.windows(2).all(|w| w[0] == w[1]));
}

#[test]
fn swiglu_and_residual_epilogues() {
    let (half, depth, rows) = (21, 10, 3);
    let (gate, up, x) = (
        ramp(half * depth, 2.0),
        ramp(half * depth, 1.0),
        ramp(rows * depth, 2.0),
    );
    let gate_up = Packer::new(Precision::F32, Isa::Portable)
        .pack_gate_up(
            StoredMatrix::from_f32(&gate, depth),
            StoredMatrix::from_f32(&up, depth),
        )
        .unwrap();
    let dot = |w: &[f32], r: usize, c: usize| -> f32 {
        (0..depth)
            .map(|k| x[r * depth + k] * w[c * depth + k])
            .sum()
    };
    for isa in Isa::available() {
        let mut out = vec![0.0; rows * half];
        multiply(isa, 2, &x, &gate_up, &mut out, Epilogue::SwiGlu);
        for (i, y) in out.iter().enumerate() {
            let (g, u) = (dot(&gate, i / half, i % half), dot(&up, i / half, i % half));
            assert!((g / (1.0 + (-g).exp()) * u - y).abs() < 1e-5, "{isa:?}");
        }
        let plain = packed(&gate, depth);
        let mut out = vec![1.0; rows * half];
        multiply(isa, 2, &x, &plain, &mut out, Epilogue::AddTo);
        assert!((out[half] - 1.0 - dot(&gate, 1, 0)).abs() < 1e-5);
    }
}

#[test]
fn copies_the_original_row() {
    let w = ramp(50 * 7, 2.0);
    let packed = packed(&w, 7);
    let mut row = [0.0; 7];
    packed.copy_row(41, &mut row);
    assert_eq!(row, w[41 * 7..42 * 7]);
}
