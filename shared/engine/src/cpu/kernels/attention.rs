//! Attention over paged KV, in absolute tiles and position order.
//!
//! A row's result is a bitwise function of the keys and values on its own path: scores are computed per key as one
//! chain over the head dimension, then everything runs over the row's keys in position order, wherever in the
//! cache they lie. A tree node therefore gets the bits that plain decoding gives the same tokens.

use std::ops::Range;

use super::lanes::{LANES, Lanes};
use super::pool::ThreadPool;
use super::{Isa, SharedMut, dispatch};
use crate::kv_cache::{BLOCK_TOKENS, BlockId, BlockTable};

// Keys are stored transposed in tiles of one block, so that a vector load serves sixteen positions.
const _: () = assert!(BLOCK_TOKENS == LANES);

/// Sizes of the attention of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttentionShape {
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub(crate) kv_heads: usize,
    /// Elements per head.
    pub(crate) head_dim: usize,
}

impl AttentionShape {
    /// Elements per head in the cache: padded with zeros to whole vectors.
    fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Elements of one block of keys or values.
    fn block_len(&self) -> usize {
        self.kv_heads * self.padded_dim() * BLOCK_TOKENS
    }
}

/// Keys and values of one layer.
///
/// Keys are `[block][kv head][dimension][16 rows]`, values `[block][kv head][16 rows][dimension]`.
pub(crate) struct KvLayer {
    keys: Vec<f32>,
    values: Vec<f32>,
    shape: AttentionShape,
}

impl KvLayer {
    /// Storage for `blocks` blocks. The operating system backs it as it is used.
    pub(crate) fn new(shape: AttentionShape, blocks: usize) -> Self {
        Self {
            keys: vec![0.0; blocks * shape.block_len()],
            values: vec![0.0; blocks * shape.block_len()],
            shape,
        }
    }

    /// Copies the keys and values of row `from` to row `to`.
    pub(crate) fn move_row(&mut self, from: (BlockId, usize), to: (BlockId, usize)) {
        let dim = self.shape.padded_dim();
        for head in 0..self.shape.kv_heads {
            let (source, target) = (self.tile(from.0, head), self.tile(to.0, head));
            for d in 0..dim {
                self.keys[target + d * BLOCK_TOKENS + to.1] =
                    self.keys[source + d * BLOCK_TOKENS + from.1];
            }
            let start = source + from.1 * dim;
            self.values
                .copy_within(start..start + dim, target + to.1 * dim);
        }
    }

    fn tile(&self, block: BlockId, head: usize) -> usize {
        block.0 as usize * self.shape.block_len() + head * self.shape.padded_dim() * BLOCK_TOKENS
    }
}

/// What one row sees.
#[derive(Debug, Clone)]
pub(crate) struct RowView<'a> {
    /// Blocks of its sequence.
    pub(crate) table: &'a BlockTable,
    /// Slots seen without exception.
    pub(crate) prefix: Range<usize>,
    /// Further slots in position order: the row's ancestors and itself.
    pub(crate) tail: &'a [u32],
}

impl RowView<'_> {
    fn last_slot(&self) -> Option<usize> {
        let tail = self.tail.iter().max().map(|&s| s as usize);
        tail.max(self.prefix.end.checked_sub(1))
    }
}

/// Writes keys and values of new rows to the cache. `kv` is `[rows, 2 * kv_heads * head_dim]`, keys first, already
/// rotated; row `i` goes to `slots[i]`.
///
/// # Panics
/// When a slot lies outside the storage or sizes do not match.
pub(crate) fn store_rows(layer: &mut KvLayer, kv: &[f32], slots: &[(BlockId, usize)]) {
    let AttentionShape {
        kv_heads, head_dim, ..
    } = layer.shape;
    let width = kv_heads * head_dim;
    assert_eq!(
        kv.len(),
        slots.len() * 2 * width,
        "keys and values of new rows"
    );
    let dim = layer.shape.padded_dim();
    for (row, &(block, index)) in kv.chunks_exact(2 * width).zip(slots) {
        let (keys, values) = row.split_at(width);
        for head in 0..kv_heads {
            let tile = layer.tile(block, head);
            let own = head * head_dim..(head + 1) * head_dim;
            for (d, key) in keys[own.clone()].iter().enumerate() {
                layer.keys[tile + d * BLOCK_TOKENS + index] = *key;
            }
            let start = tile + index * dim;
            layer.values[start..start + head_dim].copy_from_slice(&values[own]);
        }
    }
}

