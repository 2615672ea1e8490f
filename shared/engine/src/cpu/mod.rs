//! The CPU backend: weights packed once at load, kernels chosen at run time, arithmetic in f32 or, for quantised weights,
//! in integers.

mod decoder;
mod drafter;
mod embedding;
mod executor;
mod kernels;
mod limits;
mod options;
mod packed_weights;
mod precision;
mod target;

pub use drafter::{CpuDrafter, DrafterOptions};
pub use kernels::{Isa, UnknownIsa};
pub use limits::CpuLimits;
pub use options::CpuOptions;
pub use packed_weights::PackedWeights;
pub use precision::{Precision, UnknownPrecision};
pub use target::{CpuTarget, TargetOptions, TargetWeights};

use executor::{Executor, Pass};
