//! The models: the target that verifies a tree in one forward, and the DFlash drafter that proposes it.
//!
//! The seams are the traits [`Backend`] (a target on some device), [`Drafter`], and [`Speculator`] (a target that hosts
//! its drafter). Everything above them (services, scheduling) is the same for every device. [`cpu`] implements the
//! first two, and [`Colocated`] makes the third of any pair.
//!
//! One property holds throughout and is what makes speculation lossless: a row's results are a *bitwise*
//! function of the token ids and positions on its own path. How many other rows run with it, in which batch,
//! at which tree node, after a prefill or after a commit, does not enter. Only [`PrefillMode::Fast`] gives it up, for the
//! rows of a prompt.

mod backend;
mod batch;
mod coupling;
pub mod cpu;
mod device;
mod draft_contexts;
mod draft_tree;
mod drafter;
mod error;
mod head_topk;
mod kv_cache;
mod prefill_mode;
mod rotary;
mod row_sampling;
mod speculator;
pub mod verification;

pub use backend::{Backend, ForwardOutput, LoadProgress, TargetSpec};
pub use batch::{HeadRequest, RowBatch, RowChoices, RowShape, SequenceRows};
pub use coupling::{CoupledRanking, RankedCandidate, rank_candidates};
pub use cpu::{
    CpuDrafter, CpuLimits, CpuOptions, CpuTarget, DrafterOptions, Isa, PackedWeights, Precision,
    TargetOptions, TargetWeights, UnknownIsa, UnknownPrecision,
};
pub use device::{DeviceChoice, UnknownDevice};
pub use draft_contexts::{DraftContext, DraftContexts};
pub use draft_tree::{DraftShape, build_draft};
pub use drafter::{BlockRequest, ContextId, DraftRequest, Drafted, Drafter, DrafterSpec};
pub use error::EngineError;
pub use head_topk::{HeadRow, ScoredToken};
pub use kv_cache::{BLOCK_TOKENS, BlockId, BlockPool, BlockTable};
pub use prefill_mode::{PrefillMode, UnknownPrefillMode};
pub use rotary::inverse_frequencies;
pub use row_sampling::RowSampling;
pub use speculator::{Colocated, Speculated, SpeculativeStep, Speculator};
pub use verification::{StepBatch, StepOutput, TreeRows, VerifiedTree, step_by_forward};
