//! What the rows of a forward are and what they see, at fixed addresses on the device.
//!
//! The host fills pinned memory and one copy kernel brings it to the device, so that a captured graph runs with whatever
//! the memory holds. Kernels that draft on the device write the same arrays themselves.

use std::ops::Range;
use std::sync::Arc;

use treespec_engine::{BLOCK_TOKENS, BlockTable, EngineError, RowBatch, RowShape};

use crate::NONE;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, PinnedBuffer, RowKernels, row_bucket};

/// Most nodes of a path, the root included.
pub const MAX_PATH: usize = 64;

/// Words of a path: two nodes each.
const PATH_WORDS: usize = MAX_PATH / 2;

/// Words of a tile: sequence, first row, rows, 0.
const TILE_WORDS: usize = 4;

/// The most that some row buffers hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLimits {
    /// Rows of a forward.
    pub rows: usize,
    /// Sequences of a forward.
    pub sequences: usize,
    /// Blocks of a sequence.
    pub blocks: usize,
}

/// Where the rows of a forward are described. All arrays are u32 unless said otherwise, and all pointers stay the same for
/// the life of the [`RowBuffers`] that they come from.
#[derive(Debug, Clone, Copy)]
pub struct RowArrays {
    /// Rows that kernels run, see [`row_bucket`]. Rows behind the real ones have token 0, position 0, no slot, and see
    /// nothing.
    pub bucket: usize,
    /// Token per row.
    pub tokens: DevicePtr,
    /// Absolute position per row.
    pub positions: DevicePtr,
    /// Physical slot per row; `u32::MAX`: not stored.
    pub kv_slot: DevicePtr,
    /// Sequence per row.
    pub seq_of_row: DevicePtr,
    /// First visible slot of the row's sequence, for rows without a path.
    pub vis_begin: DevicePtr,
    /// End of the visible slots, for rows without a path.
    pub vis_end: DevicePtr,
    /// Nodes of the row's path, itself included; 0 for rows without one. Null: no row has one.
    pub path_len: DevicePtr,
    /// u16 `[row][MAX_PATH]`: the path's nodes as rows of the sequence. A row with a path sees the committed slots and the
    /// slots of its path.
    pub paths: DevicePtr,
    /// `[sequence][table_stride]`: blocks of a sequence.
    pub tables: DevicePtr,
    /// Entries from table to table.
    pub table_stride: usize,
    /// Rows in the cache per sequence. Row i of a sequence belongs to slot `committed + i`.
    pub committed: DevicePtr,
    /// First row per sequence.
    pub seq_first_row: DevicePtr,
    /// Rows per sequence.
    pub seq_rows: DevicePtr,
    /// `[tile][4]`: sequence, first row, rows, 0. Tiles of sequence `u32::MAX` are not there. A tile has rows of one
    /// sequence only.
    pub tiles: DevicePtr,
    /// Tiles that kernels run; up to the row limit, those behind the last real one are not there.
    pub tile_count: usize,
    /// Most rows of a tile.
    pub tile_rows: usize,
    /// Positions that some row may see: a matter of speed, attention looks at what the rows say.
    pub longest: usize,
}

/// Word offsets of the arrays in one buffer; the long one that not every forward needs comes last.
#[derive(Debug, Clone, Copy)]
struct Offsets {
    tokens: usize,
    positions: usize,
    kv_slot: usize,
    seq_of_row: usize,
    vis_begin: usize,
    vis_end: usize,
    path_len: usize,
    tiles: usize,
    committed: usize,
    seq_first_row: usize,
    seq_rows: usize,
    tables: usize,
    paths: usize,
    end: usize,
}

