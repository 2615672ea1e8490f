//! Keys and values of all layers on the device, in blocks of 16 slots.

use std::sync::Arc;

use half::bf16;
use treespec_engine::BLOCK_TOKENS;

use crate::{CudaError, Device, DeviceBuffer, DevicePtr, Function, KernelSource, Launch};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "kv_compaction.cu",
    text: include_str!("kernels/kv_compaction.cu"),
};

/// Threads of a block, as in the kernel file.
const COMPACTION_THREADS: usize = 128;

/// Sizes of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Decoder layers.
    pub layers: usize,
    /// Blocks of [`BLOCK_TOKENS`] slots.
    pub blocks: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl KvShape {
    /// Elements of a stored key or value: padded with zeros to a multiple of 32.
    pub fn width(&self) -> usize {
        padded_dim(self.head_dim)
    }

    /// Elements of the keys, or of the values, of one layer.
    fn plane(&self) -> usize {
        self.blocks * self.kv_heads * BLOCK_TOKENS * self.width()
    }

    /// Bytes of the whole cache.
    pub fn bytes(&self) -> u64 {
        self.layers as u64 * 2 * self.plane() as u64 * size_of::<bf16>() as u64
    }
}

/// Elements that a head takes in queries, keys and values on the device.
pub fn padded_dim(head_dim: usize) -> usize {
    head_dim.next_multiple_of(32)
}

/// Keys and values in one allocation: per layer the keys, then the values, each bf16
/// `[block][kv head][16 slots][padded head_dim]`.
pub struct KvCache {
    shape: KvShape,
    elements: DeviceBuffer<bf16>,
}

/// Where the keys and values of one layer are.
#[derive(Debug, Clone, Copy)]
pub struct KvLayer {
    /// bf16 `[block][kv head][16 slots][padded head_dim]`.
    pub keys: DevicePtr,
    /// Likewise.
    pub values: DevicePtr,
}

impl KvCache {
    /// A cache of zeros: slots that were never written are multiplied by 0, so they must hold numbers.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or [`CudaError::Unsupported`] for more rows than the kernels count.
    pub fn new(device: &Arc<Device>, shape: KvShape) -> Result<Self, CudaError> {
        let rows = shape.blocks * shape.kv_heads * BLOCK_TOKENS;
        if u32::try_from(rows).is_err() {
            return Err(CudaError::Unsupported(format!(
                "{} KV blocks of {} heads: the kernels count up to {} rows of a layer",
                shape.blocks,
                shape.kv_heads,
                u32::MAX
            )));
        }
        device.preflight("the KV cache", shape.bytes())?;
        Ok(Self {
            shape,
            elements: DeviceBuffer::zeroed(device, 2 * shape.layers * shape.plane())?,
        })
    }

    /// Its sizes.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Where layer 0 begins; the others follow.
    pub fn ptr(&self) -> DevicePtr {
        self.elements.ptr()
    }

    /// The keys and values of a layer.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer(&self, layer: usize) -> KvLayer {
        assert!(layer < self.shape.layers, "layer {layer} of the KV cache");
        let plane = self.shape.plane();
        KvLayer {
            keys: self.elements.offset(2 * layer * plane),
            values: self.elements.offset((2 * layer + 1) * plane),
        }
    }

    /// Elements of one row, key or value, of a slot: where it begins in the whole cache. For tests and copies.
    pub fn row_offset(&self, layer: usize, values: bool, slot: usize, head: usize) -> usize {
        let KvShape { kv_heads, .. } = self.shape;
        let (block, place) = (slot / BLOCK_TOKENS, slot % BLOCK_TOKENS);
        (2 * layer + usize::from(values)) * self.shape.plane()
            + ((block * kv_heads + head) * BLOCK_TOKENS + place) * self.shape.width()
    }

    /// The elements, for tests.
    pub fn elements(&self) -> &DeviceBuffer<bf16> {
        &self.elements
    }
}

/// The accepted paths of a batch. All arrays are u32.
#[derive(Debug, Clone, Copy)]
pub struct AcceptedPaths {
    /// `[sequences][path_stride]`: local row of every accepted node, ascending, the root's first.
    pub path: DevicePtr,
    /// Entries per sequence.
    pub path_stride: usize,
    /// `[sequences]`: accepted nodes, the root included; 0 for a sequence that takes no part.
    pub counts: DevicePtr,
    /// `[sequences]`: rows in the cache before the step.
    pub committed: DevicePtr,
    /// `[sequences][table_stride]`: block tables.
    pub tables: DevicePtr,
    /// Blocks per table.
    pub table_stride: usize,
    /// Sequences.
    pub sequences: usize,
}

/// The kernel of `kv_compaction.cu`.
pub struct CompactionKernels {
    device: Arc<Device>,
    compact: Function,
}

impl CompactionKernels {
    /// Compiles it.
    ///
    /// # Errors
    /// As [`Device::module`].
    pub fn load(device: &Arc<Device>) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE, &[])?;
        Ok(Self {
            compact: module.function("compact_kv")?,
            device: device.clone(),
        })
    }

    /// Moves row `path[i]` of every sequence to slot `committed + i`, keys and values of all layers.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn compact(&self, cache: &KvCache, accepted: AcceptedPaths) -> Result<(), CudaError> {
        let shape = cache.shape;
        let columns = 2 * shape.layers * shape.kv_heads * shape.width() / 8;
        Launch::new(&self.compact)
            .grid(columns.div_ceil(COMPACTION_THREADS), accepted.sequences, 1)
            .block(COMPACTION_THREADS)
            .arg(cache.ptr())
            .arg(shape.blocks as u32)
            .arg(shape.layers as u32)
            .arg(shape.kv_heads as u32)
            .arg(shape.width() as u32)
            .arg(accepted.path)
            .arg(accepted.path_stride as u32)
            .arg(accepted.counts)
            .arg(accepted.committed)
            .arg(accepted.tables)
            .arg(accepted.table_stride as u32)
            .run(&self.device)
    }
}
