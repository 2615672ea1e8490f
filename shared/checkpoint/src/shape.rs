//! Tensor shapes: row-major, outermost dimension first.

/// Number of elements of `shape`, or `None` when it does not fit into a `usize`.
pub(crate) fn element_count(shape: &[usize]) -> Option<usize> {
    shape
        .iter()
        .try_fold(1usize, |count, &dim| count.checked_mul(dim))
}
