//! One step of the target over a ragged batch: forward, choice, acceptance walk and KV compaction in one call, so that
//! a device can do all of it without a round trip through the host.

use std::time::{Duration, Instant};

use treespec_sampling::greedy;
use treespec_tree::{Acceptance, AncestorSets, TokenTree, walk};

use crate::batch::{check_position, check_room, check_tokens, drawn};
use crate::{
    Backend, BlockTable, EngineError, ForwardOutput, HeadRequest, HeadRow, RowBatch, RowChoices,
    RowShape, SequenceRows,
};

/// A tree to verify and to commit as far as the target agrees.
#[derive(Debug, Clone, Copy)]
pub struct TreeRows<'a> {
    /// KV blocks with room for `committed + tree.len()` rows.
    pub table: &'a BlockTable,
    /// Rows already in the cache; also the position of the root.
    pub committed: usize,
    /// The tree; its root is decided but has not been run through the target.
    pub tree: &'a TokenTree,
    /// What every node wants from the head; at least one best token.
    pub head: HeadRequest,
    /// How every node chooses the token behind it; `None` takes the best.
    pub sampling: Option<RowChoices<'a>>,
    /// Whether to return the drafter's context features of the accepted rows.
    pub features: bool,
}

impl TreeRows<'_> {
    /// True when its nodes do not simply take the best token.
    pub fn is_sampled(&self) -> bool {
        drawn(self.sampling).is_some()
    }

    /// Checks what [`SequenceRows::validate`] checks, and that every node can choose a token.
    ///
    /// # Errors
    /// [`EngineError::UnknownToken`], [`EngineError::ContextOverflow`] or [`EngineError::InvalidBatch`].
    pub fn validate(&self, vocab_size: usize, context_length: usize) -> Result<(), EngineError> {
        if self.head.top_k == 0 {
            return Err(EngineError::InvalidBatch(
                "a tree whose nodes ask for no token of the head".into(),
            ));
        }
        self.sampling
            .map_or(Ok(()), |choices| choices.validate(self.tree.len()))?;
        let tokens = self.tree.tokens().iter().copied();
        check_tokens(tokens.chain(self.head.gather), vocab_size)?;
        check_room(self.table, self.committed, self.tree.len())?;
        let deepest = self.committed + self.tree.max_depth() as usize;
        check_position(deepest, context_length)
    }
}

/// What became of a tree. The accepted path is in the KV cache.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifiedTree {
    /// The accepted path and the bonus token.
    pub acceptance: Acceptance,
    /// Head rows of the accepted path: row `i` chose the `i`-th new token.
    pub head: Vec<HeadRow>,
    /// `[path, feature_size]`, when asked for.
    pub features: Vec<f32>,
}

/// Everything that one step runs. Every sequence occurs at most once.
#[derive(Debug, Clone, Default)]
pub struct StepBatch<'a> {
    /// Rows without acceptance: chunks of prompts.
    pub rows: Vec<SequenceRows<'a>>,
    /// Trees to verify.
    pub trees: Vec<TreeRows<'a>>,
}

impl StepBatch<'_> {
    /// True when there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.trees.is_empty()
    }
}

/// What a step returns, each in the place of its request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepOutput {
    /// One per entry of [`StepBatch::rows`].
    pub rows: Vec<ForwardOutput>,
    /// One per entry of [`StepBatch::trees`].
    pub trees: Vec<VerifiedTree>,
    /// Time of the forward with its head, shared by all.
    pub forward: Duration,
    /// Time of choice, walk and compaction of all trees; zero where the device does them inside the forward.
    pub accept: Duration,
}

