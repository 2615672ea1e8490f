//! Linear layers against f64 on the host, for every epilogue, and the rule that a row's bits do not depend on its batch.

mod case;
mod overlap;

use std::collections::HashSet;

use half::bf16;
use treespec_checkpoint::StoredMatrix;
use treespec_cuda::{
    CudaError, DeviceBuffer, DevicePtr, Epilogue, Layout, LinearKernels, LinearTuning,
    PackedLinear, PackedRows, Tap,
};

use case::{BUCKETS, Case, Check, Numbers, SHAPES, Scales, for_all, place, poisoned};

#[test]
fn stored_rows_match_f64() {
    let Some(device) = crate::device() else {
        return;
    };
    let kernels = LinearKernels::load(&device).unwrap();
    let cases = [
        Case::new(576, 576, 1),
        Case::new(200, 120, 2),
        Case::new(83, 80, 3),
        Case::new(40, 40, 4),
    ];
    for_all(&device, Layout::Plain, &cases, |case, linear, x, what| {
        // Rows apart by what is and what is not a multiple of 16 bytes.
        let ld = case.rows + if x.rows == 8 { 4 - case.rows % 4 } else { 3 };
        let out = poisoned::<f32>(&device, x.rows * ld);
        let scales = Scales::new(&device, x.rows, 1 + case.rows / 16, case.depth, 7);
        let scale = (x.rows != 16).then(|| scales.row_scale());
        kernels
            .launch(linear, x, scale, Epilogue::Store { out: out.ptr(), ld })
            .unwrap();
        let out = out.read().unwrap();
        let mut check = Check::new(format!("store {what}"));
        for (n, row) in out.chunks(ld).enumerate() {
            let scale = scale.map_or(1.0, |_| scales.scale[n]);
            for (r, got) in row[..case.rows].iter().enumerate() {
                let at = n * case.rows + r;
                check.near(
                    *got,
                    case.products[at] * scale,
                    case.sizes[at] * scale * 3e-6 + 1e-7,
                    (n, r),
                );
            }
            assert!(
                row[case.rows..].iter().all(|v| v.is_nan()),
                "wrote behind row {n} of {what}"
            );
        }
    });
}

#[test]
fn residual_rows_match_f64() {
    let Some(device) = crate::device() else {
        return;
    };
    let kernels = LinearKernels::load(&device).unwrap();
    let cases = [
        Case::new(576, 320, 11),
        Case::new(200, 120, 12),
        Case::new(80, 80, 13),
        Case::new(40, 40, 14),
    ];
    for_all(&device, Layout::Plain, &cases, |case, linear, x, what| {
        let (rows, width) = (x.rows, case.rows);
        let mut numbers = Numbers(99);
        let before = numbers.values(rows * width);
        let gain = numbers.values(width);
        let stream = DeviceBuffer::from_slice(&device, &before).unwrap();
        let weight = DeviceBuffer::from_slice(&device, &gain).unwrap();
        let next = poisoned::<bf16>(&device, PackedRows::len(rows, width));
        let parts = poisoned::<f32>(&device, rows * linear.parts());
        // The last of three taps; in every other bucket the first.
        let taps = poisoned::<bf16>(&device, PackedRows::len(rows, 3 * width));
        let (offset, k32) = (
            if rows % 32 == 0 { 2 * width } else { 0 },
            (3 * width).div_ceil(32),
        );
        let tap = Tap {
            out: taps.ptr(),
            k32: k32 as u32,
            offset: offset as u32,
        };
        let epilogue = Epilogue::Residual {
            x: stream.ptr(),
            next_weight: weight.ptr(),
            next: PackedRows::new(next.ptr(), width, rows),
            parts: parts.ptr(),
            tap: Some(tap),
        };
        kernels.launch(linear, x, None, epilogue).unwrap();
        let (stream, next) = (stream.read().unwrap(), next.read().unwrap());
        let (parts, taps) = (parts.read().unwrap(), taps.read().unwrap());
        let mut check = Check::new(format!("residual {what}"));
        let part_rows = if linear.shape().panels == 1 { 16 } else { 64 };
        for n in 0..rows {
            let mut squares = vec![0.0f64; linear.parts()];
            for r in 0..width {
                let at = n * width + r;
                let expected = f64::from(before[at]) + case.products[at];
                check.near(stream[at], expected, case.sizes[at] * 3e-6 + 1e-6, (n, r));
                squares[r / part_rows] += expected * expected;
                let rounded = bf16::from_f32(stream[at] * gain[r]);
                assert_eq!(
                    next[place(n, r, width.div_ceil(32), rows)],
                    rounded,
                    "next {n} {r} {what}"
                );
                let tapped = taps[place(n, offset + r, k32, rows)];
                assert_eq!(tapped, bf16::from_f32(stream[at]), "tap {n} {r} {what}");
            }
            for (part, expected) in squares.iter().enumerate() {
                let got = parts[n * linear.parts() + part];
                check.near(got, *expected, expected * 1e-4 + 1e-4, (n, part));
            }
            for k in width..width.next_multiple_of(32) {
                assert_eq!(
                    next[place(n, k, width.div_ceil(32), rows)],
                    bf16::ZERO,
                    "padding {n} {k} {what}"
                );
            }
            // Other taps are left alone; behind the last one there are zeros.
            for k in (0..k32 * 32).filter(|k| !(offset..offset + width).contains(k)) {
                let got = taps[place(n, k, k32, rows)];
                let zero = offset > 0 && k >= 3 * width;
                assert!(
                    if zero {
                        got == bf16::ZERO
                    } else {
                        got.is_nan()
                    },
                    "tap {n} {k} {what}"
                );
            }
        }
    });
}

