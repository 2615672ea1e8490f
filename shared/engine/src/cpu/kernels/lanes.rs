//! Sixteen f32 at once, for each instruction set.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Lanes per vector, on every instruction set, so that reductions have one order everywhere.
pub(super) const LANES: usize = 16;

/// Sixteen f32.
///
/// # Safety
/// Every method must only be called where the processor has the instruction set of the implementation; pointers
/// must be valid for sixteen elements. Nothing is assumed about alignment.
pub(super) trait Lanes: Copy {
    /// Vectors of one panel that a linear tile keeps in registers per row.
    const TILE_VECTORS: usize;
    /// Rows of a linear tile whose accumulators still fit the register file.
    const TILE_ROWS: usize;
    /// Rows of a tile that keeps one vector of the panel at a time.
    const HALF_TILE_ROWS: usize;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// Sixteen bfloat16.
    unsafe fn load_bf16(p: *const u16) -> Self;
    /// Sixteen signed bytes.
    unsafe fn load_i8(p: *const i8) -> Self;
    /// Sixteen bytes: their low halves, then their high halves, as 0..=15.
    unsafe fn load_nibbles(p: *const u8) -> [Self; 2];
    /// `self * b + c`, fused where the instruction set has it.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn min(self, other: Self) -> Self;
    /// `self * 2^n` for whole `n` in -126..=127.
    unsafe fn scale_by_power_of_two(self, n: Self) -> Self;
    unsafe fn any_greater(self, other: Self) -> bool;

    #[inline(always)]
    unsafe fn to_array(self) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: the array holds sixteen elements.
        unsafe { self.store(out.as_mut_ptr()) };
        out
    }

    /// Sum in a fixed tree: lane i with lane i + 8, then + 4, + 2, + 1.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller's contract.
        let mut x = unsafe { self.to_array() };
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] += x[i + half];
            }
        }
        x[0]
    }

    /// Largest lane.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        // SAFETY: the caller's contract.
        unsafe { self.to_array() }
            .into_iter()
            .fold(f32::NEG_INFINITY, f32::max)
    }

    /// `e^self` to about 2 units in the last place; inputs are clamped to -87..88, where results are normal.
    ///
    /// Cody-Waite reduction to `|r| <= ln(2)/2` and a degree-6 polynomial (the minimax coefficients of Cephes' expf).
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // Adding and taking away 1.5 * 2^23 rounds to a whole number in every instruction set alike.
        const ROUND: f32 = 12_582_912.0;
        // SAFETY: the caller's contract.
        unsafe {
            let s = |x: f32| Self::splat(x);
            let x = self.max(s(-87.0)).min(s(88.0));
            let n = x
                .mul_add(s(std::f32::consts::LOG2_E), s(ROUND))
                .add(s(-ROUND));
            let r = n.mul_add(s(-0.693_359_4), x);
            let r = n.mul_add(s(2.121_944_4e-4), r);
            let mut p = s(1.987_569_1e-4);
            for c in [
                1.398_199_9e-3,
                8.333_452e-3,
                4.166_579_6e-2,
                1.666_666_5e-1,
                5e-1,
            ] {
                p = p.mul_add(r, s(c));
            }
            let p = p.mul_add(r.mul(r), r).add(s(1.0));
            p.scale_by_power_of_two(n)
        }
    }
}

/// AVX-512F.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx512 {
    const TILE_VECTORS: usize = 2;
    const TILE_ROWS: usize = 12;
    const HALF_TILE_ROWS: usize = 24;

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
    unsafe fn load_bf16(p: *const u16) -> Self {
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe {
            let bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()));
            Self(_mm512_cvtepi32_ps(bytes))
        }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [Self; 2] {
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let low = _mm512_and_si512(bytes, _mm512_set1_epi32(15));
            let high = _mm512_srli_epi32::<4>(bytes);
            [low, high].map(|half| Self(_mm512_cvtepi32_ps(half)))
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
}

/// AVX2 with FMA.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {
    const TILE_VECTORS: usize = 1;
    const TILE_ROWS: usize = 6;
    const HALF_TILE_ROWS: usize = 6;

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
    unsafe fn load_bf16(p: *const u16) -> Self {
        #[inline(always)]
        unsafe fn half(p: *const u16) -> __m256 {
            unsafe {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
            }
        }
        unsafe { Self(half(p), half(p.add(8))) }
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
    unsafe fn load_nibbles(p: *const u8) -> [Self; 2] {
        #[inline(always)]
        unsafe fn half(p: *const u8) -> [__m256; 2] {
            unsafe {
                let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
                let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
                let high = _mm256_srli_epi32::<4>(bytes);
                [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
            }
        }
        unsafe {
            let ([low0, high0], [low1, high1]) = (half(p), half(p.add(8)));
            [Self(low0, low1), Self(high0, high1)]
        }
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
}

/// Plain arrays.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

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
    const HALF_TILE_ROWS: usize = 4;

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
    unsafe fn load_bf16(p: *const u16) -> Self {
        let halves = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        Self(halves.map(|half| f32::from_bits(u32::from(half) << 16)))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        Self(unsafe { p.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [Self; 2] {
        let bytes = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        [
            Self(bytes.map(|byte| f32::from(byte & 15))),
            Self(bytes.map(|byte| f32::from(byte >> 4))),
        ]
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
}
