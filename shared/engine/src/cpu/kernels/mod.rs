//! The numeric inner loops and the thread pool: the only place of this crate where `unsafe` is allowed.
//!
//! Every function exported from here is safe and checks the sizes it relies on. Each kernel is written once over
//! [`lanes::Lanes`] and compiled for every instruction set of [`Isa`], which is chosen at run time. All forms
//! of one kernel work in the same order; those with fused multiply-add give the same bits, bfloat16 products apart.
#![allow(unsafe_code)]

mod activations;
mod attention;
mod even_tiles;
mod float;
mod head;
mod integer;
mod isa;
mod lanes;
mod limits;
mod linear;
mod linear_output;
mod pack_column;
mod packed;
mod panel;
mod pointwise;
mod pool;
mod sampling;
mod weight_memory;

pub(crate) use attention::{AttentionShape, KvLayer, RowView, attend, store_rows};
pub(crate) use head::{HeadPass, HeadScratch, select};
pub use isa::{Isa, UnknownIsa};
pub(crate) use limits::{Products, ReadProbe};
pub(crate) use linear::{InputScratch, linear, linear_columns};
pub(crate) use linear_output::Epilogue;
pub(crate) use packed::{PackedLinear, Packer};
pub(crate) use pointwise::{Heads, NormWeights, RotaryRows, rms_norm, rotate};
pub(crate) use pool::ThreadPool;

use super::{PackedWeights, Precision};
use isa::{dispatch, dispatch_bf16, dispatch_integer};

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
