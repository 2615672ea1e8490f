//! Decoding on a [`Speculator`]: what the verify service does with a sequence, without the service.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use treespec_engine::{
    BlockPool, BlockTable, ContextId, DraftShape, EngineError, ForwardOutput, HeadRequest, HeadRow,
    RowBatch, RowShape, SequenceRows, Speculated, SpeculativeStep, Speculator, StepBatch, TreeRows,
    VerifiedTree,
};
use treespec_sampling::{Coupling, Processors, Ranking, SamplingParams};
use treespec_tree::TokenTree;

use super::draft_mode::most_nodes;
use crate::bench::{
    figures::{ByStage, Cost},
    questions::Question,
};
use crate::local_target::PREFILL_CHUNK;

/// An answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::bench) struct Answered {
    /// Generated ids, a final stop token included.
    pub(in crate::bench) tokens: Vec<u32>,
    /// Drafted tokens accepted in every step.
    pub(in crate::bench) rounds: Vec<u32>,
}

/// How tokens are drawn.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::bench) struct Draw {
    /// With a seed.
    pub(in crate::bench) params: SamplingParams,
    /// What drafters make of the noise.
    pub(in crate::bench) ranking: Ranking,
}

impl Draw {
    fn processors(&self) -> Processors<'_> {
        Processors::new(&self.params)
    }

    fn coupling(&self) -> Option<Coupling> {
        Coupling::of(&self.params, self.ranking)
    }
}

/// A model that decodes batches of questions one after the other.
pub(in crate::bench) struct Decoder {
    model: Box<dyn Speculator>,
    pool: BlockPool,
    block_size: usize,
    stop_tokens: Vec<u32>,
    /// How tokens are chosen; `None` takes the best.
    draw: Option<Draw>,
}

impl Decoder {
    /// A decoder whose answers end with one of `stop_tokens`.
    pub(in crate::bench) fn new(
        mut model: Box<dyn Speculator>,
        stop_tokens: Vec<u32>,
        draw: Option<Draw>,
    ) -> Self {
        let block_size = model.drafter().spec().block_size;
        Self {
            pool: BlockPool::new(model.spec().num_blocks),
            block_size,
            stop_tokens,
            draw,
            model,
        }
    }

    /// How the next answers are drawn; `None` takes the best tokens.
    pub(in crate::bench) fn set_draw(&mut self, draw: Option<Draw>) {
        self.draw = draw;
    }

    /// The models. Between answers nothing in them is in use.
    pub(in crate::bench) fn model(&mut self) -> &mut dyn Speculator {
        self.model.as_mut()
    }

    /// What decides the bits of a result.
    pub(in crate::bench) fn numerics_profile(&self) -> &str {
        &self.model.spec().numerics_profile
    }

    /// Answers `questions` together: every step runs all sequences that are not done.
    ///
    /// # Errors
    /// A question beyond the context length or the KV cache, or a fault of the model.
    pub(in crate::bench) fn answer(
        &mut self,
        questions: &[Question],
        shape: Option<DraftShape>,
    ) -> Result<(Vec<Answered>, Cost)> {
        let arrived = Instant::now();
        let mut sequences = questions
            .iter()
            .map(|question| self.start(question, shape))
            .collect::<Result<Vec<_>>>()?;
        let first_tokens = Instant::now();
        let mut spent = Spent::default();
        loop {
            let mut running: Vec<&mut Sequence> = sequences
                .iter_mut()
                .filter(|sequence| !sequence.is_done(&self.stop_tokens))
                .collect();
            if running.is_empty() {
                break;
            }
            spent.steps += running.len();
            spent.forwards += 1;
            match shape {
                None => self.plain_step(&mut running, &mut spent)?,
                Some(shape) => self.speculative_step(&mut running, shape, &mut spent)?,
            }
        }
        let decode_seconds = first_tokens.elapsed().as_secs_f64();
        let generated: usize = sequences.iter().map(|one| one.answered.tokens.len()).sum();
        let cost = Cost {
            answers: questions.len() as u32,
            completion_tokens: generated as u32,
            steps: spent.steps as u32,
            forwards: spent.forwards,
            decode_seconds,
            time_to_first_token_seconds: (first_tokens - arrived).as_secs_f64(),
            stage_seconds: spent.stages(),
        };
        let answers = sequences.into_iter().map(|sequence| self.end(sequence));
        Ok((answers.collect(), cost))
    }

