//! Weighted sums of values, one value row after the other.

use std::ops::Range;

use super::super::lanes::{LANES, Lanes};
use super::query_tile::QueryTile;

impl QueryTile<'_> {
    /// The value row of a slot.
    #[inline(always)]
    fn value_row(&self, slot: usize) -> *const f32 {
        let layer = self.layer;
        let tile = layer.tile(self.blocks()[slot / LANES], self.kv_head);
        layer.values[tile + slot % LANES * layer.shape.padded_dim()..].as_ptr()
    }
}

/// Adds the weighted values of `slots` to the sums of `Q` queries, slot by slot: query `t` weighs slot `s` by
/// `weights[t * stride + s - slots.start]`, and its sums are at `sums[t * padded head_dim..]`.
///
/// # Safety
/// The slots lie inside the storage; `weights` and `sums` hold `Q` rows.
#[inline(always)]
pub(super) unsafe fn weigh_slots<L: Lanes, const Q: usize>(
    tile: &QueryTile<'_>,
    slots: Range<usize>,
    weights: *const f32,
    stride: usize,
    sums: *mut f32,
) {
    if slots.is_empty() {
        return;
    }
    let vectors = tile.layer.shape.padded_dim() / LANES;
    let mut vector = 0;
    // SAFETY: the caller's contract; `vector` counts vectors of the head dimension.
    unsafe {
        if L::TILE_QUERY_VECTORS == 4 {
            while vectors - vector >= 4 {
                weigh_vectors::<L, Q, 4>(tile, slots.clone(), weights, stride, sums, vector);
                vector += 4;
            }
        }
        while vector < vectors {
            weigh_vectors::<L, Q, 1>(tile, slots.clone(), weights, stride, sums, vector);
            vector += 1;
        }
    }
}

/// [`weigh_slots`] for `N` vectors of the head dimension.
///
/// # Safety
/// As [`weigh_slots`]; the head dimension has `N` vectors from `vector` on.
#[inline(always)]
unsafe fn weigh_vectors<L: Lanes, const Q: usize, const N: usize>(
    tile: &QueryTile<'_>,
    slots: Range<usize>,
    weights: *const f32,
    stride: usize,
    sums: *mut f32,
    vector: usize,
) {
    let dim = tile.layer.shape.padded_dim();
    // SAFETY: the caller's contract; rows of one tile follow each other.
    unsafe {
        let sums = sums.add(vector * LANES);
        let mut acc = [[L::splat(0.0); N]; Q];
        for (t, acc) in acc.iter_mut().enumerate() {
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = L::load(sums.add(t * dim + i * LANES));
            }
        }
        let mut slot = slots.start;
        while slot < slots.end {
            let end = slots.end.min((slot / LANES + 1) * LANES);
            let mut row = tile.value_row(slot).add(vector * LANES);
            // Blocks lie apart, so the processor does not guess which come next.
            let following = if end < slots.end { end } else { slots.start };
            let mut following = tile.value_row(following).add(vector * LANES);
            while slot < end {
                let mut values = [L::splat(0.0); N];
                for (i, value) in values.iter_mut().enumerate() {
                    *value = L::load(row.add(i * LANES));
                    L::prefetch(following.wrapping_add(i * LANES).cast());
                }
                for (t, acc) in acc.iter_mut().enumerate() {
                    let weight = L::splat(*weights.add(t * stride + slot - slots.start));
                    for (acc, value) in acc.iter_mut().zip(values) {
                        *acc = weight.mul_add(value, *acc);
                    }
                }
                slot += 1;
                // Not dereferenced behind the last row, where it may be one past the storage.
                row = row.wrapping_add(dim);
                following = following.wrapping_add(dim);
            }
        }
        for (t, acc) in acc.into_iter().enumerate() {
            for (i, acc) in acc.into_iter().enumerate() {
                acc.store(sums.add(t * dim + i * LANES));
            }
        }
    }
}

/// Adds the weighted values of the slots of `tail` to the sums of one query and writes `sums / total`.
///
/// # Safety
/// The slots lie inside the storage, `weights` holds one weight for each, `sums` a padded head.
#[inline(always)]
pub(super) unsafe fn weigh_tail<L: Lanes>(
    tile: &QueryTile<'_>,
    tail: &[u32],
    weights: *const f32,
    sums: *mut f32,
    total: f32,
    out: &mut [f32],
) {
    let vectors = tile.layer.shape.padded_dim() / LANES;
    // SAFETY: the caller's contract; `vector` counts vectors of the head dimension.
    unsafe {
        let mut weights = weights;
        for run in tail.chunk_by(|a, b| a + 1 == *b) {
            let first = run[0] as usize;
            weigh_slots::<L, 1>(tile, first..first + run.len(), weights, 0, sums);
            weights = weights.add(run.len());
        }
        let scale = L::splat(1.0 / total);
        for vector in 0..vectors {
            let start = vector * LANES;
            let values = L::load(sums.add(start)).mul(scale).to_array();
            let count = LANES.min(out.len().saturating_sub(start));
            out[start..start + count].copy_from_slice(&values[..count]);
        }
    }
}
