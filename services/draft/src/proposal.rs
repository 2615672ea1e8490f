//! From a Propose message to a draft.

use std::time::Instant;

use treespec_engine::{BlockRequest, ContextId, DraftShape, Drafter, HeadRow, build_draft};
use treespec_rpc::{ServiceError, convert, proto::draft::v1 as pb};
use treespec_tree::MAX_BUDGET;

use crate::error::service_error;

/// Who runs the top-k pass over the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// This service; the reply is a tree.
    Draft,
    /// The verifier; the reply is the block's hidden rows.
    Verify,
}

/// A checked Propose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProposalRequest {
    pub(crate) ctx_end: u32,
    pub(crate) root_token: u32,
    pub(crate) shape: DraftShape,
    pub(crate) placement: Placement,
}

impl ProposalRequest {
    /// # Errors
    /// INVALID_ARGUMENT naming the field and the value.
    pub(crate) fn from_proto(
        message: &pb::Propose,
        vocab_size: usize,
    ) -> Result<Self, ServiceError> {
        let root_token = message.root_token_id;
        if usize::try_from(root_token).is_ok_and(|token| token >= vocab_size) {
            return Err(ServiceError::invalid(
                "propose.root_token_id",
                format!("{root_token} is outside the vocabulary of {vocab_size}"),
            ));
        }
        let shape = match message.shape() {
            pb::DraftShape::Chain => DraftShape::Chain,
            pb::DraftShape::Tree => DraftShape::Tree {
                budget: read_budget(message.budget)?,
            },
            pb::DraftShape::Unspecified => return Err(unknown("propose.shape", message.shape)),
        };
        let placement = match message.placement() {
            pb::TopkPlacement::Draft => Placement::Draft,
            pb::TopkPlacement::Verify => Placement::Verify,
            pb::TopkPlacement::Unspecified => {
                return Err(unknown("propose.placement", message.placement));
            }
        };
        Ok(Self {
            ctx_end: message.ctx_end,
            root_token,
            shape,
            placement,
        })
    }
}

fn read_budget(budget: u32) -> Result<usize, ServiceError> {
    usize::try_from(budget)
        .ok()
        .filter(|budget| (1..=MAX_BUDGET).contains(budget))
        .ok_or_else(|| {
            ServiceError::invalid(
                "propose.budget",
                format!("{budget} is outside 1..={MAX_BUDGET}"),
            )
        })
}

fn unknown(field: &str, number: i32) -> ServiceError {
    ServiceError::invalid(field, format!("{number} is not a known value"))
}

/// A draft with the seconds spent on it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Draft {
    pub(crate) reply: pb::proposal::Draft,
    /// The passes are shared by the proposals of a batch, and each reports the whole pass: that is how long it
    /// waited for it.
    pub(crate) timings: pb::DraftTimings,
}

/// Drafts for all requests with one forward and one head pass. The result of each is in its place; a failure of one
/// does not touch the others.
pub(crate) fn draft_batch(
    drafter: &mut dyn Drafter,
    batch: &[(ContextId, ProposalRequest)],
) -> Vec<Result<Draft, ServiceError>> {
    let blocks: Vec<BlockRequest> = batch
        .iter()
        .map(|&(context, request)| BlockRequest {
            context,
            root_token: request.root_token,
        })
        .collect();
    let started = Instant::now();
    match drafter.block_hidden(&blocks) {
        Ok(hidden) => finish_batch(drafter, batch, &hidden, started.elapsed().as_secs_f64()),
        // A forward fails as a whole; alone, each request shows whether it was the one at fault.
        Err(_) if batch.len() > 1 => batch
            .iter()
            .flat_map(|one| draft_batch(drafter, std::slice::from_ref(one)))
            .collect(),
        Err(error) => vec![Err(service_error(&error)); batch.len()],
    }
}

/// `hidden`: `[batch * (block_size - 1), hidden_size]`.
fn finish_batch(
    drafter: &mut dyn Drafter,
    batch: &[(ContextId, ProposalRequest)],
    hidden: &[f32],
    forward_seconds: f64,
) -> Vec<Result<Draft, ServiceError>> {
    let hidden_size = drafter.spec().hidden_size;
    let rows_per_block = drafter.spec().block_size.saturating_sub(1);
    let width = rows_per_block * hidden_size;
    if width == 0 || hidden.len() != batch.len() * width {
        let error = ServiceError::internal(format!(
            "the drafter returned {} values for {} blocks of {width}",
            hidden.len(),
            batch.len()
        ));
        return vec![Err(error); batch.len()];
    }
    let started = Instant::now();
    let block_size = drafter.spec().block_size;
    let mut head = HeadPass::run(drafter, batch, hidden, width);
    let head_seconds = started.elapsed().as_secs_f64();

    let blocks = batch.iter().zip(hidden.chunks_exact(width));
    blocks
        .map(|((_, request), block)| {
            let mut timings = pb::DraftTimings {
                forward_seconds,
                ..pb::DraftTimings::default()
            };
            let reply = match request.placement {
                Placement::Verify => {
                    let rows = convert::block_hidden_to_proto(block, hidden_size)?;
                    pb::proposal::Draft::BlockHidden(rows)
                }
                Placement::Draft => {
                    let rows = head.take(request.shape.depths(block_size))?;
                    let started = Instant::now();
                    let tree = build_draft(request.root_token, &rows, request.shape);
                    timings.head_seconds = head_seconds;
                    timings.tree_seconds = started.elapsed().as_secs_f64();
                    pb::proposal::Draft::Tree(convert::tree_to_proto(&tree))
                }
            };
            Ok(Draft { reply, timings })
        })
        .collect()
}

/// The rows of one top-k pass for all requests that want their tree built here, handed out in request order.
struct HeadPass {
    rows: Result<std::vec::IntoIter<HeadRow>, ServiceError>,
}

impl HeadPass {
    fn run(
        drafter: &mut dyn Drafter,
        batch: &[(ContextId, ProposalRequest)],
        hidden: &[f32],
        width: usize,
    ) -> Self {
        let spec = drafter.spec();
        let (vocab_size, block_size) = (spec.vocab_size, spec.block_size);
        let hidden_size = spec.hidden_size;
        let mut rows = Vec::new();
        let mut candidates = 0;
        for ((_, request), block) in batch.iter().zip(hidden.chunks_exact(width)) {
            if request.placement == Placement::Draft {
                let needed = request.shape.depths(block_size) * hidden_size;
                rows.extend_from_slice(&block[..needed]);
                // A builder reads no further than its budget, so the widest request serves all.
                candidates = candidates.max(request.shape.candidates_per_depth(vocab_size));
            }
        }
        let rows = if rows.is_empty() {
            Ok(Vec::new())
        } else {
            drafter.head_topk(&rows, candidates)
        };
        Self {
            rows: rows
                .map(Vec::into_iter)
                .map_err(|error| service_error(&error)),
        }
    }

    fn take(&mut self, count: usize) -> Result<Vec<HeadRow>, ServiceError> {
        let rows = self.rows.as_mut().map_err(|error| error.clone())?;
        Ok(rows.take(count).collect())
    }
}
