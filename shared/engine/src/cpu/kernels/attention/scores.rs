//! Scores of keys and their softmax.

use super::super::lanes::{LANES, Lanes};
use super::RowView;
use super::query_tile::QueryTile;
use crate::kv_cache::BlockId;

/// Lists the blocks of all tails of a tile, each once.
pub(super) fn list_tail_blocks(tile: &QueryTile<'_>, list: &mut Vec<BlockId>) {
    list.clear();
    for view in tile.rows() {
        for &slot in view.tail {
            let (block, _) = view.table.locate(slot as usize);
            if !list.contains(&block) {
                list.push(block);
            }
        }
    }
}

/// Scores of all keys of `blocks`: query `t` and block `b` at `scores[t * stride + b * 16..]`.
///
/// # Safety
/// `queries` is `[head_dim][Q]`, the blocks lie inside the storage, and `scores` has room for them.
#[inline(always)]
pub(super) unsafe fn score_blocks<L: Lanes, const Q: usize>(
    tile: &QueryTile<'_>,
    queries: *const f32,
    blocks: &[BlockId],
    scores: *mut f32,
    stride: usize,
) {
    let mut left = blocks;
    let mut scores = scores;
    // SAFETY: the caller's contract; `scores` follows the blocks that are done.
    unsafe {
        if L::TILE_QUERY_VECTORS == 4 {
            while left.len() >= 4 {
                score_tiles::<L, Q, 4>(tile, queries, left, scores, stride);
                (left, scores) = (&left[4..], scores.add(4 * LANES));
            }
        }
        while !left.is_empty() {
            score_tiles::<L, Q, 1>(tile, queries, left, scores, stride);
            (left, scores) = (&left[1..], scores.add(LANES));
        }
    }
}

/// Scores of the first `T` blocks: one chain of multiply-adds over the head dimension per query and key.
///
/// # Safety
/// As [`score_blocks`], with at least `T` blocks.
#[inline(always)]
unsafe fn score_tiles<L: Lanes, const Q: usize, const T: usize>(
    tile: &QueryTile<'_>,
    queries: *const f32,
    blocks: &[BlockId],
    scores: *mut f32,
    stride: usize,
) {
    let layer = tile.layer;
    let mut starts = [layer.keys.as_ptr(); T];
    for (start, &block) in starts.iter_mut().zip(blocks) {
        *start = layer.keys[layer.tile(block, tile.kv_head)..].as_ptr();
    }
    // Blocks lie apart, so the processor does not guess which come next.
    let mut following = starts;
    for (start, &block) in following.iter_mut().zip(&blocks[T..]) {
        *start = layer.keys[layer.tile(block, tile.kv_head)..].as_ptr();
    }
    // SAFETY: each start is followed by a whole tile of keys, and the rest is the caller's contract.
    unsafe {
        let mut acc = [[L::splat(0.0); T]; Q];
        for d in 0..layer.shape.head_dim {
            let mut keys = [L::splat(0.0); T];
            for (i, key) in keys.iter_mut().enumerate() {
                *key = L::load(starts[i].add(d * LANES));
                L::prefetch(following[i].wrapping_add(d * LANES).cast());
            }
            for (t, acc) in acc.iter_mut().enumerate() {
                let query = L::splat(*queries.add(d * Q + t));
                for (acc, key) in acc.iter_mut().zip(keys) {
                    *acc = query.mul_add(key, *acc);
                }
            }
        }
        for (t, acc) in acc.into_iter().enumerate() {
            for (b, acc) in acc.into_iter().enumerate() {
                acc.store(scores.add(t * stride + b * LANES));
            }
        }
    }
}

/// Copies the scores of a tail, in its order, from those of `blocks`.
pub(super) fn gather_tail(
    view: &RowView<'_>,
    blocks: &[BlockId],
    block_scores: &[f32],
    scores: &mut [f32],
) {
    let mut at = 0;
    for (score, &slot) in scores.iter_mut().zip(view.tail) {
        let (block, lane) = view.table.locate(slot as usize);
        if blocks[at] != block {
            let found = blocks.iter().position(|b| *b == block);
            at = found.expect("the blocks of all tails are listed");
        }
        *score = block_scores[at * LANES + lane];
    }
}

/// Replaces scores by `exp(score - max)` and returns their sum. Entries before `hidden` and from `keys` on, whatever
/// they hold, become 0.
///
/// # Safety
/// `scores` is whole tiles.
#[inline(always)]
pub(super) unsafe fn softmax<L: Lanes>(scores: &mut [f32], hidden: usize, keys: usize) -> f32 {
    scores[..hidden].fill(f32::NEG_INFINITY);
    scores[keys..].fill(f32::NEG_INFINITY);
    // SAFETY: the caller's contract.
    unsafe {
        let shift = L::splat(-largest::<L>(scores));
        let mut sum = L::splat(0.0);
        let last = scores.len() - LANES;
        for start in (0..scores.len()).step_by(LANES) {
            let place = scores[start..][..LANES].as_mut_ptr();
            let mut weights = L::load(place).add(shift).exp();
            weights.store(place);
            if start == 0 || start == last {
                // `exp` clamps its input, so what is not seen is zeroed by hand.
                scores[..hidden].fill(0.0);
                scores[keys..].fill(0.0);
                weights = L::load(scores[start..][..LANES].as_ptr());
            }
            sum = sum.add(weights);
        }
        sum.sum()
    }
}

/// Largest of whole tiles, in four chains because one alone waits on its own latency.
///
/// # Safety
/// `scores` is whole tiles.
#[inline(always)]
unsafe fn largest<L: Lanes>(scores: &[f32]) -> f32 {
    // SAFETY: the caller's contract.
    unsafe {
        let mut max = [L::splat(f32::NEG_INFINITY); 4];
        for tiles in scores.chunks(4 * LANES) {
            for (tile, max) in tiles.chunks_exact(LANES).zip(&mut max) {
                *max = max.max(L::load(tile.as_ptr()));
            }
        }
        let [a, b, c, d] = max;
        a.max(b).max(c.max(d)).largest()
    }
}
