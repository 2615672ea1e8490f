//! Where a model runs, as flags and environment variables write it.

use std::fmt;
use std::str::FromStr;

/// The device of a model: `cpu` or `cuda:N` (`cuda` is `cuda:0`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// This machine's processors.
    #[default]
    Cpu,
    /// The GPU with this ordinal, as CUDA counts them.
    Cuda(usize),
}

/// A device name that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown device {0:?}: use cpu, or cuda:N for the GPU number N")]
pub struct UnknownDevice(String);

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownDevice(text.to_owned());
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let ordinal = text.strip_prefix("cuda:").ok_or_else(unknown)?;
                // Nothing but digits: a sign would parse as well.
                if !ordinal.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(unknown());
                }
                ordinal.parse().map(Self::Cuda).map_err(|_| unknown())
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => formatter.pad("cpu"),
            Self::Cuda(ordinal) => formatter.pad(&format!("cuda:{ordinal}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_survives_a_round_trip() {
        for text in ["cpu", "cuda:0", "cuda:7"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
    }

    #[test]
    fn other_names_are_refused_with_what_is_allowed() {
        let huge = format!("cuda:{}9", usize::MAX);
        for text in [
            "", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:+1", "cuda:x", "cuda:0:1", " cpu", &huge,
        ] {
            let error = text.parse::<DeviceChoice>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
            assert!(error.contains("cpu, or cuda:N"), "{error}");
        }
    }
}
