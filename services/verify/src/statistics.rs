//! What a request's speculation did and what it cost.

use std::time::{Duration, Instant};

use treespec_rpc::proto::verify::v1 as pb;

use crate::drafting::DraftCost;
use crate::forward::Verified;

/// Counts one request from its arrival.
pub(crate) struct Statistics {
    arrived: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    steps: u32,
    drafted_nodes: u64,
    accepted_by_depth: Vec<u32>,
    rounds: Vec<u32>,
    draft: DraftCost,
    verify: Duration,
    accept: Duration,
    fallback_steps: u32,
}

impl Statistics {
    pub(crate) fn new(arrived: Instant) -> Self {
        Self {
            arrived,
            first_token: None,
            last_token: None,
            steps: 0,
            drafted_nodes: 0,
            accepted_by_depth: Vec::new(),
            rounds: Vec::new(),
            draft: DraftCost::default(),
            verify: Duration::ZERO,
            accept: Duration::ZERO,
            fallback_steps: 0,
        }
    }

    /// Tokens were decided now.
    pub(crate) fn mark_tokens(&mut self) {
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
    }

    /// The draft of a step cost this much.
    pub(crate) fn add_draft(&mut self, cost: DraftCost) {
        self.draft += cost;
    }

    /// A step that wanted a draft had none.
    pub(crate) fn add_fallback(&mut self) {
        self.fallback_steps += 1;
    }

    pub(crate) fn add_step(&mut self, verified: &Verified) {
        let accepted = verified.acceptance.accepted();
        self.steps += 1;
        self.drafted_nodes += verified.tree.budget() as u64;
        if self.accepted_by_depth.len() < accepted {
            self.accepted_by_depth.resize(accepted, 0);
        }
        for count in &mut self.accepted_by_depth[..accepted] {
            *count += 1;
        }
        self.rounds.push(accepted as u32);
        self.verify += verified.timings.forward;
        self.accept += verified.timings.accept;
    }

    /// The statistics of `tokens` decoded tokens; a replay's tokens from before are not among them.
    pub(crate) fn report(&self, tokens: u32, stale_drafts: u32) -> pb::SpeculationStats {
        let since = |from: Instant, to: Option<Instant>| {
            to.map_or(0.0, |to| to.duration_since(from).as_secs_f64())
        };
        let tokens_per_step = match self.steps {
            0 => 0.0,
            steps => f64::from(tokens.saturating_sub(1)) / f64::from(steps),
        };
        pb::SpeculationStats {
            steps: self.steps,
            tokens_per_step,
            drafted_nodes: self.drafted_nodes,
            accepted_by_depth: self.accepted_by_depth.clone(),
            rounds: self.rounds.clone(),
            decode_seconds: self
                .first_token
                .map_or(0.0, |first| since(first, self.last_token)),
            time_to_first_token_seconds: since(self.arrived, self.first_token),
            stage_seconds: Some(pb::StageSeconds {
                draft: self.draft.forward.as_secs_f64(),
                head: self.draft.head.as_secs_f64(),
                tree: self.draft.tree.as_secs_f64(),
                wire: self.draft.wire.as_secs_f64(),
                verify: self.verify.as_secs_f64(),
                accept: self.accept.as_secs_f64(),
            }),
            fallback_steps: self.fallback_steps,
            stale_drafts,
        }
    }
}
