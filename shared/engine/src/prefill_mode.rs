use std::fmt;
use std::str::FromStr;

/// How the rows of a prompt are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PrefillMode {
    /// A row's bits depend on nothing but its own path, like those of a step.
    #[default]
    Exact,
    /// By a library's matrix products, on a GPU: faster, but a prompt row's bits depend on the rows of its chunk.
    Fast,
}

/// A name that is no mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown prefill mode {0:?}: use exact or fast")]
pub struct UnknownPrefillMode(String);

impl FromStr for PrefillMode {
    type Err = UnknownPrefillMode;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "exact" => Ok(Self::Exact),
            "fast" => Ok(Self::Fast),
            _ => Err(UnknownPrefillMode(text.to_owned())),
        }
    }
}

impl fmt::Display for PrefillMode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Exact => "exact",
            Self::Fast => "fast",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_survive_a_round_trip_and_other_names_are_refused() {
        for mode in [PrefillMode::Exact, PrefillMode::Fast] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        let error = "Fast".parse::<PrefillMode>().unwrap_err().to_string();
        assert_eq!(error, "unknown prefill mode \"Fast\": use exact or fast");
    }
}
