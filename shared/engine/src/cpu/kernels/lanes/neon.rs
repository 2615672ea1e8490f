//! NEON: four registers for sixteen f32.
// Where NEON belongs to the target itself, operations on registers are safe and `unsafe` around them is too much.
#![allow(unused_unsafe)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::{IntegerLanes, Lanes};

/// NEON as every 64-bit Arm processor has it. Integer products are made of 16-bit ones: the intrinsics of the dot
/// product extension are not stable.
#[derive(Clone, Copy)]
pub(in super::super) struct Neon([float32x4_t; 4]);

/// An array of `$value` for each of the four registers `$i`.
macro_rules! each {
    ($i:ident => $value:expr) => {
        [
            {
                let $i = 0;
                $value
            },
            {
                let $i = 1;
                $value
            },
            {
                let $i = 2;
                $value
            },
            {
                let $i = 3;
                $value
            },
        ]
    };
}

impl Lanes for Neon {
    // Six rows, each four registers, beside four of weights and one of inputs: 29 of 32.
    const TILE_VECTORS: usize = 1;
    const TILE_ROWS: usize = 6;
    const TILE_QUERIES: usize = 6;
    const TILE_QUERY_VECTORS: usize = 1;

    type Bytes = [uint8x16_t; 4];

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> [uint8x16_t; 4] {
        unsafe { each!(i => vld1q_u8(p.add(16 * i))) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(bytes: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        unsafe { each!(i => vandq_u8(bytes[i], vdupq_n_u8(15))) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(bytes: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        unsafe { each!(i => vshrq_n_u8::<4>(bytes[i])) }
    }
    #[inline(always)]
    unsafe fn bit_pairs<const PAIR: u32>(bytes: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        #[inline(always)]
        unsafe fn quarter<const PAIR: u32>(x: uint8x16_t) -> uint8x16_t {
            unsafe {
                let moved = match PAIR {
                    0 => vshlq_n_u8::<4>(x),
                    1 => vshlq_n_u8::<2>(x),
                    2 => x,
                    _ => vshrq_n_u8::<2>(x),
                };
                vandq_u8(moved, vdupq_n_u8(0x30))
            }
        }
        unsafe { each!(i => quarter::<PAIR>(bytes[i])) }
    }
    #[inline(always)]
    unsafe fn or(a: [uint8x16_t; 4], b: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        unsafe { each!(i => vorrq_u8(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn byte<const BYTE: u32>(bytes: [uint8x16_t; 4]) -> Self {
        #[inline(always)]
        unsafe fn quarter<const BYTE: u32>(x: uint8x16_t) -> float32x4_t {
            unsafe {
                let x = vreinterpretq_u32_u8(x);
                let moved = match BYTE {
                    0 => x,
                    1 => vshrq_n_u32::<8>(x),
                    2 => vshrq_n_u32::<16>(x),
                    _ => vshrq_n_u32::<24>(x),
                };
                vcvtq_f32_u32(vandq_u32(moved, vdupq_n_u32(255)))
            }
        }
        unsafe { Self(each!(i => quarter::<BYTE>(bytes[i]))) }
    }
    #[inline(always)]
    unsafe fn low_bf16(bytes: [uint8x16_t; 4]) -> Self {
        #[inline(always)]
        unsafe fn quarter(x: uint8x16_t) -> float32x4_t {
            unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_u8(x))) }
        }
        unsafe { Self(each!(i => quarter(bytes[i]))) }
    }
    #[inline(always)]
    unsafe fn high_bf16(bytes: [uint8x16_t; 4]) -> Self {
        #[inline(always)]
        unsafe fn quarter(x: uint8x16_t) -> float32x4_t {
            unsafe {
                let upper = vandq_u32(vreinterpretq_u32_u8(x), vdupq_n_u32(0xFFFF_0000));
                vreinterpretq_f32_u32(upper)
            }
        }
        unsafe { Self(each!(i => quarter(bytes[i]))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        unsafe { Self(each!(i => widen_f16(vld1_u16(p.add(4 * i))))) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        unsafe {
            let bytes = vld1q_u8(p);
            let [low, high] = [vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)];
            Self([
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
                vcvtq_f32_u32(vmovl_high_u16(low)),
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
                vcvtq_f32_u32(vmovl_high_u16(high)),
            ])
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe {
            let bytes = vld1q_s8(p);
            let [low, high] = [vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)];
            Self([
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ])
        }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8) {
        unsafe {
            let [a, b, c, d] = each!(i => vreinterpretq_u16_f32(self.0[i]));
            // The even elements of a pair are the lower halves.
            let [low, high] = [vuzp1q_u16(a, b), vuzp1q_u16(c, d)];
            let bytes = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
            vst1q_u8(p, bytes);
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a request for a cache line has no effect on memory or registers, whatever the address.
        unsafe {
            asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
        }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([unsafe { vdupq_n_f32(x) }; 4])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Self(each!(i => vld1q_f32(p.add(4 * i)))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        for (i, x) in self.0.into_iter().enumerate() {
            unsafe { vst1q_f32(p.add(4 * i), x) };
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        unsafe { Self(each!(i => vfmaq_f32(c.0[i], self.0[i], b.0[i]))) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { Self(each!(i => vaddq_f32(self.0[i], other.0[i]))) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe { Self(each!(i => vmulq_f32(self.0[i], other.0[i]))) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe { Self(each!(i => vdivq_f32(self.0[i], other.0[i]))) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { Self(each!(i => greater(self.0[i], other.0[i]))) }
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        #[inline(always)]
        unsafe fn quarter(a: float32x4_t, b: float32x4_t) -> float32x4_t {
            unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
        }
        unsafe { Self(each!(i => quarter(self.0[i], other.0[i]))) }
    }
    #[inline(always)]
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self {
        #[inline(always)]
        unsafe fn quarter(x: float32x4_t, n: float32x4_t) -> float32x4_t {
            unsafe {
                let exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
                vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
            }
        }
        unsafe { Self(each!(i => quarter(self.0[i], n.0[i]))) }
    }
    #[inline(always)]
    unsafe fn any_greater(self, other: Self) -> bool {
        unsafe {
            let [a, b, c, d] = each!(i => vcgtq_f32(self.0[i], other.0[i]));
            vmaxvq_u32(vorrq_u32(vorrq_u32(a, b), vorrq_u32(c, d))) != 0
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            let [a, b, c, d] = self.0;
            let four = greater(greater(a, c), greater(b, d));
            let two = greater(four, vextq_f32::<2>(four, four));
            vgetq_lane_f32::<0>(greater(two, vdupq_laneq_f32::<1>(two)))
        }
    }
    #[inline(always)]
    unsafe fn sum_of_whole_numbers(self) -> f32 {
        unsafe {
            let [a, b, c, d] = self.0;
            vaddvq_f32(vaddq_f32(vaddq_f32(a, b), vaddq_f32(c, d)))
        }
    }
}

/// The greater of each lane; `b` where they are equal or one is NaN, as on x86: the maximum of NEON would be NaN.
#[inline(always)]
unsafe fn greater(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// Four f16, exactly. The conversion instruction has a stable intrinsic only from Rust 1.94 on.
#[inline(always)]
unsafe fn widen_f16(halves: uint16x4_t) -> float32x4_t {
    unsafe {
        let bits = vshll_n_u16::<13>(halves);
        let magnitude = vandq_u32(bits, vdupq_n_u32(0x7FFF << 13));
        // Infinities and NaN take the largest exponent of f32, which no factor changes. All others are 2^112 too
        // small, since the bias of an exponent is 127 and not 15; as f32 subnormals, subnormal f16 are exact too.
        let special = vcgeq_u32(magnitude, vdupq_n_u32(0x7C00 << 13));
        let exponent = vandq_u32(special, vdupq_n_u32(0x7F80_0000));
        let small = vreinterpretq_f32_u32(vorrq_u32(magnitude, exponent));
        let factor = vdupq_n_f32(f32::from_bits((127 + 112) << 23));
        let value = vreinterpretq_u32_f32(vmulq_f32(small, factor));
        let sign = vdupq_n_u32(0x8000_0000);
        vreinterpretq_f32_u32(vbslq_u32(sign, vshlq_n_u32::<3>(bits), value))
    }
}

impl IntegerLanes for Neon {
    // The whole sums of four rows fit beside the weights of eight inputs, 25 registers and what a product needs. Their
    // f32 sums live in the cache between blocks: that costs less than unpacking the weights twice as often.
    const INTEGER_ROWS: usize = 4;
    type Ints = [int32x4_t; 4];

    #[inline(always)]
    unsafe fn splat_int(x: i32) -> [int32x4_t; 4] {
        [unsafe { vdupq_n_s32(x) }; 4]
    }
    #[inline(always)]
    unsafe fn dot_small(
        sum: [int32x4_t; 4],
        weights: [uint8x16_t; 4],
        x: *const i32,
    ) -> [int32x4_t; 4] {
        unsafe {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(*x));
            each!(i => add_products(sum[i], vreinterpretq_s8_u8(weights[i]), x))
        }
    }
    #[inline(always)]
    unsafe fn dot_full(
        sum: [int32x4_t; 4],
        weights: [uint8x16_t; 4],
        x: *const i32,
    ) -> [int32x4_t; 4] {
        unsafe {
            let centred = each!(i => veorq_u8(weights[i], vdupq_n_u8(0x80)));
            Self::dot_small(sum, centred, x)
        }
    }
    #[inline(always)]
    fn uncentred(_centring: i32) -> i32 {
        0
    }
    #[inline(always)]
    unsafe fn ints_to_f32(ints: [int32x4_t; 4]) -> Self {
        unsafe { Self(each!(i => vcvtq_f32_s32(ints[i]))) }
    }
}

/// Two products of bytes in -128..=127 and in -127..=127 stay inside 16 bits, so nothing wraps.
#[inline(always)]
unsafe fn add_products(sum: int32x4_t, weights: int8x16_t, x: int8x16_t) -> int32x4_t {
    unsafe {
        let low = vmull_s8(vget_low_s8(weights), vget_low_s8(x));
        let high = vmull_high_s8(weights, x);
        vpadalq_s16(sum, vpaddq_s16(low, high))
    }
}
