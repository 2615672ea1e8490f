//! Queries that share every load of keys and values.

use std::ops::Range;

use super::super::lanes::LANES;
use super::{KvLayer, RowView};
use crate::kv_cache::BlockId;

/// Queries of one sequence and kv head.
///
/// With `group` query heads per kv head, query `i` is head `kv_head * group + i % group` of row `i / group`.
pub(super) struct QueryTile<'a> {
    pub(super) layer: &'a KvLayer,
    /// Views of all rows of the call.
    pub(super) views: &'a [RowView<'a>],
    pub(super) kv_head: usize,
    /// The tile's queries, all of rows with one block table.
    pub(super) range: Range<usize>,
}

impl<'a> QueryTile<'a> {
    /// Views of the rows that the tile touches.
    pub(super) fn rows(&self) -> &'a [RowView<'a>] {
        let group = self.layer.shape.group();
        &self.views[self.range.start / group..self.range.end.div_ceil(group)]
    }

    #[inline(always)]
    pub(super) fn blocks(&self) -> &'a [BlockId] {
        self.rows()[0].table.blocks()
    }

    /// View of the `t`-th query.
    pub(super) fn view(&self, t: usize) -> &'a RowView<'a> {
        &self.views[(self.range.start + t) / self.layer.shape.group()]
    }

    /// Where the `t`-th query lies in queries and output.
    pub(super) fn place(&self, t: usize) -> usize {
        let (shape, query) = (self.layer.shape, self.range.start + t);
        let (row, member) = (query / shape.group(), query % shape.group());
        let head = self.kv_head * shape.group() + member;
        (row * shape.heads + head) * shape.head_dim
    }

    /// Slots of whole tiles that hold every row's prefix.
    pub(super) fn scored(&self) -> Range<usize> {
        let rows = self.rows();
        let start = rows.iter().map(|view| view.prefix.start).min().unwrap_or(0) / LANES * LANES;
        let end = rows.iter().map(|view| view.prefix.end).max().unwrap_or(0);
        start..end.next_multiple_of(LANES)
    }

    /// Slots that every row's prefix holds.
    pub(super) fn common(&self) -> Range<usize> {
        let rows = self.rows();
        let start = rows.iter().map(|view| view.prefix.start).max().unwrap_or(0);
        let end = rows.iter().map(|view| view.prefix.end).min().unwrap_or(0);
        start..end.max(start)
    }
}
