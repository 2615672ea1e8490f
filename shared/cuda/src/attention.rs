//! Attention of all rows of a forward over the paged cache, whatever mix of sequences, trees and chains they are.

mod plan;

use std::sync::Arc;

pub use plan::AttentionPlan;
use plan::Machine;

use crate::kv_cache::{KvLayer, padded_dim};
use crate::row_metadata::RowArrays;
use crate::{CudaError, Device, DevicePtr, Function, KernelSource, Launch, PackedRows};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "attention.cu",
    text: concat!(
        "#line 1 \"attention_split.cuh\"\n",
        include_str!("kernels/attention_split.cuh"),
        "\n#line 1 \"attention.cu\"\n",
        include_str!("kernels/attention.cu")
    ),
};

/// Heads of a model's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Query heads per key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Elements that a head takes in queries, keys and values on the device.
    pub fn width(&self) -> usize {
        padded_dim(self.head_dim)
    }

    /// # Errors
    /// [`CudaError::Unsupported`] for a shape that the kernels do not cover.
    pub fn check(&self) -> Result<(), CudaError> {
        let wrong = |what: String| Err(CudaError::Unsupported(what));
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) || self.group() > 16 {
            return wrong(format!(
                "{} query heads over {} key heads: the attention kernels take groups of 1 to 16",
                self.heads, self.kv_heads
            ));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(8) || self.head_dim > 256 {
            return wrong(format!(
                "heads of {} elements: the attention kernels take multiples of 8 up to 256",
                self.head_dim
            ));
        }
        Ok(())
    }
}

/// What the rows of a launch see.
#[derive(Debug, Clone, Copy)]
pub enum Visibility {
    /// Every row a range of slots of its sequence: u32 per row, begin and end.
    Ranges {
        /// First visible slot.
        begin: DevicePtr,
        /// Behind the last one.
        end: DevicePtr,
    },
    /// What the row arrays say: rows with a path the committed slots and their path, the others their range.
    Rows,
}

/// The kernels of `attention.cu` for one model.
pub struct AttentionKernels {
    device: Arc<Device>,
    shape: AttentionShape,
    machine: Machine,
    splits: Function,
    tiles: Function,
}

pub(crate) fn defines(shape: AttentionShape) -> [(&'static str, String); 2] {
    [
        ("HEAD_DIM", shape.head_dim.to_string()),
        ("GROUP", shape.group().to_string()),
    ]
}

impl AttentionKernels {
    /// Compiles them for the shape of a model.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a shape that the kernels do not cover, or as [`Device::module`].
    pub fn load(device: &Arc<Device>, shape: AttentionShape) -> Result<Self, CudaError> {
        shape.check()?;
        let module = device.module(&SOURCE, &defines(shape))?;
        let machine = Machine {
            multiprocessors: device.sm_count() as usize,
            shared_memory: device.shared_memory_per_block() as usize,
        };
        let (splits, tiles) = (
            module.function("attention_splits")?,
            module.function("attention_tiles")?,
        );
        for function in [&splits, &tiles] {
            function.allow_shared_memory(device.shared_memory_per_block())?;
        }
        Ok(Self {
            device: device.clone(),
            shape,
            machine,
            splits,
            tiles,
        })
    }

    /// How many rows to put into a tile: `sequences` sequences of `rows` rows that see up to `longest` positions; `trees`
    /// says whether they are tree nodes. A matter of speed only.
    pub fn tile_rows(&self, sequences: usize, rows: usize, longest: usize, trees: bool) -> usize {
        plan::tile_rows(self.machine, self.shape, sequences, rows, longest, trees)
    }

    /// `out = softmax(queries * keys) * values` for every row, packed as the input of the output projection. `queries` are
    /// those of [`crate::RotaryKernels::rotate`].
    ///
    /// Must directly follow [`crate::RotaryKernels::rotate`] in the stream, or work that ends before this begins: what is
    /// older than the rotation's predecessor is read ahead of the rotation's end.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for tiles that do not fit, or when the launch is refused.
    pub fn attend(
        &self,
        queries: DevicePtr,
        layer: KvLayer,
        rows: &RowArrays,
        visibility: Visibility,
        out: PackedRows,
    ) -> Result<(), CudaError> {
        let (tiles, tile_rows, longest) = (rows.tile_count, rows.tile_rows, rows.longest);
        let plan = AttentionPlan::choose(self.machine, self.shape, tiles, tile_rows, longest);
        self.attend_as(plan, queries, layer, rows, visibility, out)
    }

    /// [`AttentionKernels::attend`] with the work shared in a given way. The result does not depend on it.
    ///
    /// # Errors
    /// As [`AttentionKernels::attend`], also for a plan that needs more shared memory than there is.
    pub fn attend_as(
        &self,
        plan: AttentionPlan,
        queries: DevicePtr,
        layer: KvLayer,
        rows: &RowArrays,
        visibility: Visibility,
        out: PackedRows,
    ) -> Result<(), CudaError> {
        let shape = self.shape;
        if rows.tile_count == 0 {
            return Ok(());
        }
        let shared = plan.shared_bytes(shape, rows.tile_rows);
        let fits = shared <= self.machine.shared_memory && plan.is_valid();
        if !fits || !(1..=16 / shape.group()).contains(&rows.tile_rows) {
            return Err(CudaError::Unsupported(format!(
                "attention as {plan:?} over tiles of {} rows of {} heads",
                rows.tile_rows,
                shape.group()
            )));
        }
        let (begin, end, path_len) = match visibility {
            Visibility::Ranges { begin, end } => (begin, end, DevicePtr::NULL),
            Visibility::Rows => (rows.vis_begin, rows.vis_end, rows.path_len),
        };
        let launch = match plan {
            AttentionPlan::Splits {
                tiles,
                splits,
                blocks,
            } => Launch::new(&self.splits)
                .grid(blocks, rows.tile_count.div_ceil(tiles), shape.kv_heads)
                .block(32 * tiles * splits)
                .cluster(blocks as u32),
            AttentionPlan::Tiles { tiles } => Launch::new(&self.tiles)
                .grid(rows.tile_count.div_ceil(tiles), shape.kv_heads, 1)
                .block(32 * tiles),
        };
        let launch = launch
            .shared(shared)
            .arg(queries)
            .arg(layer.keys)
            .arg(layer.values)
            .arg(shape.kv_heads as u32)
            .arg(rows.tiles)
            .arg(rows.tile_count as u32)
            .arg(rows.tile_rows as u32)
            .arg(begin)
            .arg(end)
            .arg(path_len)
            .arg(rows.paths)
            .arg(rows.tables)
            .arg(rows.table_stride as u32)
            .arg(rows.committed)
            .arg(out.ptr)
            .arg(out.k32)
            .arg(out.tiles())
            .arg(1u32);
        let launch = match plan {
            AttentionPlan::Splits { tiles, .. } => launch
                .arg(tiles as u32)
                .arg(plan.items(shape, rows.tile_rows) as u32),
            AttentionPlan::Tiles { .. } => launch,
        };
        launch.run(&self.device)
    }
}