#[test]
fn swiglu_matches_f64() {
    let Some(device) = crate::device() else {
        return;
    };
    let kernels = LinearKernels::load(&device).unwrap();
    let cases = [
        Case::new(768, 192, 21),
        Case::new(240, 120, 22),
        Case::new(80, 40, 23),
    ];
    for_all(&device, Layout::GateUp, &cases, |case, linear, x, what| {
        let (rows, width) = (x.rows, case.rows / 2);
        let scales = Scales::new(&device, rows, 5, 4, 8);
        let out = poisoned::<bf16>(&device, PackedRows::len(rows, width));
        let epilogue = Epilogue::SwiGlu {
            out: PackedRows::new(out.ptr(), width, rows),
        };
        kernels
            .launch(linear, x, Some(scales.row_scale()), epilogue)
            .unwrap();
        let out = out.read().unwrap();
        let mut check = Check::new(format!("swiglu {what}"));
        for n in 0..rows {
            for j in 0..width.next_multiple_of(32) {
                let got = out[place(n, j, width.div_ceil(32), rows)].to_f32();
                if j >= width {
                    assert_eq!(got, 0.0, "padding {n} {j} {what}");
                    continue;
                }
                let at = n * case.rows + j;
                let gate = case.products[at] * scales.scale[n];
                let up = case.products[at + width] * scales.scale[n];
                let expected = gate / (1.0 + (-gate).exp()) * up;
                let size = (case.sizes[at] + case.sizes[at + width]) * scales.scale[n];
                // Half a unit of bf16, and the rounding of both sums.
                check.near(
                    got,
                    expected,
                    expected.abs() / 250.0 + size * (gate.abs() + up.abs() + 1.0) * 3e-6,
                    (n, j),
                );
            }
        }
    });
}

#[test]
fn head_groups_match_f64() {
    let Some(device) = crate::device() else {
        return;
    };
    let kernels = LinearKernels::load(&device).unwrap();
    let cases = [
        Case::new(1000, 96, 31),
        Case::new(513, 40, 32),
        Case::new(64, 64, 33),
    ];
    for_all(&device, Layout::Head, &cases, |case, linear, x, what| {
        let groups = linear.groups();
        assert_eq!(groups, case.rows.div_ceil(64));
        let ld = groups * 64;
        let scales = Scales::new(&device, x.rows, 3, 8, 9);
        let logits = poisoned::<f32>(&device, x.rows * ld);
        let group_max = poisoned::<f32>(&device, x.rows * groups);
        let group_sum = poisoned::<f32>(&device, x.rows * groups);
        let epilogue = Epilogue::Head {
            logits: logits.ptr(),
            ld,
            group_max: group_max.ptr(),
            group_sum: group_sum.ptr(),
        };
        kernels
            .launch(linear, x, Some(scales.row_scale()), epilogue)
            .unwrap();
        let logits = logits.read().unwrap();
        let (group_max, group_sum) = (group_max.read().unwrap(), group_sum.read().unwrap());
        let mut check = Check::new(format!("head {what}"));
        for n in 0..x.rows {
            for group in 0..groups {
                let of_group = &logits[n * ld + group * 64..][..64];
                let real = &of_group[..(case.rows - group * 64).min(64)];
                for (i, got) in real.iter().enumerate() {
                    let at = n * case.rows + group * 64 + i;
                    let scale = scales.scale[n];
                    check.near(
                        *got,
                        case.products[at] * scale,
                        case.sizes[at] * scale * 3e-6 + 1e-6,
                        (n, i),
                    );
                }
                assert!(
                    of_group[real.len()..]
                        .iter()
                        .all(|v| *v == f32::NEG_INFINITY),
                    "padding {n} {what}"
                );
                let largest = real.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(
                    group_max[n * groups + group],
                    largest,
                    "maximum {n} {group} {what}"
                );
                let sum: f64 = real.iter().map(|v| f64::from(v - largest).exp()).sum();
                check.near(group_sum[n * groups + group], sum, sum * 1e-5, (n, group));
            }
        }
    });
}

