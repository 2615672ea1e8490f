//! A target with its cache, driven one sequence at a time.

use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_engine::{
    Backend, BlockPool, BlockTable, CpuOptions, CpuTarget, ForwardOutput, HeadRequest, HeadRow,
    RowBatch, RowShape, SequenceRows, TargetOptions,
};
use treespec_tests::case_path;
use treespec_tree::TokenTree;

pub(crate) const TOP5: HeadRequest = HeadRequest {
    top_k: 5,
    normaliser: true,
    ..HeadRequest::ARGMAX
};

pub(crate) struct Target {
    pub(crate) backend: CpuTarget,
    pub(crate) pool: BlockPool,
}

impl Target {
    pub(crate) fn load(case: &str, drafter: Option<&DrafterCheckpoint>) -> Self {
        let checkpoint = TargetCheckpoint::open(&case_path(case, "model")).unwrap();
        Self::open(&checkpoint, drafter, CpuOptions::f32(2))
    }

    pub(crate) fn open(
        checkpoint: &TargetCheckpoint,
        drafter: Option<&DrafterCheckpoint>,
        cpu: CpuOptions,
    ) -> Self {
        let kv_tokens = 4_096;
        let options = TargetOptions { cpu, kv_tokens };
        let backend = CpuTarget::load(checkpoint, drafter, &options, &mut |_| {}).unwrap();
        let pool = BlockPool::new(backend.spec().num_blocks);
        Self { backend, pool }
    }

    pub(crate) fn table(&mut self, tokens: usize) -> BlockTable {
        let mut table = BlockTable::default();
        self.pool.grow(&mut table, tokens).unwrap();
        table
    }

    /// Rows of one sequence, head and features of all of them.
    pub(crate) fn rows(
        &mut self,
        table: &BlockTable,
        committed: usize,
        tokens: &[u32],
        shape: RowShape<'_>,
    ) -> ForwardOutput {
        let head = vec![Some(TOP5); tokens.len()];
        let features = self.backend.spec().feature_size.is_some();
        let sequences = vec![SequenceRows {
            table,
            committed,
            tokens,
            shape,
            head: &head,
            sampling: None,
            features,
        }];
        self.backend
            .forward(&RowBatch { sequences })
            .unwrap()
            .remove(0)
    }

    pub(crate) fn tree(
        &mut self,
        table: &BlockTable,
        committed: usize,
        tree: &TokenTree,
    ) -> Vec<HeadRow> {
        let ancestors = tree.ancestors();
        let shape = RowShape::tree(tree, &ancestors);
        self.rows(table, committed, tree.tokens(), shape).head
    }
}

pub(crate) fn log_probs(row: &HeadRow) -> Vec<(u32, f32)> {
    row.top
        .iter()
        .map(|s| (s.token, s.score - row.log_normaliser))
        .collect()
}

pub(crate) fn bits(rows: &[HeadRow]) -> Vec<(u32, Vec<(u32, u32)>)> {
    rows.iter()
        .map(|row| {
            let top = row.top.iter().map(|s| (s.token, s.score.to_bits()));
            (row.log_normaliser.to_bits(), top.collect())
        })
        .collect()
}
