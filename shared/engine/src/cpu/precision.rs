//! How exactly linear layers compute on a CPU.

use std::fmt;
use std::str::FromStr;

use treespec_checkpoint::TargetCheckpoint;

/// Arithmetic of the linear layers. Attention, norms and sums are f32 in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Weights are widened to f32 and activations stay f32.
    F32,
    /// Activations are rounded to 8 bits with a scale per block of 32 (as llama.cpp does) where weights are
    /// quantised, and to bfloat16 where weights are bfloat16. Floating-point weights of a drafter become Q8_0.
    Quantised,
}

/// A name of a precision that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown CPU precision {0:?}: use f32 or quantised")]
pub struct UnknownPrecision(String);

impl Precision {
    /// What is chosen when nothing is said: integers where the file has quantised weights, f32 otherwise.
    pub fn of_checkpoint(target: &TargetCheckpoint) -> Self {
        match target.is_quantised() {
            true => Self::Quantised,
            false => Self::F32,
        }
    }

    /// Name of the flag, and in the numerics profile.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Quantised => "quantised",
        }
    }
}

impl FromStr for Precision {
    type Err = UnknownPrecision;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::F32, Self::Quantised]
            .into_iter()
            .find(|precision| precision.name() == text)
            .ok_or_else(|| UnknownPrecision(text.to_owned()))
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
