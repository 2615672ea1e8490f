//! Device arrays that describe the rows of a step with the same number of rows for every sequence.

use std::sync::Arc;

use crate::acceptance::{RootRows, VerifiedRows};
use crate::attention::AttentionKernels;
use crate::draft_tree::{BatchState, DraftRows};
use crate::row_metadata::{MAX_PATH, RowArrays};
use crate::rows::{BLOCK_VARIANTS, BlockRowArrays, HostTrees, TreeRowArrays};
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, row_bucket};

/// The context that the attention of a captured step is planned for: a power of two that holds `positions`. More
/// positions would be right too, only less evenly shared.
pub(crate) fn context_bucket(positions: usize) -> usize {
    positions.next_power_of_two().max(512)
}

/// The arrays of one graph: `sequences` times `stride` rows, padded to a row bucket. Padding rows keep what they are made
/// with: token 0, position 0, no slot, nothing visible.
pub(crate) struct StepRows {
    pub(crate) sequences: usize,
    /// Rows of a sequence.
    pub(crate) stride: usize,
    /// Rows of an attention tile.
    pub(crate) tile_rows: usize,
    pub(crate) bucket: usize,
    /// Positions that the attention is planned for.
    longest: usize,
    tokens: DeviceBuffer<u32>,
    positions: DeviceBuffer<u32>,
    kv_slot: DeviceBuffer<u32>,
    seq_of_row: DeviceBuffer<u32>,
    /// `[variants][2][bucket]`.
    visible: DeviceBuffer<u32>,
    path_len: DeviceBuffer<u32>,
    paths: DeviceBuffer<u16>,
    parents: DeviceBuffer<u32>,
    tiles: DeviceBuffer<u32>,
    first_row: DeviceBuffer<u32>,
    /// Whether a tree's rows have paths.
    has_paths: bool,
}

/// What the rows of a step are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowKind {
    /// Nodes of trees.
    Tree,
    /// Chains, roots alone, and blocks of a drafter.
    Range,
}

impl StepRows {
    /// For `sequences` sequences of `stride` rows that see up to about `longest` positions.
    pub(crate) fn new(
        device: &Arc<Device>,
        attention: &AttentionKernels,
        sequences: usize,
        stride: usize,
        kind: RowKind,
        longest: usize,
    ) -> Result<Self, CudaError> {
        let trees = kind == RowKind::Tree;
        let tile_rows = attention.tile_rows(sequences, stride, longest, trees);
        let rows = sequences * stride;
        let bucket = row_bucket(rows);
        let words = |value: u32| DeviceBuffer::from_slice(device, &vec![value; bucket]);
        let tiles: Vec<u32> = (0..sequences)
            .flat_map(|sequence| {
                (0..stride).step_by(tile_rows).flat_map(move |first| {
                    let count = tile_rows.min(stride - first);
                    [
                        sequence as u32,
                        (sequence * stride + first) as u32,
                        count as u32,
                        0,
                    ]
                })
            })
            .collect();
        let first_row: Vec<u32> = (0..sequences).map(|s| (s * stride) as u32).collect();
        let seq_of_row: Vec<u32> = (0..bucket)
            .map(|row| if row < rows { (row / stride) as u32 } else { 0 })
            .collect();
        let paths = match kind {
            RowKind::Tree => bucket * MAX_PATH,
            RowKind::Range => 0,
        };
        Ok(Self {
            sequences,
            stride,
            tile_rows,
            bucket,
            longest,
            tokens: words(0)?,
            positions: words(0)?,
            kv_slot: words(u32::MAX)?,
            seq_of_row: DeviceBuffer::from_slice(device, &seq_of_row)?,
            visible: DeviceBuffer::zeroed(device, BLOCK_VARIANTS * 2 * bucket)?,
            path_len: words(0)?,
            paths: DeviceBuffer::zeroed(device, paths)?,
            parents: words(u32::MAX)?,
            tiles: DeviceBuffer::from_slice(device, &tiles)?,
            first_row: DeviceBuffer::from_slice(device, &first_row)?,
            has_paths: kind == RowKind::Tree,
        })
    }

