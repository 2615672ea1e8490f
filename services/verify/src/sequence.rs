//! One request from prefill to its last token.

mod drafts;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tonic::Status;
use treespec_engine::{DraftShape, HeadRequest, HeadRow};
use treespec_grammar::TreeLimits;
use treespec_rpc::ServiceError;
use treespec_rpc::convert::{Speculation, step_tree_to_proto};
use treespec_rpc::proto::verify::v1 as pb;
use treespec_rpc::proto::verify::v1::generate_response::Event;

use crate::drafting::Drafting;
use crate::engine::{DraftSource, Engine};
use crate::error::engine_fault;
use crate::forward::{DrafterContext, Place, Prefill, Speculate, Verified, Verify};
use crate::logprobs::{head_request, prompt_logprob, prompt_request, token_logprob};
use crate::request::GenerationRequest;
use crate::statistics::Statistics;
use crate::token_choice::TokenChoice;

/// How long a draft may be grown by a grammar.
const CONSTRAINT_TIME: Duration = Duration::from_millis(10);

/// Where a sequence sends what it decides.
pub(crate) type Events = mpsc::Sender<Result<pb::GenerateResponse, Status>>;

/// Decodes `request` and sends its events. Ends early without an error when nobody listens any more.
///
/// # Errors
/// Admission refused, or a fault of the engine.
pub(crate) async fn decode(
    engine: &Engine,
    mut request: GenerationRequest,
    events: &Events,
) -> Result<(), ServiceError> {
    let arrived = Instant::now();
    let shape = draft_shape(engine, &request)?;
    let most_nodes = shape.map_or(0, |shape| engine.most_nodes(shape));
    let rows = request.prompt_length + request.max_tokens + most_nodes;
    let kv = engine.kv.reserve(rows).await?;
    let drafts = match (shape, &engine.drafts, &request.drafter) {
        (Some(_), DraftSource::Hosted, _) => Drafts::Hosted(engine.queue.drafter_context()),
        (Some(_), DraftSource::Remote(links), Some(endpoint)) => Drafts::Remote(Drafting::new(
            links.clone(),
            endpoint.clone(),
            engine.feature_window,
        )),
        _ => Drafts::None,
    };
    let replayed = request.tokens.len() - request.prompt_length;
    let grammar = match request.constraint.take() {
        None => None,
        Some(source) => {
            let generated = request.tokens[request.prompt_length..].to_vec();
            let grammars = Arc::clone(&engine.grammars);
            let kind = source.kind();
            Some((kind, grammars.compile(source, generated).await?))
        }
    };
    let sequence = Sequence {
        engine,
        head: head_request(&request.output),
        choice: TokenChoice::new(
            std::mem::take(&mut request.rules),
            request.ranking,
            grammar,
            &request.tokens,
            request.prompt_length,
        ),
        replayed,
        generated: replayed,
        request,
        place: Place { kv, committed: 0 },
        shape,
        drafts,
        statistics: Statistics::new(arrived),
        events,
    };
    match sequence.run().await {
        Err(Stop::Fault(error)) => Err(error),
        Ok(()) | Err(Stop::NobodyListens) => Ok(()),
    }
}

/// The draft that a request's steps ask for, `None` for plain decoding.
fn draft_shape(
    engine: &Engine,
    request: &GenerationRequest,
) -> Result<Option<DraftShape>, ServiceError> {
    let tree = |budget: Option<u16>| DraftShape::Tree {
        budget: budget.map_or(engine.default_budget, usize::from),
    };
    let can_draft = match engine.drafts {
        DraftSource::None => false,
        DraftSource::Remote(_) => request.drafter.is_some(),
        // A lease is not needed, and one that came along is not used.
        DraftSource::Hosted => true,
    };
    let wanted = match request.speculation {
        Speculation::Ar => return Ok(None),
        Speculation::Auto { budget } => return Ok(can_draft.then(|| tree(budget))),
        Speculation::Chain => DraftShape::Chain,
        Speculation::Tree { budget } => tree(budget),
    };
    if can_draft {
        return Ok(Some(wanted));
    }
    Err(ServiceError::precondition(
        "speculation.mode",
        "chain and tree need a drafter, and the request brings no drafter lease",
    ))
}

/// Why a sequence ends before its last token.
enum Stop {
    NobodyListens,
    Fault(ServiceError),
}

impl From<ServiceError> for Stop {
    fn from(error: ServiceError) -> Self {
        Self::Fault(error)
    }
}

