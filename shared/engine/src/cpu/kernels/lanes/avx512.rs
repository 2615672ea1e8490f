//! AVX-512: one register for sixteen f32.

use std::arch::x86_64::*;

use super::{Bf16Lanes, IntegerLanes, Lanes};

/// AVX-512F and BW; the integer products need VNNI, the bfloat16 products BF16.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(__m512);

impl Lanes for Avx512 {
    const TILE_VECTORS: usize = 2;
    const TILE_ROWS: usize = 12;
    const TILE_QUERIES: usize = 6;
    const TILE_QUERY_VECTORS: usize = 4;

    type Bytes = __m512i;

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(bytes: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(bytes, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(bytes: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(_mm512_srli_epi32::<4>(bytes), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn bit_pairs<const PAIR: u32>(bytes: __m512i) -> __m512i {
        unsafe {
            let moved = match PAIR {
                0 => _mm512_slli_epi32::<4>(bytes),
                1 => _mm512_slli_epi32::<2>(bytes),
                2 => bytes,
                _ => _mm512_srli_epi32::<2>(bytes),
            };
            _mm512_and_si512(moved, _mm512_set1_epi8(0x30))
        }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn byte<const BYTE: u32>(bytes: __m512i) -> Self {
        unsafe {
            let moved = match BYTE {
                0 => bytes,
                1 => _mm512_srli_epi32::<8>(bytes),
                2 => _mm512_srli_epi32::<16>(bytes),
                _ => _mm512_srli_epi32::<24>(bytes),
            };
            let lowest = _mm512_and_si512(moved, _mm512_set1_epi32(255));
            Self(_mm512_cvtepi32_ps(lowest))
        }
    }
    #[inline(always)]
    unsafe fn low_bf16(bytes: __m512i) -> Self {
        unsafe { Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bytes))) }
    }
    #[inline(always)]
    unsafe fn high_bf16(bytes: __m512i) -> Self {
        unsafe {
            let upper = _mm512_and_si512(bytes, _mm512_set1_epi32(0xFFFF_0000_u32 as i32));
            Self(_mm512_castsi512_ps(upper))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            Self(_mm512_cvtepi32_ps(bytes))
        }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8) {
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(_mm512_castps_si512(self.0));
            _mm_storeu_si128(p.cast(), bytes);
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Self(unsafe { _mm512_loadu_ps(p) })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe {
            let bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()));
            Self(_mm512_cvtepi32_ps(bytes))
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Self(unsafe { _mm512_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Self(unsafe { _mm512_min_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self {
        Self(unsafe { _mm512_scalef_ps(self.0, n.0) })
    }
    #[inline(always)]
    unsafe fn any_greater(self, other: Self) -> bool {
        unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, other.0) != 0 }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn sum_of_whole_numbers(self) -> f32 {
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
}

impl IntegerLanes for Avx512 {
    // Beyond six rows some f32 sums live in the cache between blocks: that costs less than widening weights again.
    const INTEGER_ROWS: usize = 10;
    type Ints = __m512i;

    #[inline(always)]
    unsafe fn splat_int(x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn dot_small(sum: __m512i, weights: __m512i, x: *const i32) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(*x)) }
    }
    #[inline(always)]
    unsafe fn dot_full(sum: __m512i, weights: __m512i, x: *const i32) -> __m512i {
        unsafe { Self::dot_small(sum, weights, x) }
    }
    #[inline(always)]
    fn uncentred(centring: i32) -> i32 {
        centring
    }
    #[inline(always)]
    unsafe fn ints_to_f32(ints: __m512i) -> Self {
        Self(unsafe { _mm512_cvtepi32_ps(ints) })
    }
}

impl Bf16Lanes for Avx512 {
    #[inline(always)]
    unsafe fn dot_bf16(self, weights: __m512i, x: *const i32) -> Self {
        // SAFETY: both types are 64 bytes without invalid values.
        unsafe {
            let weights: __m512bh = std::mem::transmute(weights);
            let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(*x));
            Self(_mm512_dpbf16_ps(self.0, weights, x))
        }
    }
}
