//! Which rows of a drafter's cache hold which positions of which sequence. Pure bookkeeping, the same for every device.

use std::collections::HashMap;

use crate::{BLOCK_TOKENS, BlockPool, BlockTable, ContextId, EngineError};

/// Rows of one sequence in a drafter's cache: slot `i` of the table holds position `first + i`.
#[derive(Debug, Clone, Default)]
pub struct DraftContext {
    /// Blocks of the cache, oldest rows first.
    pub table: BlockTable,
    /// Position of the oldest row.
    pub first: usize,
    /// Rows.
    pub rows: usize,
}

impl DraftContext {
    /// Position behind the newest row: where a block starts.
    pub fn end(&self) -> usize {
        self.first + self.rows
    }
}

/// All open contexts of a drafter. Each is a sliding window of rows that moves by whole blocks.
#[derive(Debug)]
pub struct DraftContexts {
    blocks: BlockPool,
    contexts: HashMap<u64, DraftContext>,
    next: u64,
    max_contexts: usize,
    window: usize,
    block_size: usize,
    context_length: usize,
}

impl DraftContexts {
    /// At most `max_contexts` contexts of `window` rows, which is at least a block, for positions below
    /// `context_length`.
    pub fn new(
        max_contexts: usize,
        window: usize,
        block_size: usize,
        context_length: usize,
    ) -> Self {
        let window = window.max(block_size);
        // One block more than the rows need: the window slides by whole blocks.
        let per_context = (window + block_size).div_ceil(BLOCK_TOKENS) + 1;
        Self {
            blocks: BlockPool::new(per_context * max_contexts),
            contexts: HashMap::new(),
            next: 0,
            max_contexts,
            window,
            block_size,
            context_length,
        }
    }

    /// Blocks of the cache over all contexts.
    pub fn num_blocks(&self) -> usize {
        self.blocks.total_blocks()
    }

    /// Blocks that one context can have.
    pub fn blocks_per_context(&self) -> usize {
        self.num_blocks() / self.max_contexts.max(1)
    }

    /// Rows kept per context.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Opens an empty context.
    ///
    /// # Errors
    /// [`EngineError::OutOfContexts`].
    pub fn open(&mut self) -> Result<ContextId, EngineError> {
        if self.contexts.len() >= self.max_contexts {
            return Err(EngineError::OutOfContexts(self.max_contexts));
        }
        let id = self.next;
        self.next += 1;
        self.contexts.insert(id, DraftContext::default());
        Ok(ContextId::from_raw(id))
    }

    /// Frees a context. An unknown one is ignored.
    pub fn close(&mut self, id: ContextId) {
        if let Some(mut context) = self.contexts.remove(&id.raw()) {
            self.blocks.release(&mut context.table);
        }
    }

    /// An open context.
    ///
    /// # Errors
    /// [`EngineError::UnknownContext`].
    pub fn get(&self, id: ContextId) -> Result<&DraftContext, EngineError> {
        self.contexts
            .get(&id.raw())
            .ok_or(EngineError::UnknownContext(id.raw()))
    }

    /// Prepares for rows of `count` positions from `start`, which must be where the context ends; an empty context may
    /// begin anywhere. Returns how many of the oldest rows are not worth appending because the others fill the window.
    ///
    /// # Errors
    /// [`EngineError::ContextOverflow`], [`EngineError::UnknownContext`] or [`EngineError::ContextGap`].
    pub fn begin_append(
        &mut self,
        id: ContextId,
        start: u32,
        count: usize,
    ) -> Result<usize, EngineError> {
        let end = start as usize + count;
        if end > self.context_length {
            return Err(EngineError::ContextOverflow {
                position: end - 1,
                context_length: self.context_length,
            });
        }
        let context = self
            .contexts
            .get_mut(&id.raw())
            .ok_or(EngineError::UnknownContext(id.raw()))?;
        if context.rows == 0 {
            context.first = start as usize;
        } else if context.end() != start as usize {
            return Err(EngineError::ContextGap {
                start,
                expected: context.end() as u32,
            });
        }
        let skipped = count.saturating_sub(self.window);
        if skipped > 0 {
            self.blocks.release(&mut context.table);
            *context = DraftContext {
                first: start as usize + skipped,
                ..DraftContext::default()
            };
        }
        Ok(skipped)
    }

