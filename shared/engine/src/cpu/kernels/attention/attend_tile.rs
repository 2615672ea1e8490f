//! Attention of one tile of queries.

use std::cell::RefCell;

use super::super::lanes::{LANES, Lanes};
use super::super::{Isa, SharedMut, dispatch};
use super::query_tile::QueryTile;
use super::scores::{gather_tail, list_tail_blocks, score_blocks, softmax};
use super::values::{weigh_slots, weigh_tail};
use crate::kv_cache::BlockId;

/// Largest tile of any instruction set.
const MAX_QUERIES: usize = 6;

/// Queries of a tile for `isa`.
pub(super) fn tile_queries(isa: Isa) -> usize {
    dispatch!(isa, queries_of() -> usize)
}

#[inline(always)]
unsafe fn queries_of<L: Lanes>() -> usize {
    L::TILE_QUERIES
}

/// Attention of one tile of `queries` into `out`, both `[rows, heads * head_dim]`. Concurrent calls must have
/// disjoint tiles; slots of the views were checked.
pub(super) fn attend_tile(
    isa: Isa,
    tile: &QueryTile<'_>,
    queries: &[f32],
    out: &SharedMut<'_, f32>,
) {
    dispatch!(isa, tile_lanes(tile: &QueryTile<'_>, queries: &[f32], out: &SharedMut<'_, f32>));
}

