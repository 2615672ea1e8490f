//! The services of a cluster.

use std::fmt;

/// A service of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// Proposes token trees.
    Draft,
    /// Holds the target model.
    Verify,
    /// The public API.
    Coordinator,
}

impl Role {
    /// The service's subcommand.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Draft => "draft",
            Self::Verify => "verify",
            Self::Coordinator => "coordinator",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