impl Offsets {
    fn new(limits: RowLimits) -> Self {
        let mut end = 0;
        // Arrays begin at multiples of 16 bytes: they are copied in vectors.
        let mut array = |words: usize| {
            let start = end;
            end += words.next_multiple_of(4);
            start
        };
        let (rows, sequences) = (limits.rows, limits.sequences);
        Self {
            tokens: array(rows),
            positions: array(rows),
            kv_slot: array(rows),
            seq_of_row: array(rows),
            vis_begin: array(rows),
            vis_end: array(rows),
            path_len: array(rows),
            tiles: array(rows * TILE_WORDS),
            committed: array(sequences),
            seq_first_row: array(sequences),
            seq_rows: array(sequences),
            tables: array(sequences * limits.blocks),
            paths: array(rows * PATH_WORDS),
            end,
        }
    }
}

/// What a row sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sight<'a> {
    /// Slots of its sequence.
    Range(Range<usize>),
    /// The committed slots and those of its path: rows of its sequence from the root to itself, at most [`MAX_PATH`].
    Path(&'a [u16]),
}

/// A row to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRow<'a> {
    /// Token id.
    pub token: u32,
    /// Absolute position.
    pub position: usize,
    /// Slot of its sequence that its keys and values go to.
    pub slot: usize,
    /// What it sees.
    pub sight: Sight<'a>,
}

/// The arrays of [`RowArrays`] on the device, and their copy on the host.
pub struct RowBuffers {
    limits: RowLimits,
    offsets: Offsets,
    words: DeviceBuffer<u32>,
    staged: PinnedBuffer<u32>,
}

impl RowBuffers {
    /// Room for a forward within `limits`; the rows are rounded up to a bucket.
    ///
    /// # Errors
    /// When the device or the host has no more memory.
    pub fn new(device: &Arc<Device>, limits: RowLimits) -> Result<Self, CudaError> {
        let limits = RowLimits {
            rows: row_bucket(limits.rows),
            sequences: limits.sequences.max(1),
            blocks: limits.blocks.next_multiple_of(4).max(4),
        };
        let offsets = Offsets::new(limits);
        Ok(Self {
            limits,
            offsets,
            words: DeviceBuffer::zeroed(device, offsets.end)?,
            staged: PinnedBuffer::new(device, offsets.end)?,
        })
    }

    /// The arrays for a forward of some extent, whoever fills them.
    pub fn arrays(&self, extent: RowExtent) -> RowArrays {
        let at = |offset: usize| self.words.offset(offset);
        let offsets = &self.offsets;
        RowArrays {
            bucket: extent.bucket,
            tokens: at(offsets.tokens),
            positions: at(offsets.positions),
            kv_slot: at(offsets.kv_slot),
            seq_of_row: at(offsets.seq_of_row),
            vis_begin: at(offsets.vis_begin),
            vis_end: at(offsets.vis_end),
            path_len: at(offsets.path_len),
            paths: at(offsets.paths),
            tables: at(offsets.tables),
            table_stride: self.limits.blocks,
            committed: at(offsets.committed),
            seq_first_row: at(offsets.seq_first_row),
            seq_rows: at(offsets.seq_rows),
            tiles: at(offsets.tiles),
            tile_count: extent.tile_count.min(self.limits.rows),
            tile_rows: extent.tile_rows,
            longest: extent.longest,
        }
    }

    /// The most that fits.
    pub fn limits(&self) -> RowLimits {
        self.limits
    }

    /// Describes a batch that [`treespec_engine::SequenceRows::validate`] has found good. Call [`RowBuffers::upload`]
    /// next, and nothing of this before the copy has run.
    ///
    /// # Errors
    /// [`EngineError::InvalidBatch`] when it exceeds the limits, or for a tree deeper than a path is long.
    pub fn fill(
        &mut self,
        batch: &RowBatch<'_>,
        tile_rows: usize,
    ) -> Result<RowExtent, EngineError> {
        let mut writer = self.writer();
        let mut path = Vec::with_capacity(MAX_PATH);
        for sequence in &batch.sequences {
            writer.sequence(sequence.table, sequence.committed)?;
            for (row, &token) in sequence.tokens.iter().enumerate() {
                let slot = sequence.committed + row;
                let sight = match sequence.shape {
                    RowShape::Tree { depths, ancestors } if !is_chain(depths) => {
                        path.clear();
                        path.extend(ancestors.iter(row).map(|node| node as u16));
                        Sight::Path(&path)
                    }
                    _ => Sight::Range(0..slot + 1),
                };
                writer.row(&NewRow {
                    token,
                    position: sequence.position(row),
                    slot,
                    sight,
                })?;
            }
        }
        Ok(writer.finish(tile_rows))
    }

