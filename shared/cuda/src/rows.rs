//! Rows in and out of the packed layout: embedding, gathering, normalising, and the rows of a drafter's block.

use std::sync::Arc;

use crate::{CudaError, Device, DevicePtr, Function, KernelSource, Launch};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "rows.cu",
    text: include_str!("kernels/rows.cu"),
};

/// Threads per row, as in the kernel file.
const ROW_THREADS: usize = 128;

/// Packed activations: where, how deep, and for how many rows.
#[derive(Debug, Clone, Copy)]
pub struct PackedRows {
    /// bf16 in the layout of `xp_offset`.
    pub ptr: DevicePtr,
    /// Depth in blocks of 32.
    pub k32: u32,
    /// Row bucket.
    pub rows: usize,
}

impl PackedRows {
    /// Rows of `depth` values for the row bucket `rows`.
    pub fn new(ptr: DevicePtr, depth: usize, rows: usize) -> Self {
        Self {
            ptr,
            k32: depth.div_ceil(32) as u32,
            rows,
        }
    }

    /// Values of a buffer for `rows` rows of `depth` values.
    pub fn len(rows: usize, depth: usize) -> usize {
        row_bucket(rows) * depth.div_ceil(32) * 32
    }

    /// Tiles of 8 rows per block of 64.
    pub fn tiles(&self) -> u32 {
        self.rows.min(64) as u32 / 8
    }
}

/// The row count that kernels run for `rows` rows: 8, 16, 32, 64, then whole blocks of 64.
pub fn row_bucket(rows: usize) -> usize {
    match rows {
        0..=8 => 8,
        9..=16 => 16,
        17..=32 => 32,
        rows => rows.next_multiple_of(64),
    }
}

/// Kinds of attention in one drafter, each with its own visible ranges.
pub(crate) const BLOCK_VARIANTS: usize = 2;

/// Where the rows of a block forward are described. All arrays are u32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRowArrays {
    pub(crate) tokens: DevicePtr,
    pub(crate) positions: DevicePtr,
    pub(crate) kv_slot: DevicePtr,
    pub(crate) seq_of_row: DevicePtr,
    /// `[variants][2][rows]`: begin and end.
    pub(crate) visible: DevicePtr,
}

/// The drafter contexts of a batch. All arrays are u32, one entry per sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockContexts {
    /// Token of slot 0; NONE for a sequence that takes no part.
    pub(crate) roots: DevicePtr,
    /// Absolute position of slot 0.
    pub(crate) positions: DevicePtr,
    /// Rows in the drafter's cache.
    pub(crate) context_rows: DevicePtr,
    /// Block tables, `[sequences][table_stride]`.
    pub(crate) tables: DevicePtr,
    pub(crate) table_stride: usize,
}

/// What the block rows of a drafter look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockShape {
    pub(crate) block_size: usize,
    pub(crate) mask_token: u32,
    pub(crate) variants: usize,
    /// Bit v: kind v is causal.
    pub(crate) causal: u32,
    /// Positions that kind v sees, 0 for all.
    pub(crate) windows: [u32; BLOCK_VARIANTS],
}

/// The accepted paths of a batch and where their features go. All arrays are u32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AcceptedRows {
    /// Local node indices, `[sequences][path_stride]`.
    pub(crate) path: DevicePtr,
    pub(crate) path_stride: usize,
    pub(crate) counts: DevicePtr,
    pub(crate) first_row: DevicePtr,
    /// Committed rows before this step.
    pub(crate) committed: DevicePtr,
    /// Rows in the drafter's cache, or null when there is none here.
    pub(crate) context_rows: DevicePtr,
    pub(crate) tables: DevicePtr,
    pub(crate) table_stride: usize,
    pub(crate) sequences: usize,
    /// Entries per sequence.
    pub(crate) stride: usize,
    /// Row bucket of the entries.
    pub(crate) rows: usize,
    pub(crate) source_rows: DevicePtr,
    pub(crate) positions: DevicePtr,
    pub(crate) kv_slot: DevicePtr,
}

/// Trees that the host wrote, u32 `[sequences][stride]`: tokens (`u32::MAX` where there is no node) and parents.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostTrees {
    pub(crate) tokens: DevicePtr,
    pub(crate) parents: DevicePtr,
}

