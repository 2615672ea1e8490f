//! The draft on the device: from the head's candidates to the rows that the target verifies.

use std::sync::Arc;

use treespec_tree::{MAX_BUDGET, TokenTree, TreeError};

use crate::NONE;
use crate::head_select::HeadTop;
use crate::{CudaError, Device, DevicePtr, Function, KernelSource, Launch, PinnedBuffer};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "draft_tree.cu",
    text: include_str!("kernels/draft_tree.cu"),
};

/// Threads of a block and most rows of a sequence, as in the kernel file.
const THREADS: usize = 256;

/// Most depths of a tree: a path has 64 entries, the root's included.
pub const MOST_DEPTHS: usize = crate::MAX_PATH - 1;

/// Words in front of a tree record.
const RECORD_HEADER: usize = 4;

/// Bytes of shared memory that the kernels declare themselves, and some to spare.
const STATIC_SHARED: usize = 10 * 1024;

/// The candidates that the drafts are made of.
#[derive(Debug, Clone, Copy)]
pub struct DraftCandidates {
    /// Row `sequence * rows + depth` holds the candidates of that depth; depth 0 are the children of the root.
    pub top: HeadTop,
    /// Rows per sequence.
    pub rows: usize,
    /// Depths to use, at most `rows`.
    pub depths: usize,
    /// Candidates per depth to use, at most the budget and the stride of `top`.
    pub count: usize,
}

/// The sequences of a batch, one entry per sequence in every array.
#[derive(Debug, Clone, Copy)]
pub struct BatchState {
    /// u32: the decided token that is not in the cache yet. `u32::MAX` for a sequence that takes no part.
    pub roots: DevicePtr,
    /// u32: rows in the cache, which is the position of the root.
    pub committed: DevicePtr,
    /// u32: nodes deeper than this are cut from the finished draft. Null for no limit.
    pub max_depths: DevicePtr,
    /// u32 `[sequences][table_stride]`: block tables. Slots of blocks that are `u32::MAX` are not stored to.
    pub tables: DevicePtr,
    /// Blocks per table.
    pub table_stride: usize,
}

/// The rows of the pass that verifies the drafts. Row `sequence * rows + node` is a node, the root being node 0. Rows
/// without a node get token 0, position `committed`, slot `u32::MAX` and see nothing.
#[derive(Debug, Clone, Copy)]
pub struct DraftRows {
    /// Rows per sequence: 1 + budget, or more.
    pub rows: usize,
    /// u32 per row.
    pub tokens: DevicePtr,
    /// u32 per row.
    pub positions: DevicePtr,
    /// u32 per row: physical slot.
    pub kv_slot: DevicePtr,
    /// u32 per row: depth + 1, and 0 in chains, for which it may be null.
    pub path_len: DevicePtr,
    /// u16 `[row][64]`: node at every depth of the row's path, itself last (trees only).
    pub paths: DevicePtr,
    /// u32 per row: first visible slot of a chain's row. Trees make the ranges empty; for them both may be null.
    pub vis_begin: DevicePtr,
    /// u32 per row: end of the visible slots of a chain's row.
    pub vis_end: DevicePtr,
    /// u32 per row: the node's parent, `u32::MAX` for roots and rows without a node.
    pub parents: DevicePtr,
    /// u32 per sequence: rows with a node. May be null.
    pub seq_rows: DevicePtr,
    /// u32 `[sequences * ceil(rows / tile_rows)][4]`: sequence or `u32::MAX`, first row, rows with a node, 0. May be
    /// null.
    pub tiles: DevicePtr,
    /// Rows of a tile.
    pub tile_rows: usize,
}

/// The kernels of `draft_tree.cu`.
pub struct DraftTreeKernels {
    device: Arc<Device>,
    /// For budgets up to 32, 64, 128, 256.
    trees: [Function; 4],
    chain: Function,
}