    /// Starts to describe a forward row by row.
    pub fn writer(&mut self) -> RowWriter<'_> {
        RowWriter {
            limits: self.limits,
            offsets: self.offsets,
            words: self.staged.as_mut_slice(),
            blocks: 0,
            sequences: 0,
            rows: 0,
            longest: 1,
            paths: false,
        }
    }

    /// Copies what was filled to the device, behind all work in the stream. `paths` says whether some row has one; it must
    /// be the same for every replay of a graph.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn upload(&self, kernels: &RowKernels, paths: bool) -> Result<(), CudaError> {
        let words = if paths {
            self.offsets.end
        } else {
            self.offsets.paths
        };
        kernels.copy(self.staged.device_ptr(), self.words.ptr(), words)
    }
}

/// Node i is at depth i: every node is the child of the one before.
fn is_chain(depths: &[u32]) -> bool {
    depths
        .iter()
        .enumerate()
        .all(|(node, &depth)| depth as usize == node)
}

/// How large a forward is. What a graph is captured with must hold for every replay: more tiles and a longer context than
/// there are do no harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowExtent {
    /// Real rows.
    pub rows: usize,
    /// Rows that kernels run.
    pub bucket: usize,
    /// Tiles that kernels run.
    pub tile_count: usize,
    /// Most rows of a tile.
    pub tile_rows: usize,
    /// Positions that some row sees.
    pub longest: usize,
    /// Whether some row has a path.
    pub paths: bool,
}

/// Describes the rows of a forward one by one, sequence after sequence.
pub struct RowWriter<'a> {
    limits: RowLimits,
    offsets: Offsets,
    words: &'a mut [u32],
    /// Blocks of the present sequence.
    blocks: usize,
    sequences: usize,
    rows: usize,
    longest: usize,
    paths: bool,
}