/// [`Backend::step`] by one [`Backend::forward`] over everything, then choice, walk and compaction per tree.
///
/// # Errors
/// As [`Backend::step`].
pub fn step_by_forward<B: Backend + ?Sized>(
    backend: &mut B,
    batch: &StepBatch<'_>,
) -> Result<StepOutput, EngineError> {
    let started = Instant::now();
    let prepared: Vec<PreparedTree> = batch.trees.iter().map(PreparedTree::new).collect();
    let trees = batch.trees.iter().zip(&prepared);
    let sequences = batch
        .rows
        .iter()
        .cloned()
        .chain(trees.map(|(rows, prepared)| prepared.rows(rows)))
        .collect();
    let mut rows = backend.forward(&RowBatch { sequences })?;
    let expected = batch.rows.len() + batch.trees.len();
    if rows.len() != expected {
        return Err(EngineError::InvalidBatch(format!(
            "a forward of {expected} sequences returned {}",
            rows.len()
        )));
    }
    let verified = rows.split_off(batch.rows.len());
    let forward = started.elapsed();
    let started = Instant::now();
    let trees = batch
        .trees
        .iter()
        .zip(verified)
        .map(|(tree, output)| accept(backend, tree, output))
        .collect::<Result<_, _>>()?;
    Ok(StepOutput {
        rows,
        trees,
        forward,
        accept: started.elapsed(),
    })
}

/// What the rows of a tree borrow.
struct PreparedTree {
    /// `None` for a chain: its rows see each other without a mask.
    ancestors: Option<AncestorSets>,
    head: Vec<Option<HeadRequest>>,
}

impl PreparedTree {
    fn new(rows: &TreeRows<'_>) -> Self {
        Self {
            ancestors: (!rows.tree.is_chain()).then(|| rows.tree.ancestors()),
            head: vec![Some(rows.head); rows.tree.len()],
        }
    }

    fn rows<'a>(&'a self, rows: &TreeRows<'a>) -> SequenceRows<'a> {
        SequenceRows {
            table: rows.table,
            committed: rows.committed,
            tokens: rows.tree.tokens(),
            shape: match &self.ancestors {
                Some(ancestors) => RowShape::tree(rows.tree, ancestors),
                None => RowShape::Chain,
            },
            head: &self.head,
            sampling: rows.sampling,
            features: rows.features,
        }
    }
}

/// What the target chose behind node `row`.
fn choice(rows: &TreeRows<'_>, head: &HeadRow, row: usize) -> Result<u32, EngineError> {
    if !rows.is_sampled() {
        return greedy(&head.top).ok_or(EngineError::NonFiniteLogits { row });
    }
    let chosen = head.chosen.ok_or_else(|| {
        EngineError::InvalidBatch(
            "this device chooses the best token only: use temperature 0".into(),
        )
    })?;
    Ok(chosen.token)
}

/// Chooses at every node, walks down while the target's choice is a child, and keeps that path in the cache.
fn accept<B: Backend + ?Sized>(
    backend: &mut B,
    rows: &TreeRows<'_>,
    mut output: ForwardOutput,
) -> Result<VerifiedTree, EngineError> {
    let nodes = rows.tree.len();
    if output.head.len() != nodes {
        return Err(EngineError::InvalidBatch(format!(
            "{} head rows for a tree of {nodes} nodes",
            output.head.len()
        )));
    }
    let choices = output
        .head
        .iter()
        .enumerate()
        .map(|(row, head)| choice(rows, head, row))
        .collect::<Result<Vec<u32>, _>>()?;
    let acceptance = walk(rows.tree, |node| choices[node]);
    backend.compact(rows.table, rows.committed, &acceptance.path)?;
    let width = output.features.len() / nodes;
    let features = acceptance
        .path
        .iter()
        .flat_map(|&node| &output.features[node * width..(node + 1) * width])
        .copied()
        .collect();
    let head = acceptance
        .path
        .iter()
        .map(|&node| HeadRow {
            top: std::mem::take(&mut output.head[node].top),
            ..output.head[node].clone()
        })
        .collect();
    Ok(VerifiedTree {
        acceptance,
        head,
        features,
    })
}