#[test]
fn the_bits_of_a_row_do_not_depend_on_its_batch() {
    let Some(device) = crate::device() else {
        return;
    };
    // Every tile that may compute a row, not only those that are chosen.
    let kernels: Vec<_> = [None, Some(4), Some(8)]
        .map(|panels| (panels, None))
        .into_iter()
        .chain([1, 2, 4].map(|panels| (None, Some((panels, 8)))))
        .chain([1, 2, 4].map(|panels| (None, Some((panels, 4)))))
        .chain([1, 2, 4].map(|panels| (None, Some((panels, 2)))))
        .chain([1, 2, 4].map(|panels| (None, Some((panels, 1)))))
        .map(|(panels, direct)| {
            let tuning = LinearTuning {
                panels,
                direct,
                ..LinearTuning::default()
            };
            LinearKernels::load_tuned(&device, tuning).unwrap()
        })
        .collect();
    let case = Case::new(640, 1024, 41);
    for shape in SHAPES {
        let linear = case.linear(&device, Layout::Plain, shape).unwrap();
        let mut known: Vec<Option<(Vec<u32>, Vec<u32>)>> = vec![None; 64];
        let mut seen = HashSet::new();
        let batches = BUCKETS.into_iter().chain([192, 512]);
        let launches = batches.flat_map(|rows| kernels.iter().map(move |k| (rows, k)));
        for (index, (rows, kernels)) in launches.enumerate() {
            // There may be no such tile.
            let Ok(tile) = kernels.describe(&linear, rows) else {
                continue;
            };
            if !seen.insert((rows, tile.clone())) {
                continue;
            }
            // Another place in every batch.
            let order = |n: usize| (n + index * 13) % 64;
            let inputs =
                DeviceBuffer::from_slice(&device, &case.packed_inputs(rows, order)).unwrap();
            let stream =
                DeviceBuffer::from_slice(&device, &vec![0.5f32; rows * case.rows]).unwrap();
            let parts = poisoned::<f32>(&device, rows * linear.parts());
            let epilogue = Epilogue::Residual {
                x: stream.ptr(),
                next_weight: DevicePtr::NULL,
                next: PackedRows::new(DevicePtr::NULL, case.rows, rows),
                parts: parts.ptr(),
                tap: None,
            };
            let x = PackedRows::new(inputs.ptr(), case.depth, rows);
            kernels.launch(&linear, x, None, epilogue).unwrap();
            let bits =
                |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<u32>>();
            let (stream, parts) = (bits(stream.read().unwrap()), bits(parts.read().unwrap()));
            for n in 0..rows {
                let row = stream[n * case.rows..][..case.rows].to_vec();
                let row_parts = parts[n * linear.parts()..][..linear.parts()].to_vec();
                let input = &mut known[order(n)];
                match input {
                    None => *input = Some((row, row_parts)),
                    Some((expected, expected_parts)) => {
                        let first = row.iter().zip(&*expected).position(|(a, b)| a != b);
                        assert_eq!(first, None, "row {n} of {rows} with {shape:?}, {tile}");
                        assert_eq!(
                            row_parts, *expected_parts,
                            "parts of row {n} of {rows} with {shape:?}, {tile}"
                        );
                    }
                }
            }
        }
        assert!(known.iter().all(Option::is_some));
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    let Some(device) = crate::device() else {
        return;
    };
    let kernels = LinearKernels::load(&device).unwrap();
    let case = Case::new(80, 64, 51);
    let linear = case.linear(&device, Layout::Plain, SHAPES[0]).unwrap();
    let memory = DeviceBuffer::<f32>::zeroed(&device, 4096).unwrap();
    let x = PackedRows::new(memory.ptr(), 64, 8);
    let store = |ld| Epilogue::Store {
        out: memory.ptr(),
        ld,
    };
    let head = Epilogue::Head {
        logits: memory.ptr(),
        ld: 128,
        group_max: memory.ptr(),
        group_sum: memory.ptr(),
    };
    let refused = |x, epilogue| {
        let error = kernels.launch(&linear, x, None, epilogue).unwrap_err();
        assert!(matches!(error, CudaError::Unsupported(_)), "{error}");
    };
    refused(x, store(79));
    refused(x, head);
    refused(PackedRows::new(memory.ptr(), 65, 8), store(80));
    refused(PackedRows::new(memory.ptr(), 64, 12), store(80));
    refused(x, Epilogue::SwiGlu { out: x });
    assert!(PackedLinear::pack(&device, &[], Layout::Plain).is_err());
    let odd = StoredMatrix::from_f32(&[0.0; 40 * 8], 8);
    assert!(PackedLinear::pack(&device, &[&odd], Layout::GateUp).is_err());
    kernels.launch(&linear, x, None, store(80)).unwrap();
    device.synchronize().unwrap();
}