impl RowWriter<'_> {
    /// Begins the next sequence, with `committed` rows in the cache.
    ///
    /// # Errors
    /// [`EngineError::InvalidBatch`] for one sequence too many, or one with too many blocks.
    pub fn sequence(&mut self, table: &BlockTable, committed: usize) -> Result<(), EngineError> {
        let blocks = table.blocks();
        if self.sequences == self.limits.sequences || blocks.len() > self.limits.blocks {
            return Err(EngineError::InvalidBatch(format!(
                "sequence {} with {} KV blocks: the buffers hold {} sequences of {} blocks",
                self.sequences,
                blocks.len(),
                self.limits.sequences,
                self.limits.blocks
            )));
        }
        let at = self.sequences;
        let start = self.offsets.tables + at * self.limits.blocks;
        let words = &mut self.words[start..start + self.limits.blocks];
        for (word, block) in words.iter_mut().zip(blocks) {
            *word = block.0;
        }
        words[blocks.len()..].fill(NONE);
        self.words[self.offsets.committed + at] = committed as u32;
        self.words[self.offsets.seq_first_row + at] = self.rows as u32;
        self.words[self.offsets.seq_rows + at] = 0;
        self.blocks = blocks.len();
        self.sequences += 1;
        Ok(())
    }

    /// Adds a row to the sequence.
    ///
    /// # Errors
    /// [`EngineError::InvalidBatch`] for one row too many, or one that leaves the blocks of its sequence.
    pub fn row(&mut self, row: &NewRow<'_>) -> Result<(), EngineError> {
        let invalid = |what: String| Err(EngineError::InvalidBatch(what));
        if self.rows == self.limits.rows || self.sequences == 0 {
            return invalid(format!("row {} of {}", self.rows, self.limits.rows));
        }
        let sequence = self.sequences - 1;
        let committed = self.words[self.offsets.committed + sequence] as usize;
        let (begin, end, path): (_, _, &[u16]) = match &row.sight {
            Sight::Range(range) => (range.start, range.end, &[]),
            Sight::Path(path) => (0, committed + path.len(), path),
        };
        if path.len() > MAX_PATH {
            return invalid(format!(
                "a tree node at depth {}: the deepest is {}",
                path.len() - 1,
                MAX_PATH - 1
            ));
        }
        let nodes = path.iter().max().map_or(0, |&node| usize::from(node) + 1);
        let last = end.max(row.slot + 1).max(committed + nodes);
        if last > self.blocks * BLOCK_TOKENS {
            return invalid(format!("slot {} of {} KV blocks", last - 1, self.blocks));
        }
        let (at, words, offsets) = (self.rows, &mut *self.words, &self.offsets);
        let table = offsets.tables + sequence * self.limits.blocks;
        let block = words[table + row.slot / BLOCK_TOKENS] as usize;
        words[offsets.tokens + at] = row.token;
        words[offsets.positions + at] = row.position as u32;
        words[offsets.kv_slot + at] = (block * BLOCK_TOKENS + row.slot % BLOCK_TOKENS) as u32;
        words[offsets.seq_of_row + at] = sequence as u32;
        let (vis_begin, vis_end) = if path.is_empty() {
            (begin, end)
        } else {
            (0, 0)
        };
        words[offsets.vis_begin + at] = vis_begin as u32;
        words[offsets.vis_end + at] = vis_end as u32;
        words[offsets.path_len + at] = path.len() as u32;
        let pairs = &mut words[offsets.paths + at * PATH_WORDS..][..PATH_WORDS];
        for (word, pair) in pairs.iter_mut().zip(path.chunks(2)) {
            let high = pair.get(1).copied().unwrap_or(0);
            *word = u32::from(pair[0]) | u32::from(high) << 16;
        }
        words[offsets.seq_rows + sequence] += 1;
        self.paths |= !path.is_empty();
        self.longest = self.longest.max(end);
        self.rows += 1;
        Ok(())
    }

    /// Cuts the rows into tiles of up to `tile_rows` and adds what is behind them.
    pub fn finish(self, tile_rows: usize) -> RowExtent {
        let (words, offsets, limits) = (self.words, &self.offsets, self.limits);
        let tile_rows = tile_rows.max(1);
        let bucket = row_bucket(self.rows);
        for array in [
            offsets.tokens,
            offsets.positions,
            offsets.seq_of_row,
            offsets.vis_begin,
            offsets.vis_end,
            offsets.path_len,
        ] {
            words[array + self.rows..array + bucket].fill(0);
        }
        words[offsets.kv_slot + self.rows..offsets.kv_slot + bucket].fill(NONE);
        for array in [offsets.committed, offsets.seq_first_row, offsets.seq_rows] {
            words[array + self.sequences..array + limits.sequences].fill(0);
        }
        let mut tile_count = 0;
        for sequence in 0..self.sequences {
            let first = words[offsets.seq_first_row + sequence] as usize;
            let rows = words[offsets.seq_rows + sequence] as usize;
            for start in (0..rows).step_by(tile_rows) {
                let tile = [
                    sequence as u32,
                    (first + start) as u32,
                    tile_rows.min(rows - start) as u32,
                    0,
                ];
                // Every tile has a row of its own, so they fit where one tile per row does.
                words[offsets.tiles + tile_count * TILE_WORDS..][..TILE_WORDS]
                    .copy_from_slice(&tile);
                tile_count += 1;
            }
        }
        words[offsets.tiles + tile_count * TILE_WORDS..offsets.tiles + limits.rows * TILE_WORDS]
            .fill(NONE);
        RowExtent {
            rows: self.rows,
            bucket,
            tile_count,
            tile_rows,
            longest: self.longest,
            paths: self.paths,
        }
    }
}

#[cfg(test)]
mod tests;
