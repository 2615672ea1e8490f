//! Which drafts are verified, as the command line writes it: `auto`, `ar`, `chain`, `tree`, `tree:N`.
//! The only place where a mode is parsed or printed.

use std::{fmt, str::FromStr};

use treespec_rpc::proto::verify::v1 as proto;
use treespec_tree::MAX_BUDGET;

/// A speculation mode. The generated tokens do not depend on it, only the speed does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// The service chooses.
    Auto,
    /// One target forward per token, no drafter.
    Ar,
    /// The drafter's argmax block as one chain.
    Chain,
    /// A best-first tree with this many nodes below the root; `None` takes the service's default budget.
    Tree(Option<u32>),
}

impl Mode {
    /// The request field for this mode. A separately given `budget` wins over the one inside the mode; its range is
    /// the service's to check, so that every client gets the same answer.
    pub(crate) fn speculation(self, budget: Option<u32>) -> proto::SpeculationOptions {
        let (mode, own_budget) = match self {
            Self::Auto => (proto::Mode::Auto, None),
            Self::Ar => (proto::Mode::Ar, None),
            Self::Chain => (proto::Mode::Chain, None),
            Self::Tree(budget) => (proto::Mode::Tree, budget),
        };
        proto::SpeculationOptions {
            mode: Some(mode.into()),
            budget: budget.or(own_budget),
            ..Default::default()
        }
    }
}

/// Why a mode could not be parsed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ModeError {
    /// Not one of the known names.
    #[error("unknown mode {0:?}: use auto, ar, chain, tree or tree:N")]
    Unknown(String),
    /// The number after `tree:` is not a budget.
    #[error("tree budget {0:?} is not a number in 1..={MAX_BUDGET}")]
    Budget(String),
}

impl FromStr for Mode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "ar" => Ok(Self::Ar),
            "chain" => Ok(Self::Chain),
            "tree" => Ok(Self::Tree(None)),
            _ => {
                let budget = text
                    .strip_prefix("tree:")
                    .ok_or_else(|| ModeError::Unknown(text.to_owned()))?;
                match budget.parse::<u32>() {
                    Ok(nodes) if (1..=MAX_BUDGET as u32).contains(&nodes) => {
                        Ok(Self::Tree(Some(nodes)))
                    }
                    _ => Err(ModeError::Budget(budget.to_owned())),
                }
            }
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Ar => f.pad("ar"),
            Self::Chain => f.pad("chain"),
            Self::Tree(None) => f.pad("tree"),
            Self::Tree(Some(budget)) => f.pad(&format!("tree:{budget}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_survives_a_round_trip() {
        for text in ["auto", "ar", "chain", "tree", "tree:1", "tree:255"] {
            assert_eq!(text.parse::<Mode>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn bad_modes_are_named() {
        assert_eq!(
            "beam".parse::<Mode>(),
            Err(ModeError::Unknown("beam".into()))
        );
        for budget in ["0", "256", "-1", "", "x"] {
            assert_eq!(
                format!("tree:{budget}").parse::<Mode>(),
                Err(ModeError::Budget(budget.into()))
            );
        }
    }

    #[test]
    fn the_separate_budget_wins_and_is_not_checked_here() {
        let options = Mode::Tree(Some(8)).speculation(Some(0));
        assert_eq!(options.mode, Some(proto::Mode::Tree.into()));
        assert_eq!(options.budget, Some(0));
        assert_eq!(Mode::Tree(Some(8)).speculation(None).budget, Some(8));
        assert_eq!(Mode::Ar.speculation(None).budget, None);
    }
}
