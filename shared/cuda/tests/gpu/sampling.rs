//! The device chooses the tokens that `treespec_sampling::sample` chooses.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

mod batch;

use batch::{Batch, GROUP, PATH, POISON, Uploaded, random_mask, random_request, tokens_of};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::{
    CudaError, Device, DeviceBuffer, Graph, HeadLogits, KernelSource, Launch, SampledRows,
};
use treespec_sampling::{LogitBias, Processors, gumbel, gumbel_of_word, mass};

const NOISE: KernelSource = KernelSource {
    name: "noise_test.cu",
    text: concat!(
        include_str!("../../src/kernels/noise.cuh"),
        r#"
extern "C" __global__ void noise_test(const u32* draws, const u32* xs, u32 count, u32* drawn, u32* by_word, u64* masses) {
    pdl_launch();
    pdl_wait();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u32 words[4];
    random_words(draws[4 * i], draws[4 * i + 1], draws[4 * i + 2], draws[4 * i + 3] >> 2, words);
    u32 j = draws[4 * i + 3] & 3;
    drawn[i] = __float_as_uint(gumbel_of_word(j == 0 ? words[0] : j == 1 ? words[1] : j == 2 ? words[2] : words[3]));
    by_word[i] = __float_as_uint(gumbel_of_word(draws[4 * i]));
    masses[i] = mass(__uint_as_float(xs[i]));
}
"#
    ),
};

#[test]
fn noise_and_masses_have_the_bits_of_the_cpu() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut rng = StdRng::seed_from_u64(5);
    let count = 1 << 20;
    let mut draws: Vec<u32> = (0..4 * count).map(|_| rng.random()).collect();
    // Both ends and the middle of the range, where the formula changes.
    for i in 0..1000 {
        draws[4 * i] = i as u32;
        draws[4 * (i + 1000)] = u32::MAX - i as u32;
        draws[4 * (i + 2000)] = (1 << 31) - 500 + i as u32;
    }
    let mut xs: Vec<f32> = (0..count).map(|_| -rng.random::<f32>() * 33.0).collect();
    xs[..4].copy_from_slice(&[0.0, -0.0, f32::NEG_INFINITY, f32::NAN]);
    let x_bits: Vec<u32> = xs.iter().map(|x| x.to_bits()).collect();
    let inputs = DeviceBuffer::from_slice(&device, &draws).unwrap();
    let x_buffer = DeviceBuffer::from_slice(&device, &x_bits).unwrap();
    let drawn = DeviceBuffer::<u32>::zeroed(&device, count).unwrap();
    let by_word = DeviceBuffer::<u32>::zeroed(&device, count).unwrap();
    let masses = DeviceBuffer::<u64>::zeroed(&device, count).unwrap();
    let module = device.module(&NOISE, &[]).unwrap();
    let function = module.function("noise_test").unwrap();
    Launch::new(&function)
        .grid(count / 256, 1, 1)
        .block(256)
        .arg(inputs.ptr())
        .arg(x_buffer.ptr())
        .arg(count as u32)
        .arg(drawn.ptr())
        .arg(by_word.ptr())
        .arg(masses.ptr())
        .run(&device)
        .unwrap();
    let (drawn, by_word, masses) = (
        drawn.read().unwrap(),
        by_word.read().unwrap(),
        masses.read().unwrap(),
    );
    for i in 0..count {
        let draw = &draws[4 * i..4 * i + 4];
        let seed = u64::from(draw[0]) | u64::from(draw[1]) << 32;
        let expected = gumbel(seed, draw[2], draw[3]).to_bits();
        assert_eq!(drawn[i], expected, "draw {i}: {draw:x?}");
        let expected = gumbel_of_word(draw[0]).to_bits();
        assert_eq!(by_word[i], expected, "word {:x}", draw[0]);
        assert_eq!(masses[i], mass(xs[i]), "mass of {}", xs[i]);
    }
}

fn check(device: &Arc<Device>, batch: &Batch) {
    let sampler = batch.sampler(device);
    let uploaded = Uploaded::new(device, batch);
    sampler.choose(uploaded.rows).unwrap();
    let (got, expected) = (uploaded.chosen(batch), batch.expected());
    for row in 0..batch.rows {
        let request = &batch.requests[batch.sequences[row] as usize];
        assert_eq!(
            got[row],
            expected[row],
            "first bad row {row} of {}, vocabulary {}, groups {}, grammar {}, {:?}",
            batch.rows,
            batch.vocabulary,
            batch.group_max.is_some(),
            batch.grammar[row].is_some(),
            request.rules.params
        );
    }
}

#[test]
fn choices_are_those_of_the_cpu() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut rng = StdRng::seed_from_u64(17);
    for vocabulary in [1, 3, 63, 64, 65, 1000, 8192, 8193, 49_152, 151_936] {
        for groups in [true, false, true] {
            let rows = if vocabulary > 10_000 { 24 } else { 63 };
            check(&device, &Batch::random(&mut rng, vocabulary, rows, groups));
        }
    }
}

