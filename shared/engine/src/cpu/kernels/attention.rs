//! Attention over paged KV, in absolute tiles and position order.
//!
//! A row's result is a bitwise function of the keys and values on its own path: scores are computed per key as one
//! chain over the head dimension, then everything runs over the row's keys in position order, wherever in the
//! cache they lie. A tree node therefore gets the bits that plain decoding gives the same tokens.
//!
//! Queries of one sequence and kv head share the loads of keys and values in tiles ([`query_tile`]); every query
//! keeps its own chains, so the tile it is in does not show in its bits.

mod attend_tile;
mod query_tile;
mod scores;
mod values;

use std::cell::RefCell;
use std::ops::Range;

use self::attend_tile::{attend_tile, tile_queries};
use self::query_tile::QueryTile;
use super::even_tiles::EvenTiles;
use super::lanes::LANES;
use super::pool::ThreadPool;
use super::{Isa, SharedMut};
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

    /// Query heads that share one head of keys and values.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
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
    /// End of the slots that prefix and tail name.
    fn slots_end(&self) -> usize {
        let tail = self.tail.iter().max().map_or(0, |&slot| slot as usize + 1);
        tail.max(self.prefix.end)
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
    // Few queries are dealt out to all threads, many in whole tiles.
    let share = (views.len() * shape.heads).div_ceil(pool.threads());
    let most = tile_queries(isa).min(share.max(1));
    let mut tiles = TILES.take();
    tiles.clear();
    let mut start = 0;
    for run in views.chunk_by(|a, b| std::ptr::eq(a.table, b.table)) {
        check_run(layer, run);
        let end = start + run.len();
        let first = start * shape.group();
        let even = EvenTiles::new(end * shape.group() - first, most);
        tiles.extend(even.iter().map(|tile| first + tile.start..first + tile.end));
        start = end;
    }
    let out = SharedMut::new(out);
    pool.for_ranges(tiles.len() * shape.kv_heads, 1, &|items| {
        for item in items {
            // Tiles of one kv head follow each other, so that its keys and values stay in the cache.
            let tile = QueryTile {
                layer,
                views,
                kv_head: item / tiles.len(),
                range: tiles[item % tiles.len()].clone(),
            };
            attend_tile(isa, &tile, queries, &out);
        }
    });
    TILES.set(tiles);
}

thread_local! {
    /// Query tiles of a call, kept for the next.
    static TILES: RefCell<Vec<Range<usize>>> = const { RefCell::new(Vec::new()) };
}

/// Checks that rows of one sequence see only slots inside the storage.
fn check_run(layer: &KvLayer, run: &[RowView<'_>]) {
    let table = run[0].table;
    let stored = layer.keys.len() / layer.shape.block_len();
    assert!(table.blocks().iter().all(|b| (b.0 as usize) < stored));
    for view in run {
        assert!(view.prefix.start <= view.prefix.end);
        assert!(
            !view.prefix.is_empty() || !view.tail.is_empty(),
            "a row sees at least itself"
        );
        let end = view.slots_end();
        assert!(end <= table.capacity(), "slot {} has no block", end - 1);
    }
}

#[cfg(test)]
mod tests;
