//! The tiny models of the reference cases, and rows to run through them.

use std::path::PathBuf;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_cuda::{CudaTarget, Device};
use treespec_engine::{
    Backend, BlockPool, BlockTable, HeadRequest, HeadRow, RowBatch, RowShape, SequenceRows,
};
use treespec_tree::TokenTree;

pub(super) const CASES: [&str; 2] = ["01_llama_gqa_tied", "03_qwen3_headdim"];
pub(super) const KV_TOKENS: usize = 4_096;

/// The best three with their normaliser.
pub(super) const TOP: HeadRequest = HeadRequest {
    top_k: 3,
    normaliser: true,
    ..HeadRequest::ARGMAX
};

pub(super) fn case(name: &str) -> PathBuf {
    let here = PathBuf::from("tests/fixtures/cases").join(name);
    if here.exists() {
        return here;
    }
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/cases")
        .join(name)
}

pub(super) fn checkpoints(name: &str, drafter: &str) -> (TargetCheckpoint, DrafterCheckpoint) {
    (
        TargetCheckpoint::open(&case(name).join("model")).unwrap(),
        DrafterCheckpoint::open(&case(name).join(drafter)).unwrap(),
    )
}

pub(super) fn target(device: &Arc<Device>, name: &str) -> CudaTarget {
    let (target, drafter) = checkpoints(name, "drafter_fit");
    CudaTarget::load(device, &target, Some(&drafter), KV_TOKENS, &mut |_| {}).unwrap()
}

pub(super) fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..len).map(|_| random.random_range(5..500)).collect()
}

/// Blocks for one sequence after another.
pub(super) struct Tables {
    pub(super) pool: BlockPool,
}

impl Tables {
    pub(super) fn new(backend: &impl Backend) -> Self {
        Self {
            pool: BlockPool::new(backend.spec().num_blocks),
        }
    }

    pub(super) fn table(&mut self, rows: usize) -> BlockTable {
        let mut table = BlockTable::default();
        self.pool.grow(&mut table, rows).unwrap();
        table
    }
}

pub(super) fn chain<'a>(
    table: &'a BlockTable,
    committed: usize,
    tokens: &'a [u32],
    head: &'a [Option<HeadRequest>],
) -> SequenceRows<'a> {
    SequenceRows {
        table,
        committed,
        tokens,
        shape: RowShape::Chain,
        head,
        sampling: None,
        features: false,
    }
}

pub(super) fn run_chain(
    backend: &mut impl Backend,
    table: &BlockTable,
    committed: usize,
    tokens: &[u32],
) -> Vec<HeadRow> {
    let head = vec![Some(TOP); tokens.len()];
    let sequences = vec![chain(table, committed, tokens, &head)];
    backend
        .forward(&RowBatch { sequences })
        .unwrap()
        .remove(0)
        .head
}

pub(super) fn bits(rows: &[HeadRow]) -> Vec<Vec<(u32, u32)>> {
    let row = |row: &HeadRow| {
        let mut bits: Vec<(u32, u32)> = row
            .top
            .iter()
            .map(|s| (s.token, s.score.to_bits()))
            .collect();
        bits.push((u32::MAX, row.log_normaliser.to_bits()));
        bits
    };
    rows.iter().map(row).collect()
}

pub(super) fn random_tree(random: &mut StdRng, nodes: usize) -> TokenTree {
    let mut tree = TokenTree::root_only(random.random_range(5..500));
    while tree.len() < nodes {
        let parent = if random.random_range(0..3) == 0 {
            random.random_range(0..tree.len())
        } else {
            tree.len() - 1
        };
        let _ = tree.push(parent, random.random_range(5..500), 0.0);
    }
    tree
}