#[test]
fn a_choice_does_not_depend_on_other_rows() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut rng = StdRng::seed_from_u64(23);
    let batch = Batch::random(&mut rng, 20_000, 64, true);
    let mut sampler = batch.sampler(&device);
    let uploaded = Uploaded::new(&device, &batch);
    sampler.choose(uploaded.rows).unwrap();
    let together = uploaded.chosen(&batch);
    for row in [0usize, 1, 7, 30, 63] {
        // Alone: the same row of the batch as the only row of logits.
        sampler.set_grammar(0, batch.grammar[row].as_ref()).unwrap();
        sampler.upload().unwrap();
        let batch_row = DeviceBuffer::from_slice(&device, &[row as u32]).unwrap();
        let groups = batch.vocabulary.div_ceil(GROUP);
        let alone = Uploaded::new(&device, &batch);
        let rows = SampledRows {
            rows: 1,
            head: HeadLogits {
                logits: alone.floats[0].offset(row * batch.stride),
                group_max: alone.floats[1].offset(row * groups),
                ..alone.rows.head
            },
            batch_row: batch_row.ptr(),
            ..alone.rows
        };
        sampler.choose(rows).unwrap();
        assert_eq!(alone.choices.read().unwrap()[0], together[row].0, "{row}");
        assert_eq!(alone.choices.read().unwrap()[1], POISON);
    }
}

#[test]
fn a_graph_reads_the_parameters_of_its_replay() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut rng = StdRng::seed_from_u64(29);
    let mut batch = Batch::random(&mut rng, 5000, 10, true);
    let mut sampler = batch.sampler(&device);
    let uploaded = Uploaded::new(&device, &batch);
    let graph = Graph::capture(&device, || sampler.choose(uploaded.rows)).unwrap();
    for replay in 0..12 {
        graph.launch().unwrap();
        device.synchronize().unwrap();
        assert_eq!(
            uploaded.chosen(&batch),
            batch.expected(),
            "replay {replay}, {:?}",
            batch
                .requests
                .iter()
                .map(|r| &r.rules.params)
                .collect::<Vec<_>>()
        );
        // Sequences change places, most of them go on, some make room for others.
        batch.requests.rotate_left(replay % 3);
        for request in &mut batch.requests {
            match rng.random_bool(0.7) {
                true => request.go_on(&tokens_of(&mut rng, batch.vocabulary, replay)),
                false => *request = random_request(&mut rng, batch.vocabulary),
            }
        }
        sampler.set_sequences(&batch.processors()).unwrap();
        for (row, mask) in batch.grammar.iter_mut().enumerate() {
            if rng.random_bool(0.3) {
                *mask = random_mask(&mut rng, batch.vocabulary);
                sampler.set_grammar(row, mask.as_ref()).unwrap();
            }
        }
        sampler.upload().unwrap();
    }
}

#[test]
fn rows_without_a_sequence_get_no_token() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut rng = StdRng::seed_from_u64(31);
    let mut batch = Batch::random(&mut rng, 1000, 8, true);
    // Paths of padding rows may say anything.
    for node in &mut batch.path[2 * PATH..] {
        *node = rng.random();
    }
    batch.path_len[2..].fill(u32::MAX);
    let expected = batch.expected();
    batch.sequences[3] = u32::MAX;
    batch.sequences[4] = 99;
    let sampler = batch.sampler(&device);
    let uploaded = Uploaded::new(&device, &batch);
    sampler.choose(uploaded.rows).unwrap();
    let got = uploaded.chosen(&batch);
    for (row, expected) in expected.into_iter().enumerate() {
        match row {
            3 | 4 => assert_eq!(got[row].0, u32::MAX),
            _ => assert_eq!(got[row], expected, "row {row}"),
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut rng = StdRng::seed_from_u64(37);
    let batch = Batch::random(&mut rng, 100, 4, true);
    let mut sampler = batch.sampler(&device);
    let bias = LogitBias::new((0..33).map(|token| (token, 1.0))).unwrap();
    let processors = Processors {
        bias: &bias,
        ..Processors::new(&batch.requests[0].rules.params)
    };
    let refused = |result: Result<(), CudaError>| {
        assert!(
            matches!(result, Err(CudaError::Unsupported(_))),
            "{result:?}"
        );
    };
    refused(sampler.set_sequences(&[(processors, 0)]));
    refused(sampler.set_sequences(&[(batch.requests[0].processors(), 0); 3]));
    refused(sampler.set_grammar(4, None));
    let uploaded = Uploaded::new(&device, &batch);
    refused(sampler.choose(SampledRows {
        rows: 5,
        ..uploaded.rows
    }));
}
