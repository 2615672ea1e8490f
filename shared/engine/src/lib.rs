//! The models: the target that verifies a tree in one forward, and the DFlash drafter that proposes it.
//!
//! The two seams are the traits [`Backend`] (a target on some device) and [`Drafter`]. Everything above them
//! (services, scheduling, acceptance) is the same for every device. [`cpu`] implements both in f32.
//!
//! One property holds throughout and is what makes speculation lossless: a row's results are a *bitwise*
//! function of the token ids and positions on its own path. How many other rows run with it, in which batch,
//! at which tree node, after a prefill or after a commit, does not enter.

mod backend;
mod batch;
pub mod cpu;
mod draft_tree;
mod drafter;
mod error;
mod head_topk;
mod kv_cache;

pub use backend::{Backend, ForwardOutput, LoadProgress, TargetSpec};
pub use batch::{HeadRequest, RowBatch, RowShape, SequenceRows};
pub use cpu::{CpuDrafter, CpuTarget, DrafterOptions, TargetOptions};
pub use draft_tree::{DraftShape, build_draft};
pub use drafter::{BlockRequest, ContextId, Drafter, DrafterSpec};
pub use error::EngineError;
pub use head_topk::{HeadRow, ScoredToken};
pub use kv_cache::{BLOCK_TOKENS, BlockId, BlockPool, BlockTable};
