//! All work that waits at one moment: the speculative steps in one call, then prompts and trees in one forward.
//!
//! A failure is looked for by running the members alone: none spoils the work of the others, and none commits anything
//! that it did not answer.

use std::sync::Arc;

use treespec_engine::{
    ContextId, EngineError, ForwardOutput, HeadRequest, RowShape, SequenceRows, Speculated,
    SpeculativeStep, StepBatch, StepOutput, TreeRows, VerifiedTree,
};
use treespec_rpc::ServiceError;
use treespec_tree::TokenTree;

use super::contexts::DrafterContext;
use super::host::{Host, Lost};
use super::{Choices, Place, Prefill, Reply, Speculate, Timings, Verified, Verify};
use crate::drafting::DraftCost;

/// Work for one pass.
#[derive(Default)]
pub(super) struct Wave {
    members: Vec<Member>,
    steps: Vec<StepMember>,
}

/// A sequence's speculative step.
struct StepMember {
    step: Speculate,
    reply: Reply<Verified>,
}

/// A sequence's share of a forward.
enum Member {
    Prefill(Prefill, Reply<ForwardOutput>),
    Tree {
        place: Place,
        tree: TokenTree,
        head: HeadRequest,
        choices: Choices,
        features: bool,
        /// The hosted drafter's context that gets the features.
        context: Option<Arc<DrafterContext>>,
        reply: Reply<Verified>,
    },
}

impl Wave {
    pub(super) fn add_prefill(&mut self, prefill: Prefill, reply: Reply<ForwardOutput>) {
        self.members.push(Member::Prefill(prefill, reply));
    }

    pub(super) fn add_tree(&mut self, verify: Verify, reply: Reply<Verified>) {
        self.members.push(Member::Tree {
            place: verify.place,
            tree: verify.tree,
            head: verify.head,
            choices: verify.choices,
            features: verify.features || verify.context.is_some(),
            context: verify.context,
            reply,
        });
    }

    pub(super) fn add_step(&mut self, step: Speculate, reply: Reply<Verified>) {
        self.steps.push(StepMember { step, reply });
    }

    /// Runs everything and answers it.
    ///
    /// # Errors
    /// When the model is lost. What was not answered then is dropped.
    pub(super) fn run(mut self, host: &mut Host) -> Result<(), Lost> {
        self.steps.retain(|member| !member.reply.is_closed());
        let plain = speculate(host, self.steps)?;
        self.members.extend(plain);
        let mut valid = valid_members(host, self.members)?;
        // A prompt's features may take the hosted drafter a while: steps are answered before.
        valid.sort_by_key(|member| matches!(member, Member::Prefill(..)));
        step(host, valid)
    }
}

/// Answers the steps that the drafter can draft for. Returns the others, to be decoded plainly.
fn speculate(host: &mut Host, members: Vec<StepMember>) -> Result<Vec<Member>, Lost> {
    let mut plain = Vec::new();
    let mut ready = Vec::with_capacity(members.len());
    for member in members {
        let (key, committed) = (member.step.context.key(), member.step.place.committed);
        match host.ready(key, committed)? {
            Some(context) => ready.push((member, context)),
            None => plain.push(member.into_plain(host)),
        }
    }
    if ready.is_empty() {
        return Ok(plain);
    }
    let steps: Vec<SpeculativeStep> = ready
        .iter()
        .map(|(member, context)| member.request(*context))
        .collect();
    let error = match host.speculate(&steps) {
        Ok(results) => {
            for ((member, _), result) in ready.into_iter().zip(results) {
                // A request that is gone needs no answer, here and below.
                let _ = member.reply.send(Ok(result.into()));
            }
            return Ok(plain);
        }
        Err(error) => error,
    };
    host.fault(&error)?;
    if let [_, _, ..] = ready[..] {
        for (member, _) in ready {
            plain.extend(speculate(host, vec![member])?);
        }
    } else if let Some((member, _)) = ready.pop() {
        host.fail_context(member.step.context.key(), error)?;
        plain.push(member.into_plain(host));
    }
    Ok(plain)
}

/// One wrong member must not spoil the forward of the others.
fn valid_members(host: &Host, members: Vec<Member>) -> Result<Vec<Member>, Lost> {
    let spec = host.model.spec();
    let (vocab_size, context_length) = (spec.vocab_size, spec.context_length);
    let mut valid = Vec::with_capacity(members.len());
    for member in members {
        if member.is_abandoned() {
            continue;
        }
        match member.validate(vocab_size, context_length) {
            Ok(()) => valid.push(member),
            Err(error) => member.fail(host.fault(&error)?),
        }
    }
    Ok(valid)
}

