//! Sixteen f32 and sixty-four bytes at once, for each instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
pub(super) use portable::Portable;

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
    /// Queries of an attention tile, each with [`Lanes::TILE_QUERY_VECTORS`] accumulators.
    const TILE_QUERIES: usize;
    /// Vectors of keys or values that an attention tile works on at once: four or one.
    const TILE_QUERY_VECTORS: usize;

    /// Four bytes for each of the sixteen lanes.
    type Bytes: Copy;

    /// Sixty-four bytes.
    unsafe fn load_bytes(p: *const u8) -> Self::Bytes;
    /// The low half of every byte, as 0..=15.
    unsafe fn low_nibbles(bytes: Self::Bytes) -> Self::Bytes;
    /// The high half of every byte, as 0..=15.
    unsafe fn high_nibbles(bytes: Self::Bytes) -> Self::Bytes;
    /// Two bits of every byte, from bit `2 * PAIR` on, moved to bits 4 and 5.
    unsafe fn bit_pairs<const PAIR: u32>(bytes: Self::Bytes) -> Self::Bytes;
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Byte `BYTE` of every lane, as a whole number 0..=255.
    unsafe fn byte<const BYTE: u32>(bytes: Self::Bytes) -> Self;
    /// The lower bfloat16 of every lane.
    unsafe fn low_bf16(bytes: Self::Bytes) -> Self;
    /// The upper bfloat16 of every lane.
    unsafe fn high_bf16(bytes: Self::Bytes) -> Self;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// Sixteen f16.
    unsafe fn load_f16(p: *const u16) -> Self;
    /// Sixteen bytes 0..=255.
    unsafe fn load_u8(p: *const u8) -> Self;
    /// Sixteen signed bytes.
    unsafe fn load_i8(p: *const i8) -> Self;
    /// The lowest byte of every lane's bits.
    unsafe fn store_low_bytes(self, p: *mut u8);
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

    /// Asks for the cache line of `p`, which may be any address, to be read soon.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}

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

    /// Largest lane, of lanes without NaN.
    unsafe fn largest(self) -> f32;
    /// Sum in whatever order is quickest: for whole numbers whose sum is exact.
    unsafe fn sum_of_whole_numbers(self) -> f32;

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
            // The second operand is what comes out where one is NaN, so NaN stays NaN.
            let x = s(88.0).min(s(-87.0).max(self));
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

/// Exact products of unsigned weight bytes and signed activation bytes.
///
/// # Safety
/// As [`Lanes`].
pub(super) trait IntegerLanes: Lanes {
    /// Rows of a tile whose accumulators fit the register file, [`Lanes::TILE_VECTORS`] vectors of the panel at a time.
    const INTEGER_ROWS: usize;
    /// Sixteen i32.
    type Ints: Copy;

    unsafe fn splat_int(x: i32) -> Self::Ints;
    /// Adds to every lane the products of its four weights, all below 128, and the four activations at `x`, which
    /// are the same for all lanes.
    unsafe fn dot_small(sum: Self::Ints, weights: Self::Bytes, x: *const i32) -> Self::Ints;
    /// Likewise for weights up to 255, each less 128, but for what [`Self::uncentred`] adds.
    unsafe fn dot_full(sum: Self::Ints, weights: Self::Bytes, x: *const i32) -> Self::Ints;
    /// What a sum of [`Self::dot_full`] starts with, where `centring` is -128 times the sum of its activations: that,
    /// or 0 where the instruction set takes the 128 from the weights themselves.
    fn uncentred(centring: i32) -> i32;
    unsafe fn ints_to_f32(ints: Self::Ints) -> Self;
}

/// Sums of products of bfloat16 pairs.
///
/// # Safety
/// As [`Lanes`].
pub(super) trait Bf16Lanes: Lanes {
    /// Adds to every lane the products of its two weights and the two activations at `x`.
    unsafe fn dot_bf16(self, weights: Self::Bytes, x: *const i32) -> Self;
}

#[cfg(test)]
mod tests;