impl DraftTreeKernels {
    /// Compiles them.
    ///
    /// # Errors
    /// As [`Device::module`].
    pub fn load(device: &Arc<Device>) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE, &[])?;
        let trees = [
            module.function("draft_tree_32")?,
            module.function("draft_tree_64")?,
            module.function("draft_tree_128")?,
            module.function("draft_tree_256")?,
        ];
        let most = device.shared_memory_per_block() as usize - STATIC_SHARED;
        for tree in &trees {
            tree.allow_shared_memory(most as u32)?;
        }
        Ok(Self {
            trees,
            chain: module.function("draft_chain")?,
            device: device.clone(),
        })
    }

    /// Builds the best-first tree of at most `budget` nodes below the root of each of `sequences` sequences, node by node
    /// that of [`treespec_tree::best_first`], then cut by [`TokenTree::truncate_depth`]. `records` may be null or hold
    /// [`DraftRecords`].
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a shape that does not fit, or when the launch is refused.
    pub fn tree(
        &self,
        sequences: usize,
        budget: usize,
        candidates: DraftCandidates,
        state: BatchState,
        rows: DraftRows,
        records: DevicePtr,
    ) -> Result<(), CudaError> {
        let shared = tree_shared_memory(candidates, rows.rows);
        let available = self.device.shared_memory_per_block() as usize - STATIC_SHARED;
        check_tree(budget, candidates, rows.rows)?;
        if shared.bytes > available {
            return Err(CudaError::Unsupported(format!(
                "{} candidates at {} depths need {} bytes of shared memory and the device has {available}",
                candidates.count, candidates.depths, shared.bytes
            )));
        }
        let variant = match budget {
            0..=32 => 0,
            33..=64 => 1,
            65..=128 => 2,
            _ => 3,
        };
        Launch::new(&self.trees[variant])
            .grid(sequences, 1, 1)
            .block(THREADS)
            .shared(shared.bytes)
            .arg(candidates.top.ids)
            .arg(candidates.top.logits)
            .arg(candidates.top.normaliser)
            .arg(candidates.rows as u32)
            .arg(candidates.top.stride as u32)
            .arg(candidates.depths as u32)
            .arg(candidates.count as u32)
            .arg(budget as u32)
            .arg(state.roots)
            .arg(state.committed)
            .arg(state.max_depths)
            .arg(state.tables)
            .arg(state.table_stride as u32)
            .arg(rows.rows as u32)
            .arg(rows.tokens)
            .arg(rows.positions)
            .arg(rows.kv_slot)
            .arg(rows.path_len)
            .arg(rows.paths)
            .arg(rows.vis_begin)
            .arg(rows.vis_end)
            .arg(rows.parents)
            .arg(rows.seq_rows)
            .arg(rows.tiles)
            .arg(rows.tile_rows as u32)
            .arg(records)
            .arg(shared.tokens_at as u32)
            .run(&self.device)
    }

    /// Builds the chain of each depth's best candidate for each of `sequences` sequences: that of
    /// [`treespec_tree::chain`], cut after the depth limit and at the rows of the sequence. `candidates.count` is not
    /// read.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a shape that does not fit, or when the launch is refused.
    pub fn chain(
        &self,
        sequences: usize,
        candidates: DraftCandidates,
        state: BatchState,
        rows: DraftRows,
        records: DevicePtr,
    ) -> Result<(), CudaError> {
        if candidates.depths > MAX_BUDGET
            || candidates.depths > candidates.rows
            || !(1..=THREADS).contains(&rows.rows)
        {
            return Err(CudaError::Unsupported(format!(
                "a chain over {} of {} depths in {} rows",
                candidates.depths, candidates.rows, rows.rows
            )));
        }
        Launch::new(&self.chain)
            .grid(sequences, 1, 1)
            .block(THREADS)
            .arg(candidates.top.ids)
            .arg(candidates.top.logits)
            .arg(candidates.top.normaliser)
            .arg(candidates.rows as u32)
            .arg(candidates.top.stride as u32)
            .arg(candidates.depths as u32)
            .arg(state.roots)
            .arg(state.committed)
            .arg(state.max_depths)
            .arg(state.tables)
            .arg(state.table_stride as u32)
            .arg(rows.rows as u32)
            .arg(rows.tokens)
            .arg(rows.positions)
            .arg(rows.kv_slot)
            .arg(rows.path_len)
            .arg(rows.vis_begin)
            .arg(rows.vis_end)
            .arg(rows.parents)
            .arg(rows.seq_rows)
            .arg(rows.tiles)
            .arg(rows.tile_rows as u32)
            .arg(records)
            .run(&self.device)
    }
}