/// Where a sequence's drafts come from.
enum Drafts {
    None,
    Remote(Drafting),
    Hosted(Arc<DrafterContext>),
}

struct Sequence<'a> {
    engine: &'a Engine,
    request: GenerationRequest,
    place: Place,
    /// What the head returns for rows that choose a token.
    head: HeadRequest,
    choice: TokenChoice,
    shape: Option<DraftShape>,
    drafts: Drafts,
    /// New tokens that the request came with, from before a replay.
    replayed: usize,
    /// New tokens so far, those of a replay included.
    generated: usize,
    statistics: Statistics,
    events: &'a Events,
}

impl Sequence<'_> {
    async fn run(mut self) -> Result<(), Stop> {
        let first = self.prefill().await?;
        self.statistics.mark_tokens();
        let mut root = chosen(&first)?;
        let mut finish = self.emit(&[root], &[first], None).await?;
        while finish.is_none() {
            let verified = self.step(root).await?;
            self.statistics.add_step(&verified);
            self.statistics.mark_tokens();
            if let Drafts::Remote(drafting) = &mut self.drafts {
                let start = self.place.committed as u32;
                drafting.commit(start, &verified.features).await;
            }
            let path = &verified.acceptance.path;
            self.place.committed += path.len();
            let tokens = path.iter().map(|&node| verified.tree.tokens()[node]);
            self.choice.count(tokens, self.place.committed);
            root = verified.acceptance.bonus;
            finish = self.emit_step(&verified).await?;
        }
        let reason = finish.unwrap_or(pb::FinishReason::Length);
        self.finish(reason).await
    }

    /// Runs the prompt in chunks. Returns the head row of its last token.
    async fn prefill(&mut self) -> Result<HeadRow, Stop> {
        let tokens = std::mem::take(&mut self.request.tokens);
        let total = tokens.len();
        let chunk_size = self.engine.prefill_chunk;
        let mut prompt_logprobs = Vec::new();
        let mut last = None;
        for chunk in tokens.chunks(chunk_size) {
            let start = self.place.committed;
            let is_last = start + chunk.len() == total;
            let choices = self.choice.of_prompt(chunk.len(), is_last).await?;
            let output = self
                .engine
                .queue
                .prefill(Prefill {
                    place: self.place.clone(),
                    tokens: chunk.to_vec(),
                    head: self.prefill_heads(&tokens, start, chunk.len()),
                    choices,
                    features: matches!(self.drafts, Drafts::Remote(_)),
                    context: match &self.drafts {
                        Drafts::Hosted(context) => Some(Arc::clone(context)),
                        Drafts::None | Drafts::Remote(_) => None,
                    },
                })
                .await?;
            if let Drafts::Remote(drafting) = &mut self.drafts {
                drafting.commit(start as u32, &output.features).await;
            }
            self.place.committed += chunk.len();
            let mut rows = output.head;
            if self.place.committed == total {
                last = rows.pop();
            }
            prompt_logprobs.extend(rows.iter().map(prompt_logprob));
            if total > chunk_size {
                self.send(Event::Prefill(pb::PrefillProgress {
                    done_tokens: self.place.committed as u32,
                    total_tokens: total as u32,
                }))
                .await?;
            }
        }
        if self.request.output.prompt_logprobs {
            self.send(Event::PromptLogprobs(pb::PromptLogprobs {
                logprobs: prompt_logprobs,
            }))
            .await?;
        }
        last.ok_or_else(|| ServiceError::internal("prefill returned no row to decode from").into())
    }

    /// The last prompt row chooses a token; the others are read only for prompt log-probabilities.
    fn prefill_heads(&self, tokens: &[u32], start: usize, rows: usize) -> Vec<Option<HeadRequest>> {
        let wants_prompt = self.request.output.prompt_logprobs;
        (start..start + rows)
            .map(|row| match tokens.get(row + 1) {
                None => Some(self.head),
                Some(&next) if wants_prompt && row + 1 < self.request.prompt_length => {
                    Some(prompt_request(next))
                }
                Some(_) => None,
            })
            .collect()
    }

    /// Positions after the root's.
    fn room(&self) -> usize {
        (self.engine.context_length - 1).saturating_sub(self.place.committed)
    }

    /// Drafts, verifies and commits.
    async fn step(&mut self, root: u32) -> Result<Verified, Stop> {
        if let (Some(shape), Drafts::Hosted(context), 1..) = (self.shape, &self.drafts, self.room())
            && !self.choice.is_constrained()
        {
            let context = Arc::clone(context);
            return self.speculate(root, shape, context).await;
        }
        let draft = self.draft(root).await?;
        let limits = TreeLimits {
            nodes: self.shape.map_or(0, |shape| self.engine.most_nodes(shape)),
            depth: self.room(),
            time: CONSTRAINT_TIME,
        };
        let (tree, choices) = self.choice.constrain(draft, limits).await?;
        let verify = Verify {
            place: self.place.clone(),
            tree,
            head: self.head,
            choices,
            features: matches!(self.drafts, Drafts::Remote(_)),
            context: match &self.drafts {
                Drafts::Hosted(context) => Some(Arc::clone(context)),
                Drafts::None | Drafts::Remote(_) => None,
            },
        };
        Ok(self.engine.queue.verify(verify).await?)
    }

    /// A step by the hosted drafter.
    async fn speculate(
        &mut self,
        root: u32,
        shape: DraftShape,
        context: Arc<DrafterContext>,
    ) -> Result<Verified, Stop> {
        let step = Speculate {
            place: self.place.clone(),
            root,
            context,
            shape,
            max_depth: self.room(),
            head: self.head,
            rules: self.choice.rules(),
            coupling: self.choice.coupling(),
        };
        let verified = self.engine.queue.speculate(step).await?;
        match verified.draft {
            Some(cost) => self.statistics.add_draft(cost),
            None => self.statistics.add_fallback(),
        }
        Ok(verified)
    }

    async fn emit_step(&mut self, verified: &Verified) -> Result<Option<pb::FinishReason>, Stop> {
        let path = &verified.acceptance.path;
        let mut tokens: Vec<u32> = path[1..]
            .iter()
            .map(|&node| verified.tree.tokens()[node])
            .collect();
        tokens.push(verified.acceptance.bonus);
        let tree = self
            .request
            .output
            .include_trees
            .then(|| step_tree_to_proto(&verified.tree, &verified.acceptance));
        self.emit(&tokens, &verified.head, tree).await
    }

    /// Sends newly decided tokens up to the first that ends the sequence; `rows[i]` chose `tokens[i]`.
    async fn emit(
        &mut self,
        tokens: &[u32],
        rows: &[HeadRow],
        tree: Option<pb::StepTree>,
    ) -> Result<Option<pb::FinishReason>, Stop> {
        let mut finish = None;
        let mut count = 0;
        for token in tokens {
            count += 1;
            self.generated += 1;
            if self.request.stop_tokens.contains(token) {
                finish = Some(pb::FinishReason::Stop);
            } else if self.generated >= self.request.max_tokens {
                finish = Some(pb::FinishReason::Length);
            }
            if finish.is_some() {
                break;
            }
        }
        self.choice.accept(&tokens[..count])?;
        let logprobs = match self.request.output.top_logprobs {
            None => Vec::new(),
            Some(top) => rows[..count]
                .iter()
                .map(|row| token_logprob(row, top))
                .collect(),
        };
        self.send(Event::Tokens(pb::CommittedTokens {
            token_ids: tokens[..count].to_vec(),
            logprobs,
            tree,
        }))
        .await?;
        Ok(finish)
    }

    async fn finish(self, reason: pb::FinishReason) -> Result<(), Stop> {
        let completion_tokens = self.generated as u32;
        let decoded_here = (self.generated - self.replayed) as u32;
        let stale_drafts = match &self.drafts {
            Drafts::Remote(drafting) => drafting.stale_drafts(),
            Drafts::None | Drafts::Hosted(_) => 0,
        };
        self.send(Event::Finished(pb::GenerateFinished {
            finish_reason: reason.into(),
            usage: Some(pb::Usage {
                prompt_tokens: self.request.prompt_length as u32,
                completion_tokens,
                cached_tokens: 0,
            }),
            stats: Some(self.statistics.report(decoded_here, stale_drafts)),
        }))
        .await
    }

    async fn send(&self, event: Event) -> Result<(), Stop> {
        let response = pb::GenerateResponse { event: Some(event) };
        self.events
            .send(Ok(response))
            .await
            .map_err(|_| Stop::NobodyListens)
    }
}

fn chosen(row: &HeadRow) -> Result<u32, Stop> {
    let token = row.chosen.map(|chosen| chosen.token);
    token
        .or_else(|| treespec_sampling::greedy(&row.top))
        .ok_or_else(|| {
            engine_fault(&treespec_engine::EngineError::NonFiniteLogits { row: 0 }).into()
        })
}
