//! Every operation of every instruction set against its plain definition, by bits.

use half::{bf16, f16};

use super::super::{Isa, dispatch, dispatch_integer};
use super::*;

/// Values with all special ones among them.
fn values(seed: usize) -> [f32; LANES] {
    let special = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        f32::MIN_POSITIVE,
    ];
    std::array::from_fn(|lane| {
        let x = (lane + LANES * seed).wrapping_mul(2_654_435_761) >> 3;
        match x % 9 {
            place @ 0..6 => special[place],
            _ => (x % 2_001) as f32 / 100.0 - 10.0,
        }
    })
}

fn bytes(seed: usize) -> [u8; 4 * LANES] {
    std::array::from_fn(|i| (((i + 64 * seed) * 2_654_435_761) >> 7) as u8)
}

/// NaN are one value: which of them an operation makes is up to the processor.
fn bits(x: [f32; LANES]) -> [u32; LANES] {
    x.map(|x| if x.is_nan() { f32::NAN } else { x }.to_bits())
}

/// Which instruction sets round a multiply-add once.
fn fused() -> impl Iterator<Item = Isa> {
    Isa::available().filter(|isa| *isa != Isa::Portable || cfg!(target_arch = "aarch64"))
}

type Binary = fn(f32, f32) -> f32;

/// # Safety
/// The processor has the lanes' instruction set, here and below.
#[inline(always)]
unsafe fn binary<L: Lanes>(a: &[f32; LANES], b: &[f32; LANES]) -> [[f32; LANES]; 5] {
    // SAFETY: the caller's contract; arrays of sixteen.
    unsafe {
        let [a, b] = [L::load(a.as_ptr()), L::load(b.as_ptr())];
        [a.add(b), a.mul(b), a.div(b), a.max(b), a.min(b)].map(|x| x.to_array())
    }
}

#[test]
fn operations_on_pairs() {
    let definitions: [Binary; 5] = [
        |a, b| a + b,
        |a, b| a * b,
        |a, b| a / b,
        |a, b| if a > b { a } else { b },
        |a, b| if a < b { a } else { b },
    ];
    for isa in Isa::available() {
        for seed in 0..200 {
            let (a, b) = (&values(seed), &values(seed + 1_000));
            let got =
                dispatch!(isa, binary(a: &[f32; LANES], b: &[f32; LANES]) -> [[f32; LANES]; 5]);
            for (got, f) in got.into_iter().zip(definitions) {
                let expected = std::array::from_fn(|lane| f(a[lane], b[lane]));
                assert_eq!(bits(got), bits(expected), "{isa:?} {a:?} {b:?}");
            }
        }
    }
}

#[inline(always)]
unsafe fn reduce<L: Lanes>(a: &[f32; LANES], b: &[f32; LANES]) -> (f32, f32, bool) {
    // SAFETY: the caller's contract.
    unsafe {
        let [a, b] = [L::load(a.as_ptr()), L::load(b.as_ptr())];
        (a.largest(), a.sum_of_whole_numbers(), a.any_greater(b))
    }
}

#[test]
fn reductions() {
    for isa in Isa::available() {
        for lane in 0..LANES {
            let mut a: [f32; LANES] = std::array::from_fn(|i| (i as f32 * 37.0) % 11.0 - 90.0);
            let b = a;
            let got = |a: &[f32; LANES], b: &[f32; LANES]| dispatch!(isa, reduce(a: &[f32; LANES], b: &[f32; LANES]) -> (f32, f32, bool));
            assert!(!got(&a, &b).2, "{isa:?}");
            a[lane] = -3.0;
            let sum = a.iter().sum::<f32>();
            assert_eq!(got(&a, &b), (-3.0, sum, true), "{isa:?} {lane}");
            a[lane] = f32::NAN;
            let (_, sum, greater) = got(&a, &b);
            assert!(sum.is_nan() && !greater, "{isa:?} {lane}");
        }
    }
}

#[inline(always)]
unsafe fn exponential<L: Lanes>(x: &[f32; LANES]) -> [f32; LANES] {
    // SAFETY: the caller's contract.
    unsafe { L::load(x.as_ptr()).exp().to_array() }
}

#[test]
fn fused_instruction_sets_have_one_exponential() {
    for start in -9_000..9_000 {
        let x = &std::array::from_fn(|lane| start as f32 * 0.01 + lane as f32 * 0.000_61);
        let all: Vec<_> = fused()
            .map(|isa| dispatch!(isa, exponential(x: &[f32; LANES]) -> [f32; LANES]))
            .collect();
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{x:?}");
        for (x, y) in x.iter().zip(all.into_iter().flatten()) {
            let exact = f64::from(*x).clamp(-87.0, 88.0).exp();
            assert!((f64::from(y) / exact - 1.0).abs() < 3e-7, "{x} {y}");
        }
    }
}