fn check_tree(budget: usize, candidates: DraftCandidates, rows: usize) -> Result<(), CudaError> {
    let wrong = |what: String| Err(CudaError::Unsupported(what));
    if budget > MAX_BUDGET || rows > THREADS || rows < budget + 1 {
        return wrong(format!(
            "a tree of {budget} nodes in {rows} rows: at most {MAX_BUDGET} in at most {THREADS}, with one more for the root"
        ));
    }
    if !(1..=MOST_DEPTHS).contains(&candidates.depths) || candidates.depths > candidates.rows {
        return wrong(format!(
            "a tree over {} of {} depths: 1 to {MOST_DEPTHS} work",
            candidates.depths, candidates.rows
        ));
    }
    if !(1..=MAX_BUDGET).contains(&candidates.count) || candidates.count > candidates.top.stride {
        return wrong(format!(
            "{} of {} candidates per depth: 1 to {MAX_BUDGET} work",
            candidates.count, candidates.top.stride
        ));
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
struct TreeShared {
    tokens_at: usize,
    bytes: usize,
}

/// The layout that the kernel file describes.
fn tree_shared_memory(candidates: DraftCandidates, rows: usize) -> TreeShared {
    let (depths, count) = (candidates.depths, candidates.count);
    let log_probs = 8 * (depths + 2) * (count + 2);
    let path_words = (((depths + 2) / 2) | 1).min(32);
    let tokens_at = log_probs.max(4 * rows * path_words).next_multiple_of(16);
    TreeShared {
        tokens_at,
        bytes: tokens_at + 4 * depths * (count + count.div_ceil(32)),
    }
}

/// The drafts of a batch for the host, in memory that the kernels write to.
pub struct DraftRecords {
    words: PinnedBuffer<u32>,
    rows: usize,
}

impl DraftRecords {
    /// Room for `sequences` drafts of `rows` rows.
    ///
    /// # Errors
    /// When the host has no more memory to pin.
    pub fn new(device: &Arc<Device>, sequences: usize, rows: usize) -> Result<Self, CudaError> {
        Ok(Self {
            words: PinnedBuffer::new(device, sequences * record_words(rows))?,
            rows,
        })
    }

    /// Where the kernels write them. The rows of a sequence must be those of [`DraftRecords::new`].
    pub fn device_ptr(&self) -> DevicePtr {
        self.words.device_ptr()
    }

    /// The draft of a sequence, once the kernel or one behind it has been waited for.
    ///
    /// # Errors
    /// [`TreeError`] when the sequence took no part, or when the record is no tree.
    ///
    /// # Panics
    /// When there is no such sequence.
    pub fn tree(&self, sequence: usize) -> Result<TokenTree, TreeError> {
        let words = record_words(self.rows);
        let record = &self.words.as_slice()[sequence * words..(sequence + 1) * words];
        read_record(record, self.rows)
    }
}

/// Words of the record of one sequence.
fn record_words(rows: usize) -> usize {
    RECORD_HEADER + 4 * rows
}

fn read_record(record: &[u32], rows: usize) -> Result<TokenTree, TreeError> {
    let nodes = (record[0] as usize).min(rows);
    let body = &record[RECORD_HEADER..];
    let (tokens, body) = body.split_at(rows);
    let (parents, log_probs) = body.split_at(rows);
    let log_probs = log_probs.as_chunks::<2>().0;
    if nodes == 0 {
        return Err(TreeError::Empty);
    }
    let mut tree = TokenTree::root_only(tokens[0]);
    for node in 1..nodes {
        let [low, high] = log_probs[node];
        let log_prob = f64::from_bits(u64::from(high) << 32 | u64::from(low));
        let parent = if parents[node] == NONE {
            usize::MAX
        } else {
            parents[node] as usize
        };
        tree.push(parent, tokens[node], log_prob)?;
    }
    Ok(tree)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(depths: usize, count: usize) -> DraftCandidates {
        DraftCandidates {
            top: HeadTop {
                ids: DevicePtr::NULL,
                logits: DevicePtr::NULL,
                stride: count,
                normaliser: DevicePtr::NULL,
                gathered: DevicePtr::NULL,
            },
            rows: depths,
            depths,
            count,
        }
    }

    #[test]
    fn a_record_is_read_back() {
        let bits = |value: f64| {
            let bits = value.to_bits();
            [bits as u32, (bits >> 32) as u32]
        };
        let mut record = vec![2, 0, 0, 0, 7, 9, 0, NONE, 0, NONE];
        record.extend([0.0, -0.3, 5.0].map(bits).concat());
        let tree = read_record(&record, 3).unwrap();
        assert_eq!(tree.tokens(), [7, 9]);
        assert_eq!(tree.parent(1), Some(0));
        assert_eq!(tree.log_probs(), [0.0, -0.3]);
        record[0] = 0;
        assert!(read_record(&record, 3).is_err());
        record[0] = 3;
        assert!(read_record(&record, 3).is_err());
    }

    #[test]
    fn shared_memory_holds_candidates_or_paths() {
        let wide = tree_shared_memory(candidates(15, 63), 64);
        assert_eq!(wide.tokens_at, (8usize * 17 * 65).next_multiple_of(16));
        assert_eq!(wide.bytes, wide.tokens_at + 4 * 15 * (63 + 2));
        let narrow = tree_shared_memory(candidates(15, 1), 256);
        assert_eq!(narrow.tokens_at, 4 * 256 * 9);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        assert!(check_tree(63, candidates(15, 63), 64).is_ok());
        assert!(check_tree(63, candidates(15, 63), 63).is_err());
        assert!(check_tree(256, candidates(15, 63), 256).is_err());
        assert!(check_tree(63, candidates(64, 63), 64).is_err());
        assert!(check_tree(63, candidates(0, 63), 64).is_err());
        assert!(check_tree(255, candidates(15, 256), 256).is_err());
    }
}