    /// The rows for a forward whose sequences have the given tables.
    pub(crate) fn arrays(
        &self,
        tables: DevicePtr,
        table_stride: usize,
        committed: DevicePtr,
        variant: usize,
    ) -> RowArrays {
        let (path_len, paths) = self.paths();
        RowArrays {
            bucket: self.bucket,
            tokens: self.tokens.ptr(),
            positions: self.positions.ptr(),
            kv_slot: self.kv_slot.ptr(),
            seq_of_row: self.seq_of_row.ptr(),
            vis_begin: self.visible.offset(variant * 2 * self.bucket),
            vis_end: self.visible.offset((variant * 2 + 1) * self.bucket),
            path_len,
            paths,
            tiles: self.tiles.ptr(),
            tile_count: self.tiles.len() / 4,
            tile_rows: self.tile_rows,
            tables,
            table_stride,
            committed,
            seq_first_row: self.first_row.ptr(),
            seq_rows: DevicePtr::NULL,
            longest: self.longest,
        }
    }

    /// The rows for a target's forward.
    pub(crate) fn target_arrays(&self, state: BatchState) -> RowArrays {
        self.arrays(state.tables, state.table_stride, state.committed, 0)
    }

    /// The rows as a tree builder writes them.
    pub(crate) fn drafts(&self) -> DraftRows {
        DraftRows {
            rows: self.stride,
            tokens: self.tokens.ptr(),
            positions: self.positions.ptr(),
            kv_slot: self.kv_slot.ptr(),
            path_len: self.path_len.ptr(),
            paths: self.paths.ptr(),
            vis_begin: self.visible.ptr(),
            vis_end: self.visible.offset(self.bucket),
            parents: self.parents.ptr(),
            seq_rows: DevicePtr::NULL,
            tiles: self.tiles.ptr(),
            tile_rows: self.tile_rows,
        }
    }

    /// The rows as acceptance reads them.
    pub(crate) fn verified(&self) -> VerifiedRows {
        VerifiedRows {
            rows: self.stride,
            tokens: self.tokens.ptr(),
            parents: self.parents.ptr(),
        }
    }

    /// The rows as plain decoding writes them.
    pub(crate) fn roots(&self) -> RootRows {
        RootRows {
            tokens: self.tokens.ptr(),
            positions: self.positions.ptr(),
            kv_slot: self.kv_slot.ptr(),
            vis_begin: self.visible.ptr(),
            vis_end: self.visible.offset(self.bucket),
        }
    }

    /// The rows as a drafter's block writes them.
    pub(crate) fn blocks(&self) -> BlockRowArrays {
        BlockRowArrays {
            tokens: self.tokens.ptr(),
            positions: self.positions.ptr(),
            kv_slot: self.kv_slot.ptr(),
            seq_of_row: self.seq_of_row.ptr(),
            visible: self.visible.ptr(),
        }
    }

    /// The rows as they are made from trees of the host.
    pub(crate) fn host_trees(&self, tokens: DevicePtr, parents: DevicePtr) -> TreeRowArrays {
        TreeRowArrays {
            host: HostTrees { tokens, parents },
            sequences: self.sequences,
            stride: self.stride,
            tile_rows: self.tile_rows,
            tokens: self.tokens.ptr(),
            parents: self.parents.ptr(),
            positions: self.positions.ptr(),
            kv_slot: self.kv_slot.ptr(),
            path_len: self.path_len.ptr(),
            paths: self.paths.ptr(),
            tiles: self.tiles.ptr(),
        }
    }

    /// Entries of a row's path and the path, as in [`RowArrays`]; null where every row sees those before it.
    pub(crate) fn paths(&self) -> (DevicePtr, DevicePtr) {
        match self.has_paths {
            true => (self.path_len.ptr(), self.paths.ptr()),
            false => (DevicePtr::NULL, DevicePtr::NULL),
        }
    }

    /// Position per row, u32.
    pub(crate) fn positions(&self) -> DevicePtr {
        self.positions.ptr()
    }

    /// Sequence per row, u32.
    pub(crate) fn seq_of_row(&self) -> DevicePtr {
        self.seq_of_row.ptr()
    }

    /// First row per sequence, u32.
    pub(crate) fn first_row(&self) -> DevicePtr {
        self.first_row.ptr()
    }
}