/// One forward over all members, or one for each when that fails.
fn step(host: &mut Host, members: Vec<Member>) -> Result<(), Lost> {
    if members.is_empty() {
        return Ok(());
    }
    let mut batch = StepBatch::default();
    for member in &members {
        match member {
            Member::Prefill(prefill, _) => batch.rows.push(prompt_rows(prefill)),
            Member::Tree { .. } => batch.trees.extend(member.tree_rows()),
        }
    }
    match host.step(&batch) {
        Ok(output) => finish(host, members, output),
        Err(error) => {
            let fault = host.fault(&error)?;
            tracing::error!(%error, sequences = members.len(), "a forward failed");
            if members.len() == 1 {
                for member in members {
                    member.fail(fault.clone());
                }
                return Ok(());
            }
            members
                .into_iter()
                .try_for_each(|member| step(host, vec![member]))
        }
    }
}

fn finish(host: &mut Host, members: Vec<Member>, output: StepOutput) -> Result<(), Lost> {
    let timings = Timings {
        forward: output.forward,
        accept: output.accept,
    };
    let (mut rows, mut trees) = (output.rows.into_iter(), output.trees.into_iter());
    for member in members {
        match member {
            Member::Prefill(prefill, reply) => {
                let Some(mut output) = rows.next() else {
                    continue;
                };
                if let Some(context) = &prefill.context {
                    let features = std::mem::take(&mut output.features);
                    host.append(context.key(), prefill.place.committed, &features)?;
                }
                let _ = reply.send(Ok(output));
            }
            Member::Tree {
                place,
                tree,
                context,
                features,
                reply,
                ..
            } => {
                let Some(mut verified) = trees.next() else {
                    continue;
                };
                if let Some(context) = context.filter(|_| features) {
                    let features = std::mem::take(&mut verified.features);
                    host.append(context.key(), place.committed, &features)?;
                }
                let _ = reply.send(Ok(Verified::new(tree, verified, timings)));
            }
        }
    }
    Ok(())
}

fn prompt_rows(prefill: &Prefill) -> SequenceRows<'_> {
    SequenceRows {
        table: prefill.place.kv.table(),
        committed: prefill.place.committed,
        tokens: &prefill.tokens,
        shape: RowShape::Chain,
        head: &prefill.head,
        sampling: Some(prefill.choices.rows()),
        features: prefill.features || prefill.context.is_some(),
    }
}

impl StepMember {
    fn request(&self, context: ContextId) -> SpeculativeStep<'_> {
        let step = &self.step;
        SpeculativeStep {
            table: step.place.kv.table(),
            committed: step.place.committed,
            root: step.root,
            context,
            shape: step.shape,
            max_depth: step.max_depth,
            head: step.head,
            sampling: Some(step.rules.processors()),
            coupling: step.coupling,
        }
    }

    fn into_plain(self, host: &Host) -> Member {
        Member::Tree {
            tree: TokenTree::root_only(self.step.root),
            place: self.step.place,
            head: self.step.head,
            choices: Choices::of(self.step.rules),
            features: host.contexts.wants_features(self.step.context.key()),
            context: Some(self.step.context),
            reply: self.reply,
        }
    }
}

impl Member {
    fn tree_rows(&self) -> Option<TreeRows<'_>> {
        match self {
            Self::Prefill(..) => None,
            Self::Tree {
                place,
                tree,
                head,
                choices,
                features,
                ..
            } => Some(TreeRows {
                table: place.kv.table(),
                committed: place.committed,
                tree,
                head: *head,
                sampling: Some(choices.rows()),
                features: *features,
            }),
        }
    }

    fn validate(&self, vocab_size: usize, context_length: usize) -> Result<(), EngineError> {
        match self {
            Self::Prefill(prefill, _) => prompt_rows(prefill).validate(vocab_size, context_length),
            Self::Tree { .. } => self
                .tree_rows()
                .map_or(Ok(()), |rows| rows.validate(vocab_size, context_length)),
        }
    }

    fn is_abandoned(&self) -> bool {
        match self {
            Self::Prefill(_, reply) => reply.is_closed(),
            Self::Tree { reply, .. } => reply.is_closed(),
        }
    }

    fn fail(self, error: ServiceError) {
        match self {
            Self::Prefill(_, reply) => drop(reply.send(Err(error))),
            Self::Tree { reply, .. } => drop(reply.send(Err(error))),
        }
    }
}

impl Verified {
    fn new(tree: TokenTree, verified: VerifiedTree, timings: Timings) -> Self {
        Self {
            tree,
            acceptance: verified.acceptance,
            head: verified.head,
            features: verified.features,
            timings,
            draft: None,
        }
    }
}

impl From<Speculated> for Verified {
    fn from(speculated: Speculated) -> Self {
        let timings = Timings {
            forward: speculated.forward,
            accept: speculated.accept,
        };
        let cost = DraftCost {
            forward: speculated.draft,
            head: speculated.head,
            tree: speculated.build,
            ..DraftCost::default()
        };
        Self {
            draft: Some(cost),
            ..Self::new(speculated.tree, speculated.verified, timings)
        }
    }
}
