//! A target in this process with one sequence in its cache, for commands that need no service.

use std::{ops::Range, path::Path};

use anyhow::{Context as _, Result, ensure};
use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_engine::{
    Backend, BlockPool, BlockTable, ForwardOutput, HeadRequest, HeadRow, RowBatch, RowShape,
    ScoredToken, SequenceRows, StepBatch, TargetOptions, TreeRows,
};
use treespec_tree::TokenTree;

use crate::models::ModelArgs;

/// Rows of one prefill forward, as the verify service chooses them.
pub(crate) const PREFILL_CHUNK: usize = 128;

/// A loaded target and the KV rows of one sequence.
pub(crate) struct LocalTarget {
    backend: Box<dyn Backend>,
    table: BlockTable,
    committed: usize,
}

impl LocalTarget {
    /// Loads `checkpoint` with room for `rows` KV rows, on the device and with the threads of `args`. With a drafter it
    /// also computes that drafter's features.
    ///
    /// # Errors
    /// When the weights can't be read, the drafter was made for another target, or there is no such device.
    pub(crate) fn load(
        checkpoint: &TargetCheckpoint,
        drafter: Option<&DrafterCheckpoint>,
        args: &ModelArgs,
        rows: usize,
    ) -> Result<Self> {
        let options = TargetOptions {
            cpu: args.cpu()?,
            kv_tokens: rows.max(1),
        };
        let backend = treespec_verify::load_target(
            args.device.unwrap_or_default(),
            checkpoint,
            drafter,
            &options,
            &mut |_| {},
        )?;
        Self::new(backend, rows)
    }

    /// `backend` with one sequence of at most `rows` KV rows.
    ///
    /// # Errors
    /// When its cache is smaller.
    pub(crate) fn new(backend: Box<dyn Backend>, rows: usize) -> Result<Self> {
        let mut table = BlockTable::default();
        BlockPool::new(backend.spec().num_blocks).grow(&mut table, rows)?;
        Ok(Self {
            backend,
            table,
            committed: 0,
        })
    }

    /// Runs `tokens` through the target and keeps them. Returns the head row of the last one and, when asked for,
    /// the drafter's feature rows `[tokens, hidden]`.
    ///
    /// # Errors
    /// No tokens, an unknown one, or more than the context holds.
    pub(crate) fn prefill(
        &mut self,
        tokens: &[u32],
        features: bool,
    ) -> Result<(HeadRow, Vec<f32>)> {
        let mut rows = Vec::new();
        let mut last = None;
        for (index, chunk) in tokens.chunks(PREFILL_CHUNK).enumerate() {
            let end = index * PREFILL_CHUNK + chunk.len();
            let mut head = vec![None; chunk.len()];
            if end == tokens.len() {
                head[chunk.len() - 1] = Some(HeadRequest::ARGMAX);
            }
            let output = self.forward(chunk, RowShape::Chain, &head, features)?;
            self.committed += chunk.len();
            rows.extend(output.features);
            last = output.head.into_iter().next();
        }
        let last = last.context("there are no tokens to run")?;
        Ok((last, rows))
    }

    /// What the target says after every token of `text` but the last, from token `from` on: the best token, and the
    /// log-probability of the one that follows. Forgets what was kept.
    ///
    /// # Errors
    /// An unknown token, or a text beyond the context.
    pub(crate) fn score_text(&mut self, text: &[u32], from: usize) -> Result<Vec<ScoredToken>> {
        self.committed = 0;
        let mut scored = Vec::new();
        for chunk in text.chunks(PREFILL_CHUNK) {
            let start = self.committed;
            let head: Vec<_> = (start..start + chunk.len())
                .map(|position| {
                    let next = text.get(position + 1).filter(|_| position + 1 >= from);
                    next.map(|&token| HeadRequest {
                        top_k: 1,
                        normaliser: true,
                        gather: Some(token),
                        ..HeadRequest::ARGMAX
                    })
                })
                .collect();
            let output = self.forward(chunk, RowShape::Chain, &head, false)?;
            self.committed += chunk.len();
            for row in output.head {
                let best = row.top.first().context("the target chose no token")?.token;
                let logit = row.gathered.context("the target left out a logit")?;
                scored.push(ScoredToken {
                    token: best,
                    score: logit - row.log_normaliser,
                });
            }
        }
        Ok(scored)
    }