#[test]
fn the_exponential_of_no_number_is_none() {
    for isa in Isa::available() {
        let mut x = [0.5; LANES];
        x[3] = f32::NAN;
        let x = &x;
        let y = dispatch!(isa, exponential(x: &[f32; LANES]) -> [f32; LANES]);
        assert!(y[3].is_nan() && y[2].is_finite(), "{isa:?} {y:?}");
    }
}

#[inline(always)]
unsafe fn scale<L: Lanes>(x: f32, n: f32) -> f32 {
    // SAFETY: the caller's contract.
    unsafe { L::splat(x).scale_by_power_of_two(L::splat(n)).to_array()[0] }
}

#[test]
fn powers_of_two() {
    for isa in Isa::available() {
        for n in -126..=127 {
            let (x, n) = (1.375_f32, n as f32);
            let got = dispatch!(isa, scale(x: f32, n: f32) -> f32);
            assert_eq!(f64::from(got), 1.375 * f64::from(n).exp2(), "{isa:?} {n}");
        }
    }
}

#[inline(always)]
unsafe fn multiply_add<L: Lanes>(a: f32, b: f32, c: f32) -> f32 {
    // SAFETY: the caller's contract.
    unsafe { L::splat(a).mul_add(L::splat(b), L::splat(c)).to_array()[0] }
}

#[test]
fn multiply_adds_round_once() {
    for isa in fused() {
        let (a, b, c) = (1.0 + f32::EPSILON, 1.0 - f32::EPSILON, -1.0);
        let got = dispatch!(isa, multiply_add(a: f32, b: f32, c: f32) -> f32);
        assert_eq!(got, -f32::EPSILON * f32::EPSILON, "{isa:?}");
    }
}

#[inline(always)]
unsafe fn widen_halves<L: Lanes>(halves: &[u16; LANES]) -> [f32; LANES] {
    // SAFETY: the caller's contract.
    unsafe { L::load_f16(halves.as_ptr()).to_array() }
}

#[test]
fn all_f16_values() {
    for isa in Isa::available() {
        for start in (0..=u16::MAX).step_by(LANES) {
            let halves = &std::array::from_fn(|lane| start + lane as u16);
            let got = dispatch!(isa, widen_halves(halves: &[u16; LANES]) -> [f32; LANES]);
            let expected = halves.map(|half| f16::from_bits(half).to_f32());
            assert_eq!(bits(got), bits(expected), "{isa:?} {start:#x}");
        }
    }
}

#[inline(always)]
unsafe fn convert<L: Lanes>(bytes: &[u8; 4 * LANES]) -> ([[f32; LANES]; 2], [u8; LANES]) {
    let mut low = [0; LANES];
    // SAFETY: the caller's contract; the arrays hold at least sixteen elements.
    unsafe {
        L::load(bytes.as_ptr().cast()).store_low_bytes(low.as_mut_ptr());
        let loaded = [
            L::load_u8(bytes.as_ptr()),
            L::load_i8(bytes.as_ptr().cast()),
        ];
        (loaded.map(|x| x.to_array()), low)
    }
}

#[test]
fn bytes_become_numbers_and_back() {
    for isa in Isa::available() {
        for seed in 0..50 {
            let bytes = &bytes(seed);
            let (loaded, low) = dispatch!(isa, convert(bytes: &[u8; 4 * LANES]) -> ([[f32; LANES]; 2], [u8; LANES]));
            let unsigned = std::array::from_fn(|lane| f32::from(bytes[lane]));
            let signed = std::array::from_fn(|lane| f32::from(bytes[lane].cast_signed()));
            assert_eq!(loaded, [unsigned, signed], "{isa:?}");
            assert_eq!(low, std::array::from_fn(|lane| bytes[4 * lane]), "{isa:?}");
        }
    }
}

