//! The sizes of a target's linear layers.

use super::super::PackedWeights;
use super::CpuTarget;
use crate::cpu::kernels::PackedLinear;

/// The linear layers of a target by the rows that they multiply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TargetWeights {
    /// The decoder layers: every row.
    pub layers: PackedWeights,
    /// The head: rows that ask for tokens.
    pub head: PackedWeights,
    /// The projection of a drafter's features: rows that ask for features. Nothing without a drafter.
    pub projection: PackedWeights,
}

impl CpuTarget {
    /// What its linear layers read and multiply. The embedding is not among them unless it is the head: a row looks up
    /// one row of it.
    pub fn weights(&self) -> TargetWeights {
        let of = |matrix: Option<&PackedLinear>| {
            matrix.map_or_else(PackedWeights::default, PackedLinear::weights)
        };
        TargetWeights {
            layers: self.layers.iter().map(|layer| layer.weights()).sum(),
            head: of(self.vocabulary.head()),
            projection: of(self.projection.as_ref().map(|projection| &projection.fc)),
        }
    }
}