/// The rows that are made of [`HostTrees`]. All arrays are u32, paths u16 `[rows][64]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TreeRowArrays {
    pub(crate) host: HostTrees,
    pub(crate) sequences: usize,
    pub(crate) stride: usize,
    pub(crate) tile_rows: usize,
    pub(crate) tokens: DevicePtr,
    pub(crate) parents: DevicePtr,
    pub(crate) positions: DevicePtr,
    pub(crate) kv_slot: DevicePtr,
    pub(crate) path_len: DevicePtr,
    pub(crate) paths: DevicePtr,
    pub(crate) tiles: DevicePtr,
}

/// The kernels of `rows.cu`.
pub struct RowKernels {
    device: Arc<Device>,
    embed: Function,
    gather: Function,
    pack: Function,
    norm: Function,
    copy: Function,
    block: Function,
    accepted: Function,
    tree: Function,
    mark: Function,
}

impl RowKernels {
    /// Compiles them.
    ///
    /// # Errors
    /// As [`Device::module`].
    pub fn load(device: &Arc<Device>) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE, &[])?;
        Ok(Self {
            embed: module.function("embed_rows")?,
            gather: module.function("gather_rows")?,
            pack: module.function("pack_rows")?,
            norm: module.function("norm_rows")?,
            copy: module.function("copy_words")?,
            block: module.function("block_rows")?,
            accepted: module.function("accepted_rows")?,
            tree: module.function("tree_rows")?,
            mark: module.function("mark_time")?,
            device: device.clone(),
        })
    }

    /// Embeds tokens: `x` f32 `[rows][hidden]`, the next norm's input, and one part of its sum of squares per row.
    /// `table` is bf16 `[vocab][hidden]`, `hidden` a multiple of 8.
    ///
    /// # Errors
    /// When the launch is refused.
    #[allow(clippy::too_many_arguments)]
    pub fn embed(
        &self,
        tokens: DevicePtr,
        table: DevicePtr,
        hidden: usize,
        x: DevicePtr,
        next_weight: DevicePtr,
        next: PackedRows,
        parts: DevicePtr,
    ) -> Result<(), CudaError> {
        Launch::new(&self.embed)
            .grid(next.rows, 1, 1)
            .block(ROW_THREADS)
            .arg(tokens)
            .arg(table)
            .arg(x)
            .arg(next_weight)
            .arg(next.ptr)
            .arg(parts)
            .arg(hidden as u32)
            .arg(next.k32)
            .arg(next.tiles())
            .run(&self.device)
    }

    /// Packed rows `rows[i]` of `source` become rows `i` of `out`, with their `part_count` parts of a sum of squares
    /// where `parts` are given.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn gather(
        &self,
        rows: DevicePtr,
        source: PackedRows,
        out: PackedRows,
        parts: Option<(DevicePtr, DevicePtr, u32)>,
    ) -> Result<(), CudaError> {
        let (from, to, count) = parts.unwrap_or_default();
        Launch::new(&self.gather)
            .grid(out.rows, 1, 1)
            .block(ROW_THREADS)
            .arg(rows)
            .arg(source.ptr)
            .arg(out.ptr)
            .arg(out.k32)
            .arg(source.tiles())
            .arg(out.tiles())
            .arg(from)
            .arg(to)
            .arg(count)
            .run(&self.device)
    }

    /// Rounds f32 rows `[count][width]` to packed bf16; rows from `count` to the bucket become zeros.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn pack(
        &self,
        source: DevicePtr,
        count: usize,
        width: usize,
        out: PackedRows,
    ) -> Result<(), CudaError> {
        Launch::new(&self.pack)
            .grid(out.rows, 1, 1)
            .block(ROW_THREADS)
            .arg(source)
            .arg(out.ptr)
            .arg(count as u32)
            .arg(width as u32)
            .arg(out.k32)
            .arg(out.tiles())
            .run(&self.device)
    }

    /// RMS norm of f32 rows `[rows][width]` into f32 rows and packed bf16; either may be null.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn norm(
        &self,
        source: DevicePtr,
        weight: DevicePtr,
        eps: f32,
        width: usize,
        out_rows: DevicePtr,
        out: PackedRows,
    ) -> Result<(), CudaError> {
        Launch::new(&self.norm)
            .grid(out.rows, 1, 1)
            .block(ROW_THREADS)
            .arg(source)
            .arg(weight)
            .arg(eps)
            .arg(out_rows)
            .arg(out.ptr)
            .arg(width as u32)
            .arg(out.k32)
            .arg(out.tiles())
            .run(&self.device)
    }

    /// Copies `count` words between device memory and host memory that the device reaches; both 16-byte aligned.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn copy(
        &self,
        source: DevicePtr,
        target: DevicePtr,
        count: usize,
    ) -> Result<(), CudaError> {
        Launch::new(&self.copy)
            .grid(count.div_ceil(4 * 256).clamp(1, 64), 1, 1)
            .block(256)
            .arg(source)
            .arg(target)
            .arg(count as u32)
            .run(&self.device)
    }

    /// Writes the nanoseconds of the device's clock to `at`, u64, when everything before has ended.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn mark(&self, at: DevicePtr) -> Result<(), CudaError> {
        Launch::new(&self.mark).block(1).arg(at).run(&self.device)
    }

    /// Describes the rows of the blocks of `sequences` contexts in the row bucket `rows`.
    pub(crate) fn block(
        &self,
        contexts: BlockContexts,
        shape: BlockShape,
        sequences: usize,
        rows: usize,
        out: BlockRowArrays,
    ) -> Result<(), CudaError> {
        Launch::new(&self.block)
            .block(rows.clamp(32, 512))
            .arg(contexts.roots)
            .arg(contexts.positions)
            .arg(contexts.context_rows)
            .arg(contexts.tables)
            .arg(contexts.table_stride as u32)
            .arg(shape.block_size as u32)
            .arg(shape.mask_token)
            .arg(sequences as u32)
            .arg(rows as u32)
            .arg(shape.variants as u32)
            .arg(shape.causal)
            .arg(shape.windows[0])
            .arg(shape.windows[1])
            .arg(out.tokens)
            .arg(out.positions)
            .arg(out.kv_slot)
            .arg(out.seq_of_row)
            .arg(out.visible)
            .run(&self.device)
    }

    /// Makes the rows of a step from trees of the host.
    pub(crate) fn tree(
        &self,
        state: crate::draft_tree::BatchState,
        rows: TreeRowArrays,
    ) -> Result<(), CudaError> {
        Launch::new(&self.tree)
            .grid(rows.sequences, 1, 1)
            .block(rows.stride.next_multiple_of(32))
            .shared(rows.stride * 4)
            .arg(rows.host.tokens)
            .arg(rows.host.parents)
            .arg(state.roots)
            .arg(state.committed)
            .arg(state.tables)
            .arg(state.table_stride as u32)
            .arg(rows.stride as u32)
            .arg(rows.tile_rows as u32)
            .arg(rows.tokens)
            .arg(rows.parents)
            .arg(rows.positions)
            .arg(rows.kv_slot)
            .arg(rows.path_len)
            .arg(rows.paths)
            .arg(rows.tiles)
            .run(&self.device)
    }

    /// Lists the accepted rows and where their features go.
    pub(crate) fn accepted(&self, accepted: AcceptedRows) -> Result<(), CudaError> {
        Launch::new(&self.accepted)
            .block(accepted.rows.clamp(32, 512))
            .arg(accepted.path)
            .arg(accepted.path_stride as u32)
            .arg(accepted.counts)
            .arg(accepted.first_row)
            .arg(accepted.committed)
            .arg(accepted.context_rows)
            .arg(accepted.tables)
            .arg(accepted.table_stride as u32)
            .arg(accepted.sequences as u32)
            .arg(accepted.stride as u32)
            .arg(accepted.rows as u32)
            .arg(accepted.source_rows)
            .arg(accepted.positions)
            .arg(accepted.kv_slot)
            .run(&self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_tiles_of_eight_then_blocks_of_sixty_four() {
        let buckets = [0, 1, 8, 9, 16, 17, 33, 64, 65, 128, 129].map(row_bucket);
        assert_eq!(buckets, [8, 8, 8, 16, 16, 32, 64, 64, 128, 128, 192]);
    }
}
