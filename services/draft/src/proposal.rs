//! From a Propose message to a draft.

use std::time::Instant;

use treespec_engine::{
    BlockRequest, ContextId, DraftRequest, DraftShape, Drafted, Drafter, EngineError,
};
use treespec_rpc::{ServiceError, convert, proto::draft::v1 as pb};
use treespec_sampling::Coupling;
use treespec_tree::MAX_BUDGET;

/// Who runs the top-k pass over the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// This service; the reply is a tree.
    Draft,
    /// The verifier; the reply is the block's hidden rows.
    Verify,
}

/// A checked Propose.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ProposalRequest {
    pub(crate) ctx_end: u32,
    pub(crate) root_token: u32,
    pub(crate) shape: DraftShape,
    pub(crate) placement: Placement,
    pub(crate) coupling: Option<Coupling>,
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
            coupling: convert::coupling_from_proto(message.coupling.as_ref())?,
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

/// A context and what is asked of it.
type Request = (ContextId, ProposalRequest);

/// Drafts for all requests, with one forward per placement. The result of each is in its place; a failure of one does
/// not touch the others.
pub(crate) fn draft_batch(
    drafter: &mut dyn Drafter,
    batch: &[Request],
) -> Vec<Result<Draft, EngineError>> {
    let mut drafts: Vec<_> = batch.iter().map(|_| None).collect();
    for (placement, draft) in [
        (Placement::Draft, trees as DraftAll),
        (Placement::Verify, hidden_blocks),
    ] {
        let places: Vec<usize> = (0..batch.len())
            .filter(|&place| batch[place].1.placement == placement)
            .collect();
        let requests: Vec<Request> = places.iter().map(|&place| batch[place]).collect();
        for (place, drafted) in places.into_iter().zip(isolated(drafter, &requests, draft)) {
            drafts[place] = Some(drafted);
        }
    }
    // Every request has one of the two placements.
    drafts.into_iter().flatten().collect()
}

/// Drafts for all requests together, or fails for all of them.
type DraftAll = fn(&mut dyn Drafter, &[Request]) -> Result<Vec<Draft>, EngineError>;

/// A forward fails as a whole; alone, each request shows whether it was the one at fault.
fn isolated(
    drafter: &mut dyn Drafter,
    requests: &[Request],
    draft: DraftAll,
) -> Vec<Result<Draft, EngineError>> {
    if requests.is_empty() {
        return Vec::new();
    }
    match draft(drafter, requests) {
        Ok(drafts) => drafts.into_iter().map(Ok).collect(),
        Err(EngineError::DeviceLost(reason)) => requests
            .iter()
            .map(|_| Err(EngineError::DeviceLost(reason.clone())))
            .collect(),
        Err(error) if requests.len() == 1 => vec![Err(error)],
        Err(_) => requests
            .iter()
            .flat_map(|one| isolated(drafter, std::slice::from_ref(one), draft))
            .collect(),
    }
}

fn block(&(context, request): &Request) -> BlockRequest {
    BlockRequest {
        context,
        root_token: request.root_token,
    }
}

/// The top-k pass runs here.
fn trees(drafter: &mut dyn Drafter, requests: &[Request]) -> Result<Vec<Draft>, EngineError> {
    let wanted: Vec<DraftRequest> = requests
        .iter()
        .map(|request| DraftRequest {
            block: block(request),
            shape: request.1.shape,
            // What of a draft is beyond the context length is the verifier's to cut.
            max_depth: usize::MAX,
            coupling: request.1.coupling,
        })
        .collect();
    let drafts = drafter.draft(&wanted)?;
    check_count(drafts.len(), requests.len())?;
    Ok(drafts.into_iter().map(Draft::from).collect())
}

/// The top-k pass runs at the verifier.
fn hidden_blocks(
    drafter: &mut dyn Drafter,
    requests: &[Request],
) -> Result<Vec<Draft>, EngineError> {
    let hidden_size = drafter.spec().hidden_size;
    let width = drafter.spec().block_size.saturating_sub(1) * hidden_size;
    let blocks: Vec<BlockRequest> = requests.iter().map(block).collect();
    let started = Instant::now();
    let hidden = drafter.block_hidden(&blocks)?;
    let timings = pb::DraftTimings {
        forward_seconds: started.elapsed().as_secs_f64(),
        ..pb::DraftTimings::default()
    };
    check_count(hidden.len(), requests.len() * width)?;
    hidden
        .chunks_exact(width.max(1))
        .map(|block| {
            let rows = convert::block_hidden_to_proto(block, hidden_size)
                .map_err(|error| EngineError::InvalidBatch(error.to_string()))?;
            Ok(Draft {
                reply: pb::proposal::Draft::BlockHidden(rows),
                timings,
            })
        })
        .collect()
}

fn check_count(got: usize, expected: usize) -> Result<(), EngineError> {
    if got == expected && got > 0 {
        return Ok(());
    }
    Err(EngineError::InvalidBatch(format!(
        "the drafter returned {got} results for {expected}"
    )))
}

impl From<Drafted> for Draft {
    fn from(drafted: Drafted) -> Self {
        Self {
            reply: pb::proposal::Draft::Tree(convert::tree_to_proto(&drafted.tree)),
            timings: pb::DraftTimings {
                forward_seconds: drafted.forward.as_secs_f64(),
                head_seconds: drafted.head.as_secs_f64(),
                tree_seconds: drafted.build.as_secs_f64(),
            },
        }
    }
}