/// Attention of all rows: `queries` is `[rows, heads * head_dim]`, rotated and scaled; `out` likewise.
///
/// # Panics
/// When a view leaves the storage or sizes do not match.
pub(crate) fn attend(
    pool: &mut ThreadPool,
    isa: Isa,
    queries: &[f32],
    layer: &KvLayer,
    views: &[RowView<'_>],
    out: &mut [f32],
) {
    let shape = layer.shape;
    let width = shape.heads * shape.head_dim;
    assert!(queries.len() == views.len() * width && out.len() == queries.len());
    for view in views {
        let last = view.last_slot().expect("a row sees at least itself");
        assert!(last < view.table.capacity(), "slot {last} has no block");
        let stored = layer.keys.len() / shape.block_len();
        assert!(view.table.blocks().iter().all(|b| (b.0 as usize) < stored));
    }
    let out = SharedMut::new(out);
    let group = shape.heads / shape.kv_heads;
    pool.for_ranges(views.len() * shape.kv_heads, 1, &|items| {
        let mut scores = Vec::new();
        for item in items {
            let (row, kv_head) = (item / shape.kv_heads, item % shape.kv_heads);
            for head in kv_head * group..(kv_head + 1) * group {
                let start = row * width + head * shape.head_dim;
                let query = &queries[start..start + shape.head_dim];
                // SAFETY: every (row, head) is one part, handled by one thread.
                let out = unsafe { out.part(start, shape.head_dim) };
                attend_head(isa, query, layer, kv_head, &views[row], &mut scores, out);
            }
        }
    });
}

fn attend_head(
    isa: Isa,
    query: &[f32],
    layer: &KvLayer,
    kv_head: usize,
    view: &RowView<'_>,
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    dispatch!(isa, head_lanes(query: &[f32], layer: &KvLayer, kv_head: usize, view: &RowView<'_>, scores: &mut Vec<f32>, out: &mut [f32]));
}

/// # Safety
/// All slots of `view` lie inside the storage; `query` and `out` hold `head_dim` elements.
#[inline(always)]
unsafe fn head_lanes<L: Lanes>(
    query: &[f32],
    layer: &KvLayer,
    kv_head: usize,
    view: &RowView<'_>,
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    // Tiles are absolute: the first may hold slots before the window, which weigh nothing.
    let first = view.prefix.start / LANES * LANES;
    let hidden = view.prefix.start - first;
    let prefix = view.prefix.end - first;
    let keys = prefix + view.tail.len();
    let padded = keys.next_multiple_of(LANES);
    scores.clear();
    scores.resize(
        padded.max(prefix.next_multiple_of(LANES)),
        f32::NEG_INFINITY,
    );
    // SAFETY: the caller's contract; `scores` holds whole tiles for the prefix and room for the tail.
    unsafe {
        score_prefix::<L>(query, layer, kv_head, view, first, prefix, scores);
        score_tail::<L>(query, layer, kv_head, view, prefix, scores);
        scores[..hidden].fill(f32::NEG_INFINITY);
        scores[keys..].fill(f32::NEG_INFINITY);
        let sum = softmax::<L>(&mut scores[..padded], hidden, keys);
        let weights = &scores[..keys];
        let vectors = layer.shape.padded_dim() / LANES;
        let mut vector = 0;
        while vector < vectors {
            let step = if vectors - vector >= 4 { 4 } else { 1 };
            let place = Place {
                layer,
                kv_head,
                vector,
            };
            if step == 4 {
                weigh_values::<L, 4>(weights, view, first, prefix, place, sum, out);
            } else {
                weigh_values::<L, 1>(weights, view, first, prefix, place, sum, out);
            }
            vector += step;
        }
    }
}

/// Scores of slots `first..first + prefix`, four tiles at a time because one chain of multiply-adds alone waits on
/// its own latency.
///
/// # Safety
/// As [`head_lanes`]; `scores` holds `prefix` rounded up to whole tiles.
#[inline(always)]
unsafe fn score_prefix<L: Lanes>(
    query: &[f32],
    layer: &KvLayer,
    kv_head: usize,
    view: &RowView<'_>,
    first: usize,
    prefix: usize,
    scores: &mut [f32],
) {
    let blocks = &view.table.blocks()[first / LANES..][..prefix.div_ceil(LANES)];
    let mut tile = 0;
    for four in blocks.chunks(4) {
        let starts: [*const f32; 4] = std::array::from_fn(|i| {
            let block = four[i.min(four.len() - 1)];
            layer.keys[layer.tile(block, kv_head)..].as_ptr()
        });
        // SAFETY: each start is followed by a whole tile of keys.
        unsafe {
            let mut acc = [L::splat(0.0); 4];
            for (d, &q) in query.iter().enumerate() {
                let q = L::splat(q);
                for (acc, start) in acc.iter_mut().zip(starts) {
                    *acc = q.mul_add(L::load(start.add(d * LANES)), *acc);
                }
            }
            for acc in &acc[..four.len()] {
                acc.store(scores[tile * LANES..][..LANES].as_mut_ptr());
                tile += 1;
            }
        }
    }
}

/// Scores of the tail's slots, gathered behind the prefix.
///
/// # Safety
/// As [`head_lanes`].
#[inline(always)]
unsafe fn score_tail<L: Lanes>(
    query: &[f32],
    layer: &KvLayer,
    kv_head: usize,
    view: &RowView<'_>,
    prefix: usize,
    scores: &mut [f32],
) {
    let mut scored = (usize::MAX, [0.0; LANES]);
    for (i, &slot) in view.tail.iter().enumerate() {
        let (tile, lane) = (slot as usize / LANES, slot as usize % LANES);
        if tile != scored.0 {
            let keys = layer.keys[layer.tile(view.table.blocks()[tile], kv_head)..].as_ptr();
            // SAFETY: a whole tile of keys follows.
            unsafe {
                let mut acc = L::splat(0.0);
                for (d, &q) in query.iter().enumerate() {
                    acc = L::splat(q).mul_add(L::load(keys.add(d * LANES)), acc);
                }
                scored = (tile, acc.to_array());
            }
        }
        scores[prefix + i] = scored.1[lane];
    }
}

/// Replaces scores by `exp(score - max)` and returns their sum; entries before `hidden` and from `keys` on become 0.
///
/// # Safety
/// `scores` is whole tiles.
#[inline(always)]
unsafe fn softmax<L: Lanes>(scores: &mut [f32], hidden: usize, keys: usize) -> f32 {
    // SAFETY: the caller's contract.
    unsafe {
        let mut max = L::splat(f32::NEG_INFINITY);
        for tile in scores.chunks_exact(LANES) {
            max = max.max(L::load(tile.as_ptr()));
        }
        let shift = L::splat(-max.largest());
        for tile in scores.chunks_exact_mut(LANES) {
            L::load(tile.as_ptr())
                .add(shift)
                .exp()
                .store(tile.as_mut_ptr());
        }
        // `exp` clamps its input, so what is not seen is zeroed by hand.
        scores[..hidden].fill(0.0);
        scores[keys..].fill(0.0);
        let mut sum = L::splat(0.0);
        for tile in scores.chunks_exact(LANES) {
            sum = sum.add(L::load(tile.as_ptr()));
        }
        sum.sum()
    }
}

/// Which values: layer, head, and the first vector of the head dimension.
#[derive(Clone, Copy)]
struct Place<'a> {
    layer: &'a KvLayer,
    kv_head: usize,
    vector: usize,
}

/// `out = sum(weight * value) / sum` for `N` vectors of the head dimension, one value row after the other.
///
/// # Safety
/// As [`head_lanes`].
#[inline(always)]
unsafe fn weigh_values<L: Lanes, const N: usize>(
    weights: &[f32],
    view: &RowView<'_>,
    first: usize,
    prefix: usize,
    place: Place<'_>,
    sum: f32,
    out: &mut [f32],
) {
    let dim = place.layer.shape.padded_dim();
    let row_start = |slot: usize| {
        let block = view.table.blocks()[slot / LANES];
        let tile = place.layer.tile(block, place.kv_head);
        place.layer.values[tile + (slot % LANES) * dim + place.vector * LANES..].as_ptr()
    };
    // SAFETY: `row_start` points at N vectors of a value row.
    unsafe {
        let mut acc = [L::splat(0.0); N];
        let mut add = |weight: f32, values: *const f32| {
            let weight = L::splat(weight);
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = weight.mul_add(L::load(values.add(i * LANES)), *acc);
            }
        };
        for (tile, weights) in weights[..prefix].chunks(LANES).enumerate() {
            let values = row_start(first + tile * LANES);
            for (row, &weight) in weights.iter().enumerate() {
                add(weight, values.add(row * dim));
            }
        }
        for (&weight, &slot) in weights[prefix..].iter().zip(view.tail) {
            add(weight, row_start(slot as usize));
        }
        let scale = L::splat(1.0 / sum);
        for (i, acc) in acc.into_iter().enumerate() {
            let start = (place.vector + i) * LANES;
            let values = acc.mul(scale).to_array();
            let count = LANES.min(out.len().saturating_sub(start));
            out[start..start + count].copy_from_slice(&values[..count]);
        }
    }
}

#[cfg(test)]
mod tests;
