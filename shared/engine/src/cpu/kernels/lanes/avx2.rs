//! AVX2: two registers for sixteen f32.

use std::arch::x86_64::*;

use super::{IntegerLanes, Lanes};

/// AVX2 with FMA and F16C; integer products by AVX-VNNI where `VNNI` is set.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2<const VNNI: bool>(__m256, __m256);

impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    const TILE_VECTORS: usize = 1;
    const TILE_ROWS: usize = 6;
    const TILE_QUERIES: usize = 6;
    const TILE_QUERY_VECTORS: usize = 1;

    type Bytes = [__m256i; 2];

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> [__m256i; 2] {
        unsafe {
            [
                _mm256_loadu_si256(p.cast()),
                _mm256_loadu_si256(p.add(32).cast()),
            ]
        }
    }
    #[inline(always)]
    unsafe fn low_nibbles([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        unsafe {
            let mask = _mm256_set1_epi8(15);
            [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)]
        }
    }
    #[inline(always)]
    unsafe fn high_nibbles([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        unsafe { Self::low_nibbles([_mm256_srli_epi32::<4>(a), _mm256_srli_epi32::<4>(b)]) }
    }
    #[inline(always)]
    unsafe fn bit_pairs<const PAIR: u32>([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        #[inline(always)]
        unsafe fn half<const PAIR: u32>(x: __m256i) -> __m256i {
            unsafe {
                let moved = match PAIR {
                    0 => _mm256_slli_epi32::<4>(x),
                    1 => _mm256_slli_epi32::<2>(x),
                    2 => x,
                    _ => _mm256_srli_epi32::<2>(x),
                };
                _mm256_and_si256(moved, _mm256_set1_epi8(0x30))
            }
        }
        unsafe { [half::<PAIR>(a), half::<PAIR>(b)] }
    }
    #[inline(always)]
    unsafe fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn byte<const BYTE: u32>([a, b]: [__m256i; 2]) -> Self {
        #[inline(always)]
        unsafe fn half<const BYTE: u32>(x: __m256i) -> __m256 {
            unsafe {
                let moved = match BYTE {
                    0 => x,
                    1 => _mm256_srli_epi32::<8>(x),
                    2 => _mm256_srli_epi32::<16>(x),
                    _ => _mm256_srli_epi32::<24>(x),
                };
                _mm256_cvtepi32_ps(_mm256_and_si256(moved, _mm256_set1_epi32(255)))
            }
        }
        unsafe { Self(half::<BYTE>(a), half::<BYTE>(b)) }
    }
    #[inline(always)]
    unsafe fn low_bf16([a, b]: [__m256i; 2]) -> Self {
        unsafe {
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
            )
        }
    }
    #[inline(always)]
    unsafe fn high_bf16([a, b]: [__m256i; 2]) -> Self {
        unsafe {
            let mask = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
            Self(
                _mm256_castsi256_ps(_mm256_and_si256(a, mask)),
                _mm256_castsi256_ps(_mm256_and_si256(b, mask)),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        #[inline(always)]
        unsafe fn half(p: *const u8) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) }
        }
        unsafe { Self(half(p), half(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store_low_bytes(self, p: *mut u8) {
        // SAFETY: the caller's contract.
        let lanes = unsafe { self.to_array() };
        for (lane, x) in lanes.into_iter().enumerate() {
            // SAFETY: `p` has room for sixteen bytes.
            unsafe { *p.add(lane) = x.to_bits() as u8 };
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        let v = unsafe { _mm256_set1_ps(x) };
        Self(v, v)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        #[inline(always)]
        unsafe fn half(p: *const i8) -> __m256 {
            unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
        }
        unsafe { Self(half(p), half(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        unsafe {
            Self(
                _mm256_fmadd_ps(self.0, b.0, c.0),
                _mm256_fmadd_ps(self.1, b.1, c.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_add_ps(self.0, other.0),
                _mm256_add_ps(self.1, other.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_mul_ps(self.0, other.0),
                _mm256_mul_ps(self.1, other.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_div_ps(self.0, other.0),
                _mm256_div_ps(self.1, other.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_max_ps(self.0, other.0),
                _mm256_max_ps(self.1, other.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        unsafe {
            Self(
                _mm256_min_ps(self.0, other.0),
                _mm256_min_ps(self.1, other.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self {
        #[inline(always)]
        unsafe fn half(x: __m256, n: __m256) -> __m256 {
            unsafe {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent));
                _mm256_mul_ps(x, power)
            }
        }
        unsafe { Self(half(self.0, n.0), half(self.1, n.1)) }
    }
    #[inline(always)]
    unsafe fn any_greater(self, other: Self) -> bool {
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_GT_OQ>(self.0, other.0);
            let high = _mm256_cmp_ps::<_CMP_GT_OQ>(self.1, other.1);
            _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            let eight = _mm256_max_ps(self.0, self.1);
            let four = _mm_max_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn sum_of_whole_numbers(self) -> f32 {
        unsafe {
            let eight = _mm256_add_ps(self.0, self.1);
            let four = _mm_add_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
}

impl<const VNNI: bool> IntegerLanes for Avx2<VNNI> {
    const INTEGER_ROWS: usize = 2;
    type Ints = [__m256i; 2];

    #[inline(always)]
    unsafe fn splat_int(x: i32) -> [__m256i; 2] {
        [unsafe { _mm256_set1_epi32(x) }; 2]
    }
    #[inline(always)]
    unsafe fn dot_small(sum: [__m256i; 2], weights: [__m256i; 2], x: *const i32) -> [__m256i; 2] {
        unsafe {
            let x = _mm256_set1_epi32(*x);
            if VNNI {
                return [
                    _mm256_dpbusd_avx_epi32(sum[0], weights[0], x),
                    _mm256_dpbusd_avx_epi32(sum[1], weights[1], x),
                ];
            }
            [
                add_pairs(sum[0], weights[0], x),
                add_pairs(sum[1], weights[1], x),
            ]
        }
    }
    #[inline(always)]
    unsafe fn dot_full(sum: [__m256i; 2], weights: [__m256i; 2], x: *const i32) -> [__m256i; 2] {
        unsafe {
            if VNNI {
                return Self::dot_small(sum, weights, x);
            }
            let x = _mm256_set1_epi32(*x);
            [
                add_centred_pairs(sum[0], weights[0], x),
                add_centred_pairs(sum[1], weights[1], x),
            ]
        }
    }
    #[inline(always)]
    fn uncentred(centring: i32) -> i32 {
        if VNNI { centring } else { 0 }
    }
    #[inline(always)]
    unsafe fn ints_to_f32([a, b]: [__m256i; 2]) -> Self {
        unsafe { Self(_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)) }
    }
}

/// Two products of unsigned bytes up to 128 and signed bytes in -127..=127 stay inside 16 bits, so nothing saturates.
#[inline(always)]
unsafe fn add_pairs(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
    unsafe {
        let pairs = _mm256_maddubs_epi16(unsigned, signed);
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }
}

/// The sign of the centred weight moves to the activation, because the instruction wants one factor unsigned.
#[inline(always)]
unsafe fn add_centred_pairs(sum: __m256i, weights: __m256i, x: __m256i) -> __m256i {
    unsafe {
        let centred = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        add_pairs(sum, _mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred))
    }
}
