//! Arrays of sixteen, for the compiler to make of what it can.

use half::f16;

use super::{IntegerLanes, LANES, Lanes};

/// Plain arrays.
#[derive(Clone, Copy)]
pub(in super::super) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (a, b) in out.iter_mut().zip(other.0) {
            *a = f(*a, b);
        }
        Self(out)
    }
}

impl Lanes for Portable {
    const TILE_VECTORS: usize = 1;
    const TILE_ROWS: usize = 4;
    const TILE_QUERIES: usize = 4;
    const TILE_QUERY_VECTORS: usize = 1;

    type Bytes = [u8; 4 * LANES];

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> [u8; 4 * LANES] {
        unsafe { p.cast::<[u8; 4 * LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn low_nibbles(bytes: [u8; 4 * LANES]) -> [u8; 4 * LANES] {
        bytes.map(|byte| byte & 15)
    }
    #[inline(always)]
    unsafe fn high_nibbles(bytes: [u8; 4 * LANES]) -> [u8; 4 * LANES] {
        bytes.map(|byte| byte >> 4)
    }
    #[inline(always)]
    unsafe fn bit_pairs<const PAIR: u32>(bytes: [u8; 4 * LANES]) -> [u8; 4 * LANES] {
        bytes.map(|byte| ((byte >> (2 * PAIR)) & 3) << 4)
    }
    #[inline(always)]
    unsafe fn or(a: [u8; 4 * LANES], b: [u8; 4 * LANES]) -> [u8; 4 * LANES] {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn byte<const BYTE: u32>(bytes: [u8; 4 * LANES]) -> Self {
        Self(std::array::from_fn(|lane| {
            f32::from(bytes[4 * lane + BYTE as usize])
        }))
    }
    #[inline(always)]
    unsafe fn low_bf16(bytes: [u8; 4 * LANES]) -> Self {
        Self(std::array::from_fn(|lane| {
            f32::from_le_bytes([0, 0, bytes[4 * lane], bytes[4 * lane + 1]])
        }))
    }
    #[inline(always)]
    unsafe fn high_bf16(bytes: [u8; 4 * LANES]) -> Self {
        Self(std::array::from_fn(|lane| {
            f32::from_le_bytes([0, 0, bytes[4 * lane + 2], bytes[4 * lane + 3]])
        }))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        let halves = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        Self(halves.map(|half| f16::from_bits(half).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        Self(unsafe { p.cast::<[u8; LANES]>().read_unaligned() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8) {
        let bytes = self.0.map(|x| x.to_bits() as u8);
        unsafe { p.cast::<[u8; LANES]>().write_unaligned(bytes) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Self(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        Self(unsafe { p.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        let mut out = c.0;
        for ((o, a), b) in out.iter_mut().zip(self.0).zip(b.0) {
            // A fused operation without the instruction is a library call a hundred times slower.
            *o = if cfg!(target_arch = "aarch64") {
                a.mul_add(b, *o)
            } else {
                a * b + *o
            };
        }
        Self(out)
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self {
        self.zip(n, |x, n| {
            x * f32::from_bits(((n as i32 + 127) as u32) << 23)
        })
    }
    #[inline(always)]
    unsafe fn any_greater(self, other: Self) -> bool {
        self.0.iter().zip(other.0).any(|(a, b)| *a > b)
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn sum_of_whole_numbers(self) -> f32 {
        self.0.into_iter().sum()
    }
}

impl IntegerLanes for Portable {
    const INTEGER_ROWS: usize = 1;
    type Ints = [i32; LANES];

    #[inline(always)]
    unsafe fn splat_int(x: i32) -> [i32; LANES] {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn dot_small(
        mut sum: [i32; LANES],
        weights: [u8; 4 * LANES],
        x: *const i32,
    ) -> [i32; LANES] {
        let x = unsafe { *x }.to_ne_bytes().map(|byte| byte as i8 as i32);
        for (sum, weights) in sum.iter_mut().zip(weights.as_chunks::<4>().0) {
            for (weight, x) in weights.iter().zip(x) {
                *sum += i32::from(*weight) * x;
            }
        }
        sum
    }
    #[inline(always)]
    unsafe fn dot_full(sum: [i32; LANES], weights: [u8; 4 * LANES], x: *const i32) -> [i32; LANES] {
        unsafe { Self::dot_small(sum, weights, x) }
    }
    #[inline(always)]
    fn uncentred(centring: i32) -> i32 {
        centring
    }
    #[inline(always)]
    unsafe fn ints_to_f32(ints: [i32; LANES]) -> Self {
        Self(ints.map(|int| int as f32))
    }
}