    /// Slides the window and grows the table so that `count` more rows fit behind the newest.
    ///
    /// # Errors
    /// [`EngineError::UnknownContext`] or [`EngineError::OutOfBlocks`].
    pub fn make_room(&mut self, id: ContextId, count: usize) -> Result<&DraftContext, EngineError> {
        let context = self
            .contexts
            .get_mut(&id.raw())
            .ok_or(EngineError::UnknownContext(id.raw()))?;
        let stale = (context.rows + count).saturating_sub(self.window) / BLOCK_TOKENS;
        let stale = stale.min(context.rows / BLOCK_TOKENS);
        self.blocks.release_front(&mut context.table, stale);
        context.first += stale * BLOCK_TOKENS;
        context.rows -= stale * BLOCK_TOKENS;
        self.blocks.grow(&mut context.table, context.rows + count)?;
        Ok(context)
    }

    /// Counts rows that were written behind the newest.
    ///
    /// # Errors
    /// [`EngineError::UnknownContext`].
    pub fn commit(&mut self, id: ContextId, count: usize) -> Result<(), EngineError> {
        let context = self
            .contexts
            .get_mut(&id.raw())
            .ok_or(EngineError::UnknownContext(id.raw()))?;
        context.rows += count;
        Ok(())
    }

    /// Room for the slots of a block behind the newest row. Slots past the context length cannot be verified, but cutting
    /// them would break the trained block.
    ///
    /// # Errors
    /// [`EngineError::UnknownContext`], [`EngineError::ContextOverflow`] or [`EngineError::OutOfBlocks`].
    pub fn reserve_block(&mut self, id: ContextId) -> Result<&DraftContext, EngineError> {
        let context = self
            .contexts
            .get_mut(&id.raw())
            .ok_or(EngineError::UnknownContext(id.raw()))?;
        if context.end() >= self.context_length {
            return Err(EngineError::ContextOverflow {
                position: context.end(),
                context_length: self.context_length,
            });
        }
        self.blocks
            .grow(&mut context.table, context.rows + self.block_size)?;
        Ok(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_slides_by_whole_blocks_and_never_runs_out() {
        let mut contexts = DraftContexts::new(2, 64, 16, 100_000);
        let (id, other) = (contexts.open().unwrap(), contexts.open().unwrap());
        assert!(matches!(
            contexts.open(),
            Err(EngineError::OutOfContexts(2))
        ));
        for id in [id, other] {
            assert_eq!(contexts.begin_append(id, 7, 50).unwrap(), 0);
            contexts.make_room(id, 50).unwrap();
            contexts.commit(id, 50).unwrap();
        }
        for step in 0..500 {
            let count = step % 16 + 1;
            contexts.reserve_block(id).unwrap();
            let end = contexts.get(id).unwrap().end();
            contexts.begin_append(id, end as u32, count).unwrap();
            contexts.make_room(id, count).unwrap();
            contexts.commit(id, count).unwrap();
            let context = contexts.get(id).unwrap();
            assert_eq!(context.end(), end + count);
            assert!(context.rows <= 64 + BLOCK_TOKENS, "{context:?}");
            assert!(context.rows >= 48, "{context:?}");
        }
        contexts.close(id);
        contexts.close(other);
        assert_eq!(contexts.blocks.free_blocks(), contexts.num_blocks());
    }

    #[test]
    fn rows_that_fill_the_window_replace_it() {
        let mut contexts = DraftContexts::new(1, 32, 16, 1_000);
        let id = contexts.open().unwrap();
        assert_eq!(contexts.begin_append(id, 0, 100).unwrap(), 68);
        assert_eq!(contexts.get(id).unwrap().end(), 68);
        contexts.make_room(id, 32).unwrap();
        contexts.commit(id, 32).unwrap();
        assert!(matches!(
            contexts.begin_append(id, 99, 1),
            Err(EngineError::ContextGap {
                start: 99,
                expected: 100
            })
        ));
        assert!(matches!(
            contexts.begin_append(id, 100, 901),
            Err(EngineError::ContextOverflow { .. })
        ));
    }
}
