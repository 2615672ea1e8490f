use treespec_sampling::Ranking;
use treespec_tree::MAX_BUDGET;

use crate::{ServiceError, proto::verify::v1 as pb};

/// Which drafts a request wants verified. A budget is the number of tree nodes below the root, 1..=255; `None` leaves
/// it to the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speculation {
    /// The service chooses.
    Auto {
        /// Largest tree.
        budget: Option<u16>,
    },
    /// One target forward per token, no drafter.
    Ar,
    /// The drafter's argmax block as one chain.
    Chain,
    /// Best-first token tree.
    Tree {
        /// Size of the tree.
        budget: Option<u16>,
    },
}

impl Default for Speculation {
    fn default() -> Self {
        Self::Auto { budget: None }
    }
}

impl Speculation {
    /// Reads the options; an absent message or mode is [`Speculation::Auto`].
    ///
    /// # Errors
    /// [`ServiceError::InvalidArgument`] naming `speculation.mode` or `speculation.budget`.
    pub fn from_proto(message: Option<&pb::SpeculationOptions>) -> Result<Self, ServiceError> {
        let Some(message) = message else {
            return Ok(Self::default());
        };
        let number = message.mode.unwrap_or_default();
        let mode = pb::Mode::try_from(number).map_err(|_| {
            ServiceError::invalid("speculation.mode", format!("{number} is not a known mode"))
        })?;
        let budget = message.budget.map(check_budget).transpose()?;
        let without_budget = |speculation: Self, name: &str| match budget {
            None => Ok(speculation),
            Some(budget) => Err(ServiceError::invalid(
                "speculation.budget",
                format!(
                    "{budget} was given, but mode {name} has no budget; only tree and auto have"
                ),
            )),
        };
        match mode {
            pb::Mode::Unspecified | pb::Mode::Auto => Ok(Self::Auto { budget }),
            pb::Mode::Ar => without_budget(Self::Ar, "ar"),
            pb::Mode::Chain => without_budget(Self::Chain, "chain"),
            pb::Mode::Tree => Ok(Self::Tree { budget }),
        }
    }

    /// The mode on the wire.
    pub fn mode(self) -> pb::Mode {
        match self {
            Self::Auto { .. } => pb::Mode::Auto,
            Self::Ar => pb::Mode::Ar,
            Self::Chain => pb::Mode::Chain,
            Self::Tree { .. } => pb::Mode::Tree,
        }
    }
}

impl From<Speculation> for pb::SpeculationOptions {
    fn from(speculation: Speculation) -> Self {
        let budget = match speculation {
            Speculation::Auto { budget } | Speculation::Tree { budget } => budget,
            Speculation::Ar | Speculation::Chain => None,
        };
        Self {
            mode: Some(speculation.mode().into()),
            budget: budget.map(u32::from),
            ranking: None,
        }
    }
}

/// How a request wants its drafts ranked; absent means as fitted.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] naming `speculation.ranking`.
pub fn ranking_from_proto(
    message: Option<&pb::SpeculationOptions>,
) -> Result<Ranking, ServiceError> {
    let number = message
        .and_then(|message| message.ranking)
        .unwrap_or_default();
    match pb::DraftRanking::try_from(number) {
        Ok(pb::DraftRanking::Unspecified | pb::DraftRanking::Fitted) => Ok(Ranking::Fitted),
        Ok(pb::DraftRanking::Plain) => Ok(Ranking::Plain),
        Ok(pb::DraftRanking::Full) => Ok(Ranking::Full),
        Err(_) => Err(ServiceError::invalid(
            "speculation.ranking",
            format!("{number} is not a known ranking"),
        )),
    }
}

/// The ranking on the wire.
pub fn ranking_to_proto(ranking: Ranking) -> pb::DraftRanking {
    match ranking {
        Ranking::Plain => pb::DraftRanking::Plain,
        Ranking::Full => pb::DraftRanking::Full,
        Ranking::Fitted => pb::DraftRanking::Fitted,
    }
}

fn check_budget(budget: u32) -> Result<u16, ServiceError> {
    u16::try_from(budget)
        .ok()
        .filter(|&budget| (1..=MAX_BUDGET).contains(&usize::from(budget)))
        .ok_or_else(|| {
            ServiceError::invalid(
                "speculation.budget",
                format!("{budget} is outside 1..={MAX_BUDGET}"),
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(mode: Option<i32>, budget: Option<u32>) -> Result<Speculation, ServiceError> {
        Speculation::from_proto(Some(&pb::SpeculationOptions {
            mode,
            budget,
            ranking: None,
        }))
    }

    #[test]
    fn absent_means_auto() {
        let auto = Speculation::Auto { budget: None };
        assert_eq!(Speculation::from_proto(None), Ok(auto));
        assert_eq!(read(None, None), Ok(auto));
        assert_eq!(read(Some(0), None), Ok(auto));
        assert_eq!(
            read(None, Some(7)),
            Ok(Speculation::Auto { budget: Some(7) })
        );
    }

    #[test]
    fn every_mode_survives_the_wire() {
        for speculation in [
            Speculation::Auto { budget: Some(1) },
            Speculation::Ar,
            Speculation::Chain,
            Speculation::Tree { budget: None },
            Speculation::Tree { budget: Some(255) },
        ] {
            let wire = speculation.into();
            assert_eq!(Speculation::from_proto(Some(&wire)), Ok(speculation));
        }
    }

    #[test]
    fn every_ranking_survives_the_wire() {
        let options = |ranking| pb::SpeculationOptions {
            ranking,
            ..Default::default()
        };
        assert_eq!(ranking_from_proto(None), Ok(Ranking::Fitted));
        assert_eq!(
            ranking_from_proto(Some(&options(None))),
            Ok(Ranking::Fitted)
        );
        for ranking in [Ranking::Plain, Ranking::Full, Ranking::Fitted] {
            let wire = options(Some(ranking_to_proto(ranking).into()));
            assert_eq!(ranking_from_proto(Some(&wire)), Ok(ranking));
        }
        let error = ranking_from_proto(Some(&options(Some(9)))).unwrap_err();
        assert!(
            error.to_string().contains("speculation.ranking: 9"),
            "{error}"
        );
    }

    #[test]
    fn bad_values_are_named() {
        let cases = [
            (Some(5), None, "speculation.mode", "5"),
            (Some(-1), None, "speculation.mode", "-1"),
            (Some(4), Some(0), "speculation.budget", "0"),
            (Some(4), Some(256), "speculation.budget", "256"),
            (Some(4), Some(65_537), "speculation.budget", "65537"),
            (None, Some(0), "speculation.budget", "0"),
            (Some(2), Some(8), "speculation.budget", "mode ar"),
            (Some(3), Some(8), "speculation.budget", "mode chain"),
        ];
        for (mode, budget, field, value) in cases {
            let error = read(mode, budget).unwrap_err();
            assert_eq!(error.code(), tonic::Code::InvalidArgument);
            let text = error.to_string();
            assert!(text.contains(field) && text.contains(value), "{text}");
        }
    }
}