    /// The two best tokens after `tokens`, by unprocessed logit.
    ///
    /// # Errors
    /// As [`Self::answer`].
    pub(in crate::bench) fn best_two(&mut self, tokens: &[u32]) -> Result<HeadRow> {
        let head = HeadRequest {
            top_k: 2,
            ..HeadRequest::ARGMAX
        };
        let mut table = BlockTable::default();
        self.pool.grow(&mut table, tokens.len())?;
        let row = self.prefill(tokens, &table, head, None)?;
        self.pool.release(&mut table);
        Ok(row)
    }

    /// Runs the prompt and decides the first token.
    fn start(&mut self, question: &Question, shape: Option<DraftShape>) -> Result<Sequence> {
        let prompt = question.tokens.len();
        let most_tokens = question.max_tokens as usize;
        let context_length = self.model.spec().context_length;
        ensure!(
            most_tokens > 0 && prompt + most_tokens <= context_length,
            "a prompt of {prompt} and an answer of {most_tokens} tokens are not in the context length {context_length}"
        );
        let mut table = BlockTable::default();
        let rows = prompt + most_tokens + most_nodes(shape, self.block_size);
        self.pool.grow(&mut table, rows)?;
        let context = shape.map(|_| self.model.drafter().open()).transpose()?;
        let first = self.first_token(&question.tokens, &table, context)?;
        Ok(Sequence {
            table,
            committed: prompt,
            context,
            room: context_length - 1,
            max_tokens: most_tokens,
            answered: Answered {
                tokens: vec![first],
                rounds: Vec::new(),
            },
        })
    }

    /// Runs the prompt. A sampled token is chosen by a step over the prompt's last one, so that all tokens are chosen in
    /// the same way.
    fn first_token(
        &mut self,
        prompt: &[u32],
        table: &BlockTable,
        context: Option<ContextId>,
    ) -> Result<u32> {
        let (Some(draw), Some((last, before))) = (self.draw.clone(), prompt.split_last()) else {
            let last = self.prefill(prompt, table, HeadRequest::ARGMAX, context)?;
            return treespec_sampling::greedy(&last.top)
                .ok_or_else(|| EngineError::NonFiniteLogits { row: 0 }.into());
        };
        if !before.is_empty() {
            self.prefill(before, table, HeadRequest::ARGMAX, context)?;
        }
        let root = TokenTree::root_only(*last);
        let output = self.model.step(&StepBatch {
            rows: Vec::new(),
            trees: vec![TreeRows {
                table,
                committed: before.len(),
                tree: &root,
                head: HeadRequest::ARGMAX,
                sampling: Some(draw.processors().into()),
                features: context.is_some(),
            }],
        })?;
        let verified = output
            .trees
            .first()
            .context("the model returned nothing for a step")?;
        if let Some(context) = context {
            let start = before.len() as u32;
            self.model
                .drafter()
                .append_context(context, start, &verified.features)?;
        }
        Ok(verified.acceptance.bonus)
    }

    /// Runs `tokens` in chunks and returns the head row of the last one. Their features go to `context`.
    fn prefill(
        &mut self,
        tokens: &[u32],
        table: &BlockTable,
        head: HeadRequest,
        context: Option<ContextId>,
    ) -> Result<HeadRow> {
        let mut last = None;
        for (index, chunk) in tokens.chunks(PREFILL_CHUNK).enumerate() {
            let committed = index * PREFILL_CHUNK;
            let mut heads = vec![None; chunk.len()];
            if committed + chunk.len() == tokens.len() {
                heads[chunk.len() - 1] = Some(head);
            }
            let rows = SequenceRows {
                table,
                committed,
                tokens: chunk,
                shape: RowShape::Chain,
                head: &heads,
                sampling: None,
                features: context.is_some(),
            };
            let outputs = self.model.forward(&RowBatch {
                sequences: vec![rows],
            })?;
            let ForwardOutput { head, features } = outputs
                .into_iter()
                .next()
                .context("the model returned nothing for a prompt")?;
            if let Some(context) = context {
                let drafter = self.model.drafter();
                drafter.append_context(context, committed as u32, &features)?;
            }
            last = head.into_iter().next();
        }
        last.context("a prompt without tokens")
    }