    /// The `top_k` best tokens (all at most) after every node of `tree`, whose root is the token after the kept ones.
    ///
    /// # Errors
    /// An unknown token, or a tree beyond the context.
    pub(crate) fn score_tree(&mut self, tree: &TokenTree, top_k: usize) -> Result<Vec<HeadRow>> {
        let request = HeadRequest {
            top_k: top_k.min(self.backend.spec().vocab_size),
            normaliser: true,
            ..HeadRequest::ARGMAX
        };
        let head = vec![Some(request); tree.len()];
        let ancestors = tree.ancestors();
        let output = self.forward(
            tree.tokens(),
            RowShape::tree(tree, &ancestors),
            &head,
            false,
        )?;
        Ok(output.head)
    }

    /// Verifies `tree` after the kept tokens as a step of a service does: with acceptance and compaction. Nothing of it
    /// is kept.
    ///
    /// # Errors
    /// More rows than the cache or the context holds.
    pub(crate) fn verify_tree(&mut self, tree: &TokenTree, features: bool) -> Result<()> {
        let rows = TreeRows {
            table: &self.table,
            committed: self.committed,
            tree,
            head: HeadRequest::ARGMAX,
            sampling: None,
            features,
        };
        self.backend.step(&StepBatch {
            rows: Vec::new(),
            trees: vec![rows],
        })?;
        Ok(())
    }

    /// One forward of `tokens` after the kept ones as rows of a prompt, the last of which chooses a token. They are not
    /// kept.
    ///
    /// # Errors
    /// More rows than the cache or the context holds.
    pub(crate) fn run_prompt(&mut self, tokens: &[u32], features: bool) -> Result<()> {
        let mut head = vec![None; tokens.len()];
        if let Some(last) = head.last_mut() {
            *last = Some(HeadRequest::ARGMAX);
        }
        self.forward(tokens, RowShape::Chain, &head, features)?;
        Ok(())
    }

    /// The valid token ids.
    pub(crate) fn vocabulary(&self) -> Range<u32> {
        0..self.backend.spec().vocab_size as u32
    }

    /// What decides the bits of a result.
    pub(crate) fn numerics_profile(&self) -> &str {
        &self.backend.spec().numerics_profile
    }

    fn forward(
        &mut self,
        tokens: &[u32],
        shape: RowShape<'_>,
        head: &[Option<HeadRequest>],
        features: bool,
    ) -> Result<ForwardOutput> {
        let sequence = SequenceRows {
            table: &self.table,
            committed: self.committed,
            tokens,
            shape,
            head,
            sampling: None,
            features,
        };
        let mut outputs = self.backend.forward(&RowBatch {
            sequences: vec![sequence],
        })?;
        ensure!(
            outputs.len() == 1,
            "one sequence gave {} outputs",
            outputs.len()
        );
        Ok(outputs.remove(0))
    }
}

/// Opens the target at `path`.
///
/// # Errors
/// When it is no model, with the file at fault.
pub(crate) fn open_target(path: &Path) -> Result<TargetCheckpoint> {
    Ok(TargetCheckpoint::open(path)?)
}

/// Opens the drafter at `path` and checks that it was made for `target`.
///
/// # Errors
/// When it is no drafter, or belongs to another target.
pub(crate) fn open_drafter(path: &Path, target: &TargetCheckpoint) -> Result<DrafterCheckpoint> {
    let drafter = DrafterCheckpoint::open(path)?;
    drafter.check_target(&target.config)?;
    Ok(drafter)
}
