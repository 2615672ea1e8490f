//! A drafter without weights: every result is a simple function of the context's rows and the root token.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use treespec_engine::{
    BlockRequest, ContextId, Drafter, DrafterSpec, EngineError, HeadRow, ScoredToken,
};

pub(crate) const BLOCK: usize = 5;
pub(crate) const HIDDEN: usize = 2;
pub(crate) const VOCAB: usize = 40;
pub(crate) const WINDOW: usize = 64;
/// First position that the drafter refuses.
pub(crate) const CONTEXT_LENGTH: u32 = 1000;

/// What a test sees of a drafter that the service owns.
#[derive(Debug, Default)]
pub(crate) struct Probe {
    /// Requests of every forward, in order.
    pub(crate) batches: Mutex<Vec<usize>>,
    /// Rows of every head pass, in order.
    pub(crate) head_rows: Mutex<Vec<usize>>,
    pub(crate) open_contexts: AtomicUsize,
    /// Set by a test: the device fails from now on.
    pub(crate) lost: AtomicBool,
}

#[derive(Debug)]
pub(crate) struct ScriptedDrafter {
    spec: DrafterSpec,
    probe: Arc<Probe>,
    has_head: bool,
    contexts: HashMap<u64, Context>,
    next: u64,
}

#[derive(Debug, Default)]
struct Context {
    positions: Range<u32>,
    digest: f32,
}

impl ScriptedDrafter {
    pub(crate) fn new(probe: &Arc<Probe>, has_head: bool) -> Self {
        Self {
            spec: DrafterSpec {
                block_size: BLOCK,
                hidden_size: HIDDEN,
                vocab_size: VOCAB,
                context_window: WINDOW,
                num_layers: 3,
            },
            probe: probe.clone(),
            has_head,
            contexts: HashMap::new(),
            next: 0,
        }
    }

    fn find(&self, id: ContextId) -> Result<&Context, EngineError> {
        self.contexts
            .get(&id.raw())
            .ok_or(EngineError::UnknownContext(id.raw()))
    }
}

impl Drafter for ScriptedDrafter {
    fn spec(&self) -> &DrafterSpec {
        &self.spec
    }

    fn open(&mut self) -> Result<ContextId, EngineError> {
        let id = self.next;
        self.next += 1;
        self.contexts.insert(id, Context::default());
        self.probe.open_contexts.fetch_add(1, Ordering::SeqCst);
        Ok(ContextId::from_raw(id))
    }

    fn close(&mut self, context: ContextId) {
        if self.contexts.remove(&context.raw()).is_some() {
            self.probe.open_contexts.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn context(&self, context: ContextId) -> Result<Range<u32>, EngineError> {
        Ok(self.find(context)?.positions.clone())
    }

    fn append_context(
        &mut self,
        id: ContextId,
        start: u32,
        rows: &[f32],
    ) -> Result<(), EngineError> {
        let expected = self.find(id)?.positions.clone();
        if !expected.is_empty() && expected.end != start {
            return Err(EngineError::ContextGap {
                start,
                expected: expected.end,
            });
        }
        let end = start + (rows.len() / HIDDEN) as u32;
        if end > CONTEXT_LENGTH {
            return Err(EngineError::ContextOverflow {
                position: end as usize - 1,
                context_length: CONTEXT_LENGTH as usize,
            });
        }
        let context = self
            .contexts
            .get_mut(&id.raw())
            .ok_or(EngineError::UnknownContext(id.raw()))?;
        let first = if expected.is_empty() {
            start
        } else {
            expected.start
        };
        context.positions = first.max(end.saturating_sub(WINDOW as u32))..end;
        // The order of rows matters, and how they were cut into messages does not.
        for value in rows {
            context.digest = context.digest * 0.5 + value;
        }
        Ok(())
    }

    fn block_hidden(&mut self, blocks: &[BlockRequest]) -> Result<Vec<f32>, EngineError> {
        self.probe.batches.lock().unwrap().push(blocks.len());
        if self.probe.lost.load(Ordering::SeqCst) {
            return Err(EngineError::DeviceLost("Xid 79".to_owned()));
        }
        let mut hidden = Vec::new();
        for block in blocks {
            let context = self.find(block.context)?;
            if context.positions.end >= CONTEXT_LENGTH {
                return Err(EngineError::ContextOverflow {
                    position: context.positions.end as usize,
                    context_length: CONTEXT_LENGTH as usize,
                });
            }
            for slot in 1..BLOCK {
                hidden.push(context.digest + block.root_token as f32 * 0.1 + slot as f32);
                hidden.push(context.positions.end as f32);
            }
        }
        Ok(hidden)
    }

    fn head_topk(&mut self, hidden: &[f32], k: usize) -> Result<Vec<HeadRow>, EngineError> {
        if !self.has_head {
            return Err(EngineError::NoHead);
        }
        self.probe
            .head_rows
            .lock()
            .unwrap()
            .push(hidden.len() / HIDDEN);
        Ok(head(hidden, k))
    }
}

/// The head, which a verifier has too.
pub(crate) fn head(hidden: &[f32], k: usize) -> Vec<HeadRow> {
    hidden
        .chunks_exact(HIDDEN)
        .map(|row| {
            let mut top: Vec<ScoredToken> = (0..VOCAB as u32)
                .map(|token| {
                    let x = token as f32;
                    let score = 2.0 * (row[0] + 0.7 * x).sin() + (0.1 * row[1] + 1.3 * x).cos();
                    ScoredToken { token, score }
                })
                .collect();
            let log_normaliser = top.iter().map(|s| s.score.exp()).sum::<f32>().ln();
            // Stable, so ties stay in order of the token id.
            top.sort_by(|a, b| b.score.total_cmp(&a.score));
            top.truncate(k);
            HeadRow {
                log_normaliser,
                top,
                gathered: None,
                chosen: None,
                rank: None,
            }
        })
        .collect()
}