/// Nibbles, bit pairs and all bytes of vectors made of them.
#[inline(always)]
unsafe fn unpack<L: Lanes>(bytes: &[u8; 4 * LANES]) -> ([[[f32; LANES]; 4]; 8], [[f32; LANES]; 2]) {
    // SAFETY: the caller's contract.
    unsafe {
        let all = L::load_bytes(bytes.as_ptr());
        let [low, high] = [L::low_nibbles(all), L::high_nibbles(all)];
        let vectors = [
            all,
            low,
            high,
            L::bit_pairs::<0>(all),
            L::bit_pairs::<1>(all),
            L::bit_pairs::<2>(all),
            L::bit_pairs::<3>(all),
            L::or(low, L::bit_pairs::<1>(all)),
        ];
        let unpacked = vectors.map(|bytes| {
            [
                L::byte::<0>(bytes),
                L::byte::<1>(bytes),
                L::byte::<2>(bytes),
                L::byte::<3>(bytes),
            ]
            .map(|x| x.to_array())
        });
        let bf16 = [L::low_bf16(all), L::high_bf16(all)];
        (unpacked, bf16.map(|x| x.to_array()))
    }
}

#[test]
fn packed_bytes() {
    let definitions: [fn(u8) -> u8; 8] = [
        |byte| byte,
        |byte| byte & 15,
        |byte| byte >> 4,
        |byte| (byte & 3) << 4,
        |byte| (byte >> 2 & 3) << 4,
        |byte| (byte >> 4 & 3) << 4,
        |byte| byte >> 6 << 4,
        |byte| byte & 15 | (byte >> 2 & 3) << 4,
    ];
    for isa in Isa::available() {
        for seed in 0..50 {
            let bytes = &bytes(seed);
            let (unpacked, halves) = dispatch!(isa, unpack(bytes: &[u8; 4 * LANES]) -> ([[[f32; LANES]; 4]; 8], [[f32; LANES]; 2]));
            for (unpacked, f) in unpacked.into_iter().zip(definitions) {
                for (place, got) in unpacked.into_iter().enumerate() {
                    let expected =
                        std::array::from_fn(|lane| f32::from(f(bytes[4 * lane + place])));
                    assert_eq!(got, expected, "{isa:?} byte {place}");
                }
            }
            for (half, got) in halves.into_iter().enumerate() {
                let expected = std::array::from_fn(|lane| {
                    let place = 4 * lane + 2 * half;
                    bf16::from_le_bytes([bytes[place], bytes[place + 1]]).to_f32()
                });
                assert_eq!(bits(got), bits(expected), "{isa:?}");
            }
        }
    }
}

/// Sums of products of small and of full weights, each added to `start`.
#[inline(always)]
unsafe fn products<L: IntegerLanes>(
    weights: &[u8; 4 * LANES],
    x: i32,
    start: i32,
) -> [[f32; LANES]; 2] {
    let sum: i32 = x
        .to_ne_bytes()
        .map(|x| i32::from(x.cast_signed()))
        .iter()
        .sum();
    // SAFETY: the caller's contract.
    unsafe {
        let small = weights.map(|weight| weight & 127);
        let [small, full] = [&small, weights].map(|bytes| L::load_bytes(bytes.as_ptr()));
        let uncentred = L::splat_int(start + L::uncentred(-128 * sum));
        let sums = [
            L::dot_small(L::splat_int(start), small, &x),
            L::dot_full(uncentred, full, &x),
        ];
        sums.map(|sum| L::ints_to_f32(sum).to_array())
    }
}

#[test]
fn integer_products() {
    // What bytes of weights and activations may be at most, and what lies between.
    let extremes = [[0; 4 * LANES], [255; 4 * LANES], [127; 4 * LANES]];
    let activations = [
        [127; 4],
        [-127; 4],
        [127, -127, -127, 127],
        [3, -90, 0, 111],
    ];
    for isa in Isa::available() {
        for weights in (0..50).map(bytes).chain(extremes) {
            for x in activations {
                let word = i32::from_ne_bytes(x.map(|x: i8| x.cast_unsigned()));
                let (weights, start) = (&weights, -70_001);
                let got = dispatch_integer!(isa, products(weights: &[u8; 4 * LANES], word: i32, start: i32) -> [[f32; LANES]; 2]);
                let sum = |weight: fn(u8) -> i32| {
                    std::array::from_fn(|lane| {
                        let weights = &weights[4 * lane..4 * lane + 4];
                        let products = weights
                            .iter()
                            .zip(x)
                            .map(|(w, x)| weight(*w) * i32::from(x));
                        (start + products.sum::<i32>()) as f32
                    })
                };
                let expected = [
                    sum(|weight| i32::from(weight & 127)),
                    sum(|weight| i32::from(weight) - 128),
                ];
                assert_eq!(got, expected, "{isa:?} {x:?}");
            }
        }
    }
}
