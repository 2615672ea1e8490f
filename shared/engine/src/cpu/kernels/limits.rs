//! What a processor does at best: memory that is only read, and products that never leave the registers.
//!
//! All operands are ones. The sums then count what was done, so a compiler that left something out would be noticed.

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use super::lanes::{IntegerLanes, LANES, Lanes};
use super::panel::PREFETCH_BYTES;
use super::pool::ThreadPool;
use super::weight_memory::{WeightMemory, WeightRegion};
use super::{Isa, dispatch, dispatch_bf16, dispatch_integer};

/// Bytes and number of the regions that are read: together more than nearly any processor's caches hold.
const REGION_BYTES: usize = 64 << 20;
const REGIONS: usize = 8;
/// What a thread takes at a time: enough to stream, small enough that all threads end together.
const PIECE_BYTES: usize = 1 << 20;
/// Vectors that are summed side by side.
const READ_CHAINS: usize = 4;

/// Memory to read. It lies in maps like those of weights, so that pages and placement are the same.
pub(crate) struct ReadProbe {
    regions: Vec<WeightRegion>,
}

impl ReadProbe {
    /// Half a gigabyte.
    ///
    /// # Errors
    /// When the operating system has no memory.
    pub(crate) fn new() -> io::Result<Self> {
        Self::of(REGIONS, REGION_BYTES)
    }

    fn of(regions: usize, region_bytes: usize) -> io::Result<Self> {
        let ones = 1f32.to_ne_bytes().repeat(region_bytes / size_of::<f32>());
        let mut memory = WeightMemory::default();
        let regions = (0..regions).map(|_| memory.store(&ones));
        Ok(Self {
            regions: regions.collect::<io::Result<_>>()?,
        })
    }

    /// Reads everything once. Returns the bytes that were read.
    pub(crate) fn read(&self, pool: &mut ThreadPool, isa: Isa) -> u64 {
        let regions = self.regions.iter();
        let pieces: Vec<&[u8]> = regions
            .flat_map(|region| region.bytes().chunks(PIECE_BYTES))
            .collect();
        let values = AtomicU64::new(0);
        pool.for_ranges(pieces.len(), 1, &|range| {
            for &piece in &pieces[range] {
                let sum = dispatch!(isa, sum(piece: &[u8]) -> f32);
                values.fetch_add(sum as u64, Ordering::Relaxed);
            }
        });
        values.into_inner() * size_of::<f32>() as u64
    }
}

/// The sum of the f32 in `bytes`, of which a rest of less than [`READ_CHAINS`] vectors is left out.
///
/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn sum<L: Lanes>(bytes: &[u8]) -> f32 {
    const VECTOR_BYTES: usize = LANES * size_of::<f32>();
    // SAFETY: all vectors lie in the chunk; a prefetch may name any address.
    unsafe {
        let mut sums = [L::splat(0.0); READ_CHAINS];
        for chunk in bytes.as_chunks::<{ READ_CHAINS * VECTOR_BYTES }>().0 {
            for (index, sum) in sums.iter_mut().enumerate() {
                let vector = chunk.as_ptr().add(index * VECTOR_BYTES);
                L::prefetch(vector.wrapping_add(PREFETCH_BYTES));
                *sum = sum.add(L::load(vector.cast()));
            }
        }
        let mut total = sums[0];
        for sum in &sums[1..] {
            total = total.add(*sum);
        }
        total.sum()
    }
}

/// Numbers that linear layers multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Products {
    Int8,
    Bf16,
    F32,
}

impl Products {
    /// Whether `isa` multiplies them.
    pub(crate) fn available(self, isa: Isa) -> bool {
        self != Self::Bf16 || isa.multiplies_bf16()
    }

    /// Multiplies on this thread for some microseconds as fast as it goes. Returns the operations: a product and its
    /// addition are two.
    ///
    /// # Panics
    /// When they are not [available](Self::available).
    pub(crate) fn burst(self, isa: Isa) -> u64 {
        let multiply_adds = match self {
            Self::Int8 => dispatch_integer!(isa, int8_burst() -> f32),
            Self::Bf16 => dispatch_bf16!(isa, bf16_burst() -> f32),
            Self::F32 => dispatch!(isa, f32_burst() -> f32),
        };
        2 * multiply_adds as u64
    }
}

/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn int8_burst<L: IntegerLanes>() -> f32 {
    // SAFETY: the caller's contract.
    unsafe { burst::<L, Int8>() }
}

/// # Safety
/// As [`int8_burst`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn bf16_burst<L: super::lanes::Bf16Lanes>() -> f32 {
    // SAFETY: the caller's contract.
    unsafe { burst::<L, Bf16>() }
}

/// # Safety
/// As [`int8_burst`].
#[inline(always)]
unsafe fn f32_burst<L: Lanes>() -> f32 {
    // SAFETY: the caller's contract.
    unsafe { burst::<L, F32>() }
}

/// Multiply-adds of one kind.
///
/// # Safety
/// As [`Lanes`]; pointers are valid for sixteen words of weights and one of activations.
trait MultiplyAdd<L: Lanes> {
    /// A word full of ones.
    const ONES: u32;
    type Weights: Copy;
    type Sums: Copy;

    unsafe fn weights(p: *const i32) -> Self::Weights;
    unsafe fn zero() -> Self::Sums;
    unsafe fn add(sums: Self::Sums, weights: Self::Weights, x: *const i32) -> Self::Sums;
    unsafe fn finish(sums: Self::Sums) -> L;
}