    /// One token for every sequence.
    fn plain_step(&mut self, running: &mut [&mut Sequence], spent: &mut Spent) -> Result<()> {
        let roots: Vec<TokenTree> = running
            .iter()
            .map(|sequence| TokenTree::root_only(sequence.root()))
            .collect();
        let trees = running
            .iter()
            .zip(&roots)
            .map(|(sequence, tree)| TreeRows {
                table: &sequence.table,
                committed: sequence.committed,
                tree,
                head: HeadRequest::ARGMAX,
                sampling: self.draw.as_ref().map(|draw| draw.processors().into()),
                features: false,
            })
            .collect();
        let output = self.model.step(&StepBatch {
            rows: Vec::new(),
            trees,
        })?;
        spent.verify += output.forward;
        spent.accept += output.accept;
        ensure_one_each(running.len(), output.trees.len())?;
        for ((sequence, tree), verified) in running.iter_mut().zip(&roots).zip(&output.trees) {
            sequence.commit(tree, verified, &self.stop_tokens);
        }
        Ok(())
    }

    /// One draft with its verification for every sequence.
    fn speculative_step(
        &mut self,
        running: &mut [&mut Sequence],
        shape: DraftShape,
        spent: &mut Spent,
    ) -> Result<()> {
        let steps = running
            .iter()
            .map(|sequence| {
                Ok(SpeculativeStep {
                    table: &sequence.table,
                    committed: sequence.committed,
                    root: sequence.root(),
                    context: sequence.context.context("a sequence without a draft")?,
                    shape,
                    max_depth: sequence.room - sequence.committed,
                    head: HeadRequest::ARGMAX,
                    sampling: self.draw.as_ref().map(Draw::processors),
                    coupling: self.draw.as_ref().and_then(Draw::coupling),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let outcomes = self.model.speculate(&steps)?;
        ensure_one_each(running.len(), outcomes.len())?;
        if let Some(outcome) = outcomes.first() {
            spent.add(outcome);
        }
        for (sequence, outcome) in running.iter_mut().zip(&outcomes) {
            sequence.commit(&outcome.tree, &outcome.verified, &self.stop_tokens);
        }
        Ok(())
    }

    fn end(&mut self, mut sequence: Sequence) -> Answered {
        if let Some(context) = sequence.context {
            self.model.drafter().close(context);
        }
        self.pool.release(&mut sequence.table);
        sequence.answered
    }
}

fn ensure_one_each(sequences: usize, outcomes: usize) -> Result<()> {
    ensure!(
        sequences == outcomes,
        "a step of {sequences} sequences returned {outcomes} outcomes"
    );
    Ok(())
}

/// A sequence that is being decoded. Its last token is decided and has not been run through the target.
struct Sequence {
    table: BlockTable,
    committed: usize,
    context: Option<ContextId>,
    /// The last position of the context length.
    room: usize,
    max_tokens: usize,
    answered: Answered,
}

impl Sequence {
    fn root(&self) -> u32 {
        // `start` puts the first token in, and none is ever taken out.
        self.answered.tokens.last().copied().unwrap_or_default()
    }

    fn is_done(&self, stop_tokens: &[u32]) -> bool {
        self.answered.tokens.len() >= self.max_tokens || stop_tokens.contains(&self.root())
    }

    /// Takes the accepted path and the bonus token, up to the first that ends the answer.
    fn commit(&mut self, tree: &TokenTree, verified: &VerifiedTree, stop_tokens: &[u32]) {
        let acceptance = &verified.acceptance;
        self.committed += acceptance.path.len();
        self.answered.rounds.push(acceptance.accepted() as u32);
        let accepted = acceptance.path.iter().skip(1);
        let tokens = accepted
            .map(|&node| tree.tokens()[node])
            .chain([acceptance.bonus]);
        for token in tokens {
            if self.is_done(stop_tokens) {
                break;
            }
            self.answered.tokens.push(token);
        }
    }
}

/// What the steps of a batch cost. The times of a pass are every sequence's: it is counted once.
#[derive(Debug, Default)]
struct Spent {
    steps: usize,
    forwards: u32,
    draft: Duration,
    head: Duration,
    build: Duration,
    verify: Duration,
    accept: Duration,
}

impl Spent {
    fn add(&mut self, outcome: &Speculated) {
        self.draft += outcome.draft;
        self.head += outcome.head;
        self.build += outcome.build;
        self.verify += outcome.forward;
        self.accept += outcome.accept;
    }

    fn stages(&self) -> ByStage<f64> {
        let wire = Duration::ZERO;
        ByStage(
            [
                self.draft,
                self.head,
                self.build,
                wire,
                self.verify,
                self.accept,
            ]
            .map(|time| time.as_secs_f64()),
        )
    }
}

#[cfg(test)]
mod tests;
