//! Sampled answers with what the drafter would have proposed at every place of them.
//!
//! An answer does not depend on its drafts, so every ranking of candidates can be tried on the same answers afterwards.

use anyhow::{Context as _, Result};
use treespec_engine::{
    BlockPool, BlockRequest, BlockTable, HeadRow, RowBatch, RowShape, SequenceRows, Speculator,
};

use crate::local_target::PREFILL_CHUNK;

/// An answer, and a block for every place where a step may begin.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    /// Seed of the answer.
    pub(crate) seed: u64,
    /// Absolute position of the answer's first token.
    pub(crate) start: usize,
    /// The answer.
    pub(crate) tokens: Vec<u32>,
    /// Entry `i` has the head rows of the block whose root is token `i`, by depth. The last token has none.
    pub(crate) blocks: Vec<Vec<HeadRow>>,
}

impl Trace {
    /// What the drafter proposes in an answer to `prompt`, with this many candidates per depth.
    ///
    /// # Errors
    /// Faults of the models, or a text beyond the context.
    pub(crate) fn of(
        model: &mut dyn Speculator,
        prompt: &[u32],
        answer: Vec<u32>,
        seed: u64,
        candidates: usize,
    ) -> Result<Self> {
        let text: Vec<u32> = prompt.iter().chain(&answer).copied().collect();
        let features = features(model, &text)?;
        let width = features.len() / text.len().max(1);
        let drafter = model.drafter();
        let context = drafter.open()?;
        let mut blocks = Vec::new();
        let mut end = 0;
        for root in prompt.len()..text.len().saturating_sub(1) {
            // A root's own features come with the step that verifies it.
            let rows = &features[end * width..root * width];
            drafter.append_context(context, end as u32, rows)?;
            end = root;
            let block = BlockRequest {
                context,
                root_token: text[root],
            };
            let hidden = drafter.block_hidden(&[block])?;
            blocks.push(drafter.head_topk(&hidden, candidates)?);
        }
        drafter.close(context);
        Ok(Self {
            seed,
            start: prompt.len(),
            tokens: answer,
            blocks,
        })
    }
}

/// The drafter's features of all tokens of a text, `[tokens, hidden]`.
fn features(model: &mut dyn Speculator, text: &[u32]) -> Result<Vec<f32>> {
    let mut table = BlockTable::default();
    BlockPool::new(model.spec().num_blocks).grow(&mut table, text.len())?;
    let mut features = Vec::new();
    for (index, tokens) in text.chunks(PREFILL_CHUNK).enumerate() {
        let head = vec![None; tokens.len()];
        let sequence = SequenceRows {
            table: &table,
            committed: index * PREFILL_CHUNK,
            tokens,
            shape: RowShape::Chain,
            head: &head,
            sampling: None,
            features: true,
        };
        let outputs = model.forward(&RowBatch {
            sequences: vec![sequence],
        })?;
        let output = outputs.into_iter().next();
        features.extend(output.context("the model returned nothing")?.features);
    }
    Ok(features)
}