struct Int8;

impl<L: IntegerLanes> MultiplyAdd<L> for Int8 {
    const ONES: u32 = 0x0101_0101;
    type Weights = L::Bytes;
    type Sums = L::Ints;

    #[inline(always)]
    unsafe fn weights(p: *const i32) -> L::Bytes {
        unsafe { L::load_bytes(p.cast()) }
    }
    #[inline(always)]
    unsafe fn zero() -> L::Ints {
        unsafe { L::splat_int(0) }
    }
    #[inline(always)]
    unsafe fn add(sums: L::Ints, weights: L::Bytes, x: *const i32) -> L::Ints {
        unsafe { L::dot_small(sums, weights, x) }
    }
    #[inline(always)]
    unsafe fn finish(sums: L::Ints) -> L {
        unsafe { L::ints_to_f32(sums) }
    }
}

#[cfg(target_arch = "x86_64")]
struct Bf16;

#[cfg(target_arch = "x86_64")]
impl<L: super::lanes::Bf16Lanes> MultiplyAdd<L> for Bf16 {
    const ONES: u32 = 0x3F80_3F80;
    type Weights = L::Bytes;
    type Sums = L;

    #[inline(always)]
    unsafe fn weights(p: *const i32) -> L::Bytes {
        unsafe { L::load_bytes(p.cast()) }
    }
    #[inline(always)]
    unsafe fn zero() -> L {
        unsafe { L::splat(0.0) }
    }
    #[inline(always)]
    unsafe fn add(sums: L, weights: L::Bytes, x: *const i32) -> L {
        unsafe { sums.dot_bf16(weights, x) }
    }
    #[inline(always)]
    unsafe fn finish(sums: L) -> L {
        sums
    }
}

struct F32;

impl<L: Lanes> MultiplyAdd<L> for F32 {
    const ONES: u32 = 1f32.to_bits();
    type Weights = L;
    type Sums = L;

    #[inline(always)]
    unsafe fn weights(p: *const i32) -> L {
        unsafe { L::load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn zero() -> L {
        unsafe { L::splat(0.0) }
    }
    #[inline(always)]
    unsafe fn add(sums: L, weights: L, x: *const i32) -> L {
        unsafe { weights.mul_add(L::splat(*x.cast()), sums) }
    }
    #[inline(always)]
    unsafe fn finish(sums: L) -> L {
        sums
    }
}

/// Rounds of a burst. Sums stay below 2^24, where f32 count exactly.
const ROUNDS: usize = 1_000;
/// Links that every chain grows by in a round, so that the round's own instructions do not count.
const LINKS: usize = 4;
/// Most chains.
const MOST_CHAINS: usize = 12;

/// The number of multiply-adds of a burst.
///
/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn burst<L: Lanes, M: MultiplyAdd<L>>() -> f32 {
    // Enough chains to hide the latency of an addition, two a cycle, in registers: 32 of one vector, 16 of half a vector,
    // or what an unknown processor has.
    // SAFETY: the caller's contract.
    unsafe {
        match L::TILE_ROWS {
            12.. => chains::<L, M, MOST_CHAINS>(),
            5.. => chains::<L, M, 5>(),
            _ => chains::<L, M, 2>(),
        }
    }
}

/// # Safety
/// As [`burst`].
#[inline(always)]
unsafe fn chains<L: Lanes, M: MultiplyAdd<L>, const CHAINS: usize>() -> f32 {
    const { assert!(CHAINS <= MOST_CHAINS) };
    let weights = [M::ONES as i32; LANES];
    let words = [M::ONES as i32; LINKS * MOST_CHAINS];
    // SAFETY: the pointers stay in the arrays.
    unsafe {
        let weights = M::weights(black_box(weights.as_ptr()));
        let mut sums = [M::zero(); CHAINS];
        for _ in 0..ROUNDS {
            // Unknown words in every round, and one for each product: none can be computed ahead or used twice.
            let x = black_box(words.as_ptr());
            for link in 0..LINKS {
                for (chain, sums) in sums.iter_mut().enumerate() {
                    *sums = M::add(*sums, weights, x.add(link * CHAINS + chain));
                }
            }
        }
        let mut total = 0.0;
        for sums in sums {
            total += M::finish(sums).sum();
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_read_once_on_every_instruction_set() {
        let region = 2 * PIECE_BYTES + 4_096;
        let probe = ReadProbe::of(3, region).unwrap();
        for threads in [1, 3] {
            let mut pool = ThreadPool::new(threads).unwrap();
            for isa in Isa::available() {
                assert_eq!(probe.read(&mut pool, isa), 3 * region as u64, "{isa}");
            }
        }
    }

    #[test]
    fn a_burst_counts_its_operations() {
        for isa in Isa::available() {
            let lanes = 2 * (ROUNDS * LINKS * LANES) as u64;
            let of = |products: Products, values: u64| {
                let chains = products.burst(isa) / (lanes * values);
                assert!([2, 5, 12].contains(&chains), "{isa} {products:?}: {chains}");
                assert_eq!(products.burst(isa), chains * lanes * values, "{isa}");
            };
            of(Products::F32, 1);
            of(Products::Int8, 4);
            if Products::Bf16.available(isa) {
                of(Products::Bf16, 2);
            }
        }
    }
}
