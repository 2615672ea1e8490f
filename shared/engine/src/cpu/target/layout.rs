//! The rows of a batch in the KV cache.

use super::super::kernels::{RotaryRows, RowView};
use crate::batch::{RowBatch, RowShape};
use crate::kv_cache::BlockId;

/// Where the rows of a batch lie in the cache, and what each sees.
pub(super) struct Layout {
    pub(super) rotary: RotaryRows,
    pub(super) slots: Vec<(BlockId, usize)>,
    /// Slots of all rows' tails, one after the other.
    tails: Vec<u32>,
    /// End of each row's tail in `tails`.
    tail_ends: Vec<usize>,
}

impl Layout {
    pub(super) fn new(batch: &RowBatch<'_>, inverse_frequencies: &[f32]) -> Self {
        let positions = batch
            .sequences
            .iter()
            .flat_map(|s| (0..s.tokens.len()).map(|row| s.position(row)));
        let mut layout = Self {
            rotary: RotaryRows::new(inverse_frequencies, positions),
            slots: Vec::new(),
            tails: Vec::new(),
            tail_ends: Vec::new(),
        };
        for sequence in &batch.sequences {
            for row in 0..sequence.tokens.len() {
                layout
                    .slots
                    .push(sequence.table.locate(sequence.committed + row));
                if let RowShape::Tree { ancestors, .. } = sequence.shape {
                    let slots = ancestors.iter(row).map(|a| (sequence.committed + a) as u32);
                    layout.tails.extend(slots);
                }
                layout.tail_ends.push(layout.tails.len());
            }
        }
        layout
    }

    pub(super) fn views<'a>(&'a self, batch: &'a RowBatch<'_>) -> Vec<RowView<'a>> {
        let mut views = Vec::with_capacity(self.slots.len());
        let mut start = 0;
        for sequence in &batch.sequences {
            for row in 0..sequence.tokens.len() {
                let end = self.tail_ends[views.len()];
                let prefix = match sequence.shape {
                    RowShape::Chain => 0..sequence.committed + row + 1,
                    RowShape::Tree { .. } => 0..sequence.committed,
                };
                views.push(RowView {
                    table: sequence.table,
                    prefix,
                    tail: &self.tails[start..end],
                });
                start = end;
            }
        }
        views
    }
}
