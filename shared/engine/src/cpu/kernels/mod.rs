//! The numeric inner loops and the thread pool: the only place of this crate where `unsafe` is allowed.
//!
//! Every function exported from here is safe and checks the sizes it relies on. Each kernel is written once over
//! [`lanes::Lanes`] and compiled for AVX-512, AVX2 and a portable form; [`Isa`] picks one at run time. All forms
//! of one kernel work in the same order; the two with fused multiply-add give the same bits.
#![allow(unsafe_code)]

mod attention;
mod head;
mod lanes;
mod linear;
mod packed;
mod pointwise;
mod pool;

pub(crate) use attention::{AttentionShape, KvLayer, RowView, attend, store_rows};
pub(crate) use head::select;
pub(crate) use linear::{Epilogue, linear};
pub(crate) use packed::PackedLinear;
pub(crate) use pointwise::{NormWeights, RotaryRows, rms_norm, rotate};
pub(crate) use pool::ThreadPool;

/// Instruction set that the kernels were chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512F: sixteen f32 in one register.
    Avx512,
    /// AVX2 with FMA: sixteen f32 in two registers.
    Avx2,
    /// Whatever the compiler makes of arrays of sixteen f32.
    Portable,
}

impl Isa {
    /// The best that this processor has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// Name in the numerics profile.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }
}

/// Calls a kernel `unsafe fn name<L: Lanes>(args)` in the form for `isa`.
///
/// Each arm wraps the generic body in a function with the target features enabled; the body is
/// `#[inline(always)]`, so it is compiled with them.
macro_rules! dispatch {
    ($isa:expr, $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?) => {{
        use $crate::cpu::kernels::{Isa, lanes};
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx2,fma")]
        unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the caller of `dispatch!` upholds the kernel's contract.
            unsafe { $name::<lanes::Avx512>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: as above.
            unsafe { $name::<lanes::Avx2>($($arg),*) }
        }
        // SAFETY: `Isa::detect` found the features, and the caller upholds the kernel's contract.
        unsafe {
            match $isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512($($arg),*),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2($($arg),*),
                _ => $name::<lanes::Portable>($($arg),*),
            }
        }
    }};
}
use dispatch;

/// A mutable slice that several threads write at once, each its own part.
struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the methods hand out parts only under the contract that no two threads use overlapping ones.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            borrow: std::marker::PhantomData,
        }
    }

    /// # Safety
    /// No two live parts may overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(
            start + len <= self.len,
            "part {start}+{len} of {}",
            self.len
        );
        // SAFETY: in bounds by the assertion, exclusive by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}