/// Buffers of one tile, kept by each thread.
#[derive(Default)]
struct Scratch {
    /// `[head_dim][queries]`, so that a step over the head dimension reads one place.
    queries: Vec<f32>,
    /// Scores, then weights, `[queries][stride]` by slot from the start of [`QueryTile::scored`], each query's tail
    /// right behind its own prefix.
    scores: Vec<f32>,
    stride: usize,
    /// Blocks that hold slots of a tail.
    tail_blocks: Vec<BlockId>,
    /// Scores of these blocks, `[queries][blocks * 16]`.
    tail_scores: Vec<f32>,
    /// Weighted sums, `[queries][padded head_dim]`.
    sums: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

impl Scratch {
    fn prepare(&mut self, tile: &QueryTile<'_>, queries: &[f32]) {
        let (shape, count) = (tile.layer.shape, tile.range.len());
        let scored = tile.scored();
        let longest = tile.rows().iter().map(|view| view.tail.len()).max();
        self.stride = scored.len() + longest.unwrap_or(0).next_multiple_of(LANES);
        list_tail_blocks(tile, &mut self.tail_blocks);
        grow(&mut self.scores, count * self.stride);
        grow(
            &mut self.tail_scores,
            count * self.tail_blocks.len() * LANES,
        );
        grow(&mut self.queries, count * shape.head_dim);
        grow(&mut self.sums, count * shape.padded_dim());
        self.sums.fill(0.0);
        for t in 0..count {
            let query = &queries[tile.place(t)..][..shape.head_dim];
            for (packed, x) in self.queries[t..].iter_mut().step_by(count).zip(query) {
                *packed = *x;
            }
        }
    }
}

/// Makes room for `len` elements. What is there stays: it costs time to clear and is not read.
fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

/// Calls `step::<L, Q>(args)` for a tile of `$count` queries.
macro_rules! with_queries {
    ($count:expr, $step:ident::<$lanes:ident>($($arg:expr),* $(,)?)) => {
        match $count {
            1 => $step::<$lanes, 1>($($arg),*),
            2 => $step::<$lanes, 2>($($arg),*),
            3 => $step::<$lanes, 3>($($arg),*),
            4 => $step::<$lanes, 4>($($arg),*),
            5 => $step::<$lanes, 5>($($arg),*),
            6 => $step::<$lanes, 6>($($arg),*),
            _ => unreachable!("a tile has 1 to {MAX_QUERIES} queries"),
        }
    };
}

/// # Safety
/// Slots of the views lie inside the storage, and nobody else writes the outputs of this tile.
#[inline(always)]
unsafe fn tile_lanes<L: Lanes>(tile: &QueryTile<'_>, queries: &[f32], out: &SharedMut<'_, f32>) {
    // Taken out rather than borrowed in a closure: a closure would be compiled without the target features.
    let mut scratch = SCRATCH.take();
    scratch.prepare(tile, queries);
    // SAFETY: the caller's contract; the scratch was prepared for this tile.
    unsafe {
        score_keys::<L>(tile, &mut scratch);
        let totals = score_softmax::<L>(tile, &mut scratch);
        weigh_values::<L>(tile, &mut scratch, &totals, out);
    }
    SCRATCH.set(scratch);
}

/// Scores of the prefixes, and of the blocks that hold the tails.
///
/// # Safety
/// The blocks lie inside the storage, and `scratch` was prepared for the tile.
#[inline(always)]
unsafe fn score_keys<L: Lanes>(tile: &QueryTile<'_>, scratch: &mut Scratch) {
    let scored = tile.scored();
    let prefix = &tile.blocks()[scored.start / LANES..scored.end / LANES];
    let tail = &scratch.tail_blocks[..];
    let scores = scratch.scores.as_mut_ptr();
    let tail_scores = scratch.tail_scores.as_mut_ptr();
    for (blocks, scores, stride) in [
        (prefix, scores, scratch.stride),
        (tail, tail_scores, tail.len() * LANES),
    ] {
        let queries = scratch.queries.as_ptr();
        // SAFETY: the scratch has room for all queries, and the caller's contract.
        unsafe {
            with_queries!(
                tile.range.len(),
                score_blocks::<L>(tile, queries, blocks, scores, stride)
            );
        }
    }
}

/// Softmax of each query over its own keys, tail included. Returns the sums.
///
/// # Safety
/// `scratch` holds the scores of the tile.
#[inline(always)]
unsafe fn score_softmax<L: Lanes>(
    tile: &QueryTile<'_>,
    scratch: &mut Scratch,
) -> [f32; MAX_QUERIES] {
    let start = tile.scored().start;
    let tail_stride = scratch.tail_blocks.len() * LANES;
    let mut totals = [0.0; MAX_QUERIES];
    for (t, total) in totals[..tile.range.len()].iter_mut().enumerate() {
        let view = tile.view(t);
        // Tiles are absolute: the first may hold slots before the window, which weigh nothing.
        let first = view.prefix.start / LANES * LANES;
        let prefix = view.prefix.end - first;
        let keys = prefix + view.tail.len();
        let own = t * scratch.stride + (first - start);
        let own = &mut scratch.scores[own..][..keys.next_multiple_of(LANES)];
        let tail_scores = &scratch.tail_scores[t * tail_stride..];
        gather_tail(view, &scratch.tail_blocks, tail_scores, &mut own[prefix..]);
        // SAFETY: `own` is whole tiles.
        *total = unsafe { softmax::<L>(own, view.prefix.start - first, keys) };
    }
    totals
}

/// Weighted sums of values. Every query adds its own keys in position order; those that all prefixes hold are added
/// for all queries at once.
///
/// # Safety
/// As [`tile_lanes`]; `scratch` holds the weights of the tile.
#[inline(always)]
unsafe fn weigh_values<L: Lanes>(
    tile: &QueryTile<'_>,
    scratch: &mut Scratch,
    totals: &[f32; MAX_QUERIES],
    out: &SharedMut<'_, f32>,
) {
    let (shape, count, stride) = (tile.layer.shape, tile.range.len(), scratch.stride);
    let (start, common, dim) = (tile.scored().start, tile.common(), shape.padded_dim());
    let (weights, sums) = (scratch.scores.as_ptr(), scratch.sums.as_mut_ptr());
    // SAFETY: the scratch holds rows of weights and sums for all queries, and the caller's contract.
    unsafe {
        for t in 0..count {
            let prefix = &tile.view(t).prefix;
            let before = prefix.start..common.start.min(prefix.end);
            let weights = weights.add(t * stride + (before.start - start));
            weigh_slots::<L, 1>(tile, before, weights, stride, sums.add(t * dim));
        }
        if !common.is_empty() {
            let weights = weights.add(common.start - start);
            with_queries!(
                count,
                weigh_slots::<L>(tile, common.clone(), weights, stride, sums)
            );
        }
        for (t, total) in totals[..count].iter().enumerate() {
            let view = tile.view(t);
            let (own, sums) = (weights.add(t * stride), sums.add(t * dim));
            let after = common.end.min(view.prefix.end)..view.prefix.end;
            let after_weights = own.add(after.start - start);
            weigh_slots::<L, 1>(tile, after, after_weights, stride, sums);
            let tail_weights = own.add(view.prefix.end - start);
            let out = out.part(tile.place(t), shape.head_dim);
            weigh_tail::<L>(tile, view.tail, tail_weights, sums, *total, out);
        }
    }
}
