//! Paged KV: which block of the cache holds which positions of a sequence. Pure bookkeeping; the bytes are the
//! backend's.

use crate::EngineError;

/// Token rows per KV block, and the absolute tile of attention: keys are scored in tiles of this many positions
/// counted from the start of the sequence.
pub const BLOCK_TOKENS: usize = 16;

/// Index of a block in a backend's KV storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Free list over the blocks of a backend.
#[derive(Debug, Clone)]
pub struct BlockPool {
    free: Vec<BlockId>,
    total: usize,
}

impl BlockPool {
    /// A pool of `total` free blocks.
    pub fn new(total: usize) -> Self {
        let free = (0..total as u32).rev().map(BlockId).collect();
        Self { free, total }
    }

    /// Blocks that nobody holds.
    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// All blocks, held or not.
    pub fn total_blocks(&self) -> usize {
        self.total
    }

    /// Extends `table` until it holds `tokens` rows.
    ///
    /// # Errors
    /// [`EngineError::OutOfBlocks`]; the table is unchanged then.
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> Result<(), EngineError> {
        let wanted = tokens
            .div_ceil(BLOCK_TOKENS)
            .saturating_sub(table.blocks.len());
        if wanted > self.free.len() {
            return Err(EngineError::OutOfBlocks {
                wanted,
                free: self.free.len(),
            });
        }
        let kept = self.free.len() - wanted;
        table.blocks.extend(self.free.drain(kept..).rev());
        Ok(())
    }

    /// Takes all blocks of `table` back.
    pub fn release(&mut self, table: &mut BlockTable) {
        self.free.append(&mut table.blocks);
    }

    /// Takes the first `count` blocks of `table` back: the oldest rows of a sliding context.
    pub fn release_front(&mut self, table: &mut BlockTable, count: usize) {
        self.free.extend(table.blocks.drain(..count));
    }
}

/// The blocks of one sequence in position order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
}

impl BlockTable {
    /// Rows that fit.
    pub fn capacity(&self) -> usize {
        self.blocks.len() * BLOCK_TOKENS
    }

    /// The blocks, first positions first.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Block and row inside it of the `slot`-th row of the sequence. `slot` must be below [`BlockTable::capacity`].
    pub fn locate(&self, slot: usize) -> (BlockId, usize) {
        (self.blocks[slot / BLOCK_TOKENS], slot % BLOCK_TOKENS)
    }

    /// Checks that the rows `path` behind the first `committed` can be compacted: they ascend, so that no copy
    /// overwrites a row still to be read, and they lie inside the table.
    ///
    /// # Errors
    ///
    /// [`EngineError::InvalidBatch`] where they do not.
    pub fn check_path(&self, committed: usize, path: &[usize]) -> Result<(), EngineError> {
        let ascends = path.windows(2).all(|pair| pair[0] < pair[1]);
        let fits = path
            .last()
            .is_none_or(|last| committed + last < self.capacity());
        if !ascends || !fits {
            return Err(EngineError::InvalidBatch(format!(
                "cannot compact path {path:?} behind {committed} rows"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_and_releases_without_losing_blocks() {
        let mut pool = BlockPool::new(4);
        let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
        pool.grow(&mut a, 17).unwrap();
        assert_eq!((a.capacity(), pool.free_blocks()), (32, 2));
        assert!(matches!(
            pool.grow(&mut b, 49),
            Err(EngineError::OutOfBlocks { wanted: 4, free: 2 })
        ));
        assert_eq!(b.capacity(), 0);
        pool.grow(&mut a, 20).unwrap();
        assert_eq!(a.capacity(), 32);
        pool.release_front(&mut a, 1);
        assert_eq!((a.capacity(), pool.free_blocks()), (16, 3));
        pool.release(&mut a);
        assert_eq!(pool.free_blocks(), 4);
    }

    #[test]
    fn takes_only_paths_that_ascend_inside_the_table() {
        let mut table = BlockTable::default();
        BlockPool::new(1).grow(&mut table, BLOCK_TOKENS).unwrap();
        for path in [&[][..], &[0], &[0, 2, 5]] {
            table.check_path(10, path).unwrap();
        }
        for path in [&[6][..], &[2, 1], &[3, 3]] {
            assert!(
                matches!(
                    table.check_path(10, path),
                    Err(EngineError::InvalidBatch(_))
                ),
                "{path:?}"
            );
        }
    }
}
