//! The head's selection against a full sort.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::{
    Device, DeviceBuffer, DevicePtr, HeadLogits, HeadSelectKernels, HeadTopBuffers,
};

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Sums of uniform numbers: nearly normal, spread like logits.
    Spread,
    /// All the same.
    Equal,
    /// Five values.
    Coarse,
    /// Every group is of one value.
    Groups,
    /// Falls with the id: all of the best are in the first groups.
    Falling,
    /// The best of every group are equal.
    EqualMaxima,
    /// Zeros of both signs.
    Zeros,
    /// Some NaN, some negative infinity.
    Holes,
    /// Five numbers, the rest NaN or negative infinity.
    Few,
    /// No number at all.
    Nothing,
    /// Some positive infinity.
    Infinite,
}

const KINDS: [Kind; 11] = [
    Kind::Spread,
    Kind::Equal,
    Kind::Coarse,
    Kind::Groups,
    Kind::Falling,
    Kind::EqualMaxima,
    Kind::Zeros,
    Kind::Holes,
    Kind::Few,
    Kind::Nothing,
    Kind::Infinite,
];

fn logit(kind: Kind, id: usize, random: &mut StdRng) -> f32 {
    let mut uniform = || random.random_range(-1.0f32..1.0);
    match kind {
        Kind::Spread => 4.0 * (uniform() + uniform() + uniform() + uniform()),
        Kind::Equal => 1.5,
        Kind::Coarse => (uniform() * 2.5).round(),
        Kind::Groups => (id / 64 % 100) as f32 * 0.25,
        Kind::Falling => -0.001 * id as f32,
        Kind::EqualMaxima if id.is_multiple_of(64) => 5.0,
        Kind::EqualMaxima => uniform(),
        Kind::Zeros if uniform() < 0.0 => -0.0,
        Kind::Zeros => 0.0,
        Kind::Holes if uniform() > 0.8 => f32::NAN,
        Kind::Holes if uniform() > 0.3 => f32::NEG_INFINITY,
        Kind::Holes => uniform(),
        Kind::Few if id < 5 => id as f32,
        Kind::Few | Kind::Nothing if uniform() < 0.0 => f32::NAN,
        Kind::Few | Kind::Nothing => f32::NEG_INFINITY,
        Kind::Infinite if uniform() > 0.99 => f32::INFINITY,
        Kind::Infinite => uniform(),
    }
}

/// What the head's epilogue would leave for `rows` rows.
struct Head {
    vocab: usize,
    stride: usize,
    logits: Vec<f32>,
    group_max: Vec<f32>,
    group_sum: Vec<f32>,
}

impl Head {
    fn new(vocab: usize, kinds: &[Kind], random: &mut StdRng) -> Self {
        let stride = vocab.next_multiple_of(64);
        let mut head = Self {
            vocab,
            stride,
            logits: Vec::new(),
            group_max: Vec::new(),
            group_sum: Vec::new(),
        };
        for &kind in kinds {
            let begin = head.logits.len();
            head.logits
                .extend((0..vocab).map(|id| logit(kind, id, random)));
            // What lies behind the vocabulary must not matter.
            head.logits.resize(begin + stride, 1e30);
            for group in head.logits[begin..begin + vocab].chunks(64) {
                let max = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let terms = group.iter().map(|&v| match v {
                    f32::NEG_INFINITY => 0.0,
                    v => (v - max).exp(),
                });
                head.group_sum.push(terms.sum());
                head.group_max.push(max);
            }
        }
        head
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.logits[row * self.stride..][..self.vocab]
    }

    fn best(&self, row: usize, k: usize) -> Vec<(u32, f32)> {
        let logits = self.row(row);
        let mut ids: Vec<u32> = (0..self.vocab as u32)
            .filter(|&id| logits[id as usize] > f32::NEG_INFINITY)
            .collect();
        ids.sort_by(|&a, &b| {
            let (x, y) = (logits[a as usize], logits[b as usize]);
            y.partial_cmp(&x).unwrap().then(a.cmp(&b))
        });
        let found = ids.iter().map(|&id| (id, logits[id as usize]));
        let missing = std::iter::repeat((NONE, f32::NEG_INFINITY));
        found.chain(missing).take(k).collect()
    }

    fn normaliser(&self, row: usize) -> f64 {
        let logits = self.row(row);
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY {
            return f64::NEG_INFINITY;
        }
        let sum: f64 = logits.iter().map(|&v| f64::from(v - max).exp()).sum();
        f64::from(max) + sum.ln()
    }
}

struct Selected {
    ids: Vec<u32>,
    logits: Vec<f32>,
    normaliser: Vec<f32>,
    gathered: Vec<f32>,
}

fn select(
    device: &Arc<Device>,
    head: &Head,
    k: usize,
    stride: usize,
    gather: Option<&[u32]>,
    sums: bool,
) -> Selected {
    let kernels = HeadSelectKernels::load(device, head.vocab).unwrap();
    let logits = DeviceBuffer::from_slice(device, &head.logits).unwrap();
    let group_max = DeviceBuffer::from_slice(device, &head.group_max).unwrap();
    let group_sum = DeviceBuffer::from_slice(device, &head.group_sum).unwrap();
    let rows = head.logits.len() / head.stride;
    let gather = gather.map(|tokens| DeviceBuffer::from_slice(device, tokens).unwrap());
    let out = HeadTopBuffers::new(device, rows, stride).unwrap();
    out.ids.fill_bytes(0xAB).unwrap();
    out.logits.fill_bytes(0xAB).unwrap();
    out.normaliser.fill_bytes(0xAB).unwrap();
    out.gathered.fill_bytes(0xAB).unwrap();
    let input = HeadLogits {
        logits: logits.ptr(),
        stride: head.stride,
        group_max: group_max.ptr(),
        group_sum: if sums {
            group_sum.ptr()
        } else {
            DevicePtr::NULL
        },
        group_stride: kernels.groups(),
    };
    let gather_ptr = gather.as_ref().map_or(DevicePtr::NULL, DeviceBuffer::ptr);
    kernels
        .select(input, rows, k, gather_ptr, out.top())
        .unwrap();
    Selected {
        ids: out.ids.read().unwrap(),
        logits: out.logits.read().unwrap(),
        normaliser: out.normaliser.read().unwrap(),
        gathered: out.gathered.read().unwrap(),
    }
}

