//! The CPU backend: weights packed once at load, kernels chosen at run time, arithmetic in f32 or, for quantised weights,
//! in integers.

mod decoder;
mod drafter;
mod embedding;
mod executor;
mod kernels;
mod options;
mod precision;
mod target;

pub use drafter::{CpuDrafter, DrafterOptions};
pub use kernels::{Isa, UnknownIsa};
pub use options::CpuOptions;
pub use precision::{Precision, UnknownPrecision};
pub use target::{CpuTarget, TargetOptions};

use executor::{Executor, Pass};