fn check(head: &Head, kinds: &[Kind], k: usize, stride: usize, got: &Selected) {
    let poison = u32::from_ne_bytes([0xAB; 4]);
    let mut worst = 0.0f64;
    for (row, kind) in kinds.iter().enumerate() {
        let ids = &got.ids[row * stride..(row + 1) * stride];
        let logits = &got.logits[row * stride..(row + 1) * stride];
        let what = format!("vocabulary {}, k {k}, row {row} ({kind:?})", head.vocab);
        for (rank, &(id, logit)) in head.best(row, k).iter().enumerate() {
            assert_eq!(ids[rank], id, "{what}, rank {rank}");
            assert_eq!(logits[rank], logit, "{what}, rank {rank}");
        }
        let untouched = ids[k..].iter().all(|&id| id == poison);
        assert!(untouched, "{what}: wrote behind the k best");
        let (expected, normaliser) = (head.normaliser(row), f64::from(got.normaliser[row]));
        if expected.is_finite() {
            worst = worst.max((normaliser - expected).abs());
            assert!(
                (normaliser - expected).abs() < 1e-5,
                "{what}: normaliser {normaliser} for {expected}"
            );
        } else {
            assert_eq!(
                normaliser.is_nan(),
                expected.is_nan(),
                "{what}: {normaliser}"
            );
        }
    }
    println!(
        "vocabulary {} k {k}: largest error of the normaliser {worst:.2e}",
        head.vocab
    );
}

#[test]
fn equals_a_full_sort() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut random = StdRng::seed_from_u64(1);
    for (vocab, ks) in [
        (1, &[1usize, 2, 256][..]),
        (63, &[1, 64]),
        (64, &[1, 63, 64]),
        (65, &[1, 64, 256]),
        (1_000, &[1, 2, 17, 256]),
        (20_000, &[1, 64, 255, 256]),
        (32_769, &[1, 8, 64]),
    ] {
        let head = Head::new(vocab, &KINDS, &mut random);
        for &k in ks {
            let got = select(&device, &head, k, k + k % 3, None, true);
            check(&head, &KINDS, k, k + k % 3, &got);
        }
    }
}

#[test]
fn whole_vocabularies() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut random = StdRng::seed_from_u64(2);
    let kinds = [
        Kind::Spread,
        Kind::Spread,
        Kind::Coarse,
        Kind::Falling,
        Kind::EqualMaxima,
        Kind::Equal,
    ];
    for vocab in [49_152, 151_936, 248_320, 248_077] {
        let head = Head::new(vocab, &kinds, &mut random);
        for k in [1, 16, 64, 256] {
            let got = select(&device, &head, k, k, None, true);
            check(&head, &kinds, k, k, &got);
        }
    }
}

#[test]
fn a_row_does_not_depend_on_k_or_its_neighbours() {
    let Some(device) = crate::device() else {
        return;
    };
    let kinds = [Kind::Spread; 3];
    let mut random = StdRng::seed_from_u64(3);
    let mut head = Head::new(151_936, &kinds, &mut random);
    head.logits.copy_within(..head.stride, 2 * head.stride);
    let groups = head.group_max.len() / 3;
    head.group_max.copy_within(..groups, 2 * groups);
    head.group_sum.copy_within(..groups, 2 * groups);
    let bits = |k: usize| {
        let got = select(&device, &head, k, k, None, true);
        assert_eq!(got.normaliser[0].to_bits(), got.normaliser[2].to_bits());
        assert_eq!(got.ids[..k], got.ids[2 * k..]);
        got.normaliser[0].to_bits()
    };
    assert_eq!(bits(1), bits(64));
    assert_eq!(bits(64), bits(256));
}

#[test]
fn named_tokens_are_gathered() {
    let Some(device) = crate::device() else {
        return;
    };
    let kinds = [Kind::Spread; 4];
    let head = Head::new(5_000, &kinds, &mut StdRng::seed_from_u64(4));
    let tokens = [4_999, NONE, 0, 5_000];
    for k in [1, 5] {
        let got = select(&device, &head, k, k, Some(&tokens), false);
        assert_eq!(got.gathered[0], head.row(0)[4_999]);
        assert_eq!(got.gathered[2], head.row(2)[0]);
        assert!(got.gathered[1].is_nan() && got.gathered[3].is_nan());
        assert!(
            got.normaliser.iter().all(|v| v.is_nan()),
            "no sums, no normaliser"
        );
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let Some(device) = crate::device() else {
        return;
    };
    assert!(HeadSelectKernels::load(&device, 0).is_err());
    assert!(HeadSelectKernels::load(&device, 1 << 21).is_err());
    let kernels = HeadSelectKernels::load(&device, 1_000).unwrap();
    let out = HeadTopBuffers::new(&device, 1, 8).unwrap();
    let none = HeadLogits {
        logits: DevicePtr::NULL,
        stride: 1_024,
        group_max: DevicePtr::NULL,
        group_sum: DevicePtr::NULL,
        group_stride: 16,
    };
    for k in [0, 9, 257] {
        let refused = kernels.select(none, 1, k, DevicePtr::NULL, out.top());
        assert!(refused.is_err(), "k {k}");
    }
}
