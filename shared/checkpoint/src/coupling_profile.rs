//! What was fitted to a drafter for sampled answers: how much of the target's noise its ranking takes, and how far its
//! candidates can be trusted.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::CheckpointError;
use crate::config_file::ConfigFile;

/// File of a drafter directory.
const FILE: &str = "coupling.json";
/// More than any block has.
const MOST_DEPTHS: usize = 1_024;
const MOST_TEMPERATURES: usize = 64;
/// Of ranks and of gaps.
const MOST_CELLS: usize = 256;

/// The fit at one temperature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemperatureFit {
    /// The temperature.
    pub temperature: f32,
    /// Per depth: the temperature of the drafter's ranking, `log q / tau + noise`, in units of the answer's. 0 ranks by q
    /// alone. Empty where no fit is better than the drafter's own probabilities.
    pub tau: Vec<f32>,
    /// `[depth][rank][gap]`: share of the candidates that were the target's token, given its ancestors. A gap is an index
    /// into [`CouplingProfile::gaps`].
    pub acceptance: Vec<Vec<Vec<f32>>>,
}

/// All of it. Fitted by `treespec bench coupling`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CouplingProfile {
    /// Ascending borders between gaps: how far a candidate's score is below `ln(sum(exp(score)))` over all candidates.
    pub gaps: Vec<f32>,
    /// Ascending by temperature, at least one.
    pub fits: Vec<TemperatureFit>,
}

impl CouplingProfile {
    /// The profile of a drafter directory, if it has one.
    ///
    /// # Errors
    /// When the file is damaged or its tables do not fit together.
    pub fn open(drafter: &Path) -> Result<Option<Self>, CheckpointError> {
        let path = drafter.join(FILE);
        let Some(file) = ConfigFile::open_if_present(&path)? else {
            return Ok(None);
        };
        let damaged = |reason: String| CheckpointError::malformed(&path, reason);
        let profile: Self = serde_json::from_value(file.into_value())
            .map_err(|error| damaged(error.to_string()))?;
        profile.check().map_err(damaged)?;
        Ok(Some(profile))
    }

    /// Writes the profile into a drafter directory.
    ///
    /// # Errors
    /// The operating system's.
    pub fn save(&self, drafter: &Path) -> std::io::Result<()> {
        let text = serde_json::to_string(self).map_err(std::io::Error::other)?;
        std::fs::write(drafter.join(FILE), text + "\n")
    }

    /// The fit of the temperature nearest to `temperature`.
    pub fn fit(&self, temperature: f32) -> &TemperatureFit {
        let distance = |fit: &TemperatureFit| (fit.temperature - temperature).abs();
        self.fits
            .iter()
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))
            .expect("invariant: a profile has a fit")
    }

    /// Index of a gap.
    pub fn gap(&self, gap: f32) -> usize {
        gap_index(&self.gaps, gap)
    }

    fn check(&self) -> Result<(), String> {
        let ascending = |values: &[f32]| values.windows(2).all(|pair| pair[0] < pair[1]);
        let probability = |p: &f32| (0.0..=1.0).contains(p);
        if self.gaps.len() >= MOST_CELLS
            || !self.gaps.iter().all(|gap| gap.is_finite())
            || !ascending(&self.gaps)
        {
            return Err("gaps must be ascending numbers".into());
        }
        let temperatures: Vec<f32> = self.fits.iter().map(|fit| fit.temperature).collect();
        if temperatures.is_empty()
            || temperatures.len() > MOST_TEMPERATURES
            || !ascending(&temperatures)
            || !temperatures.iter().all(|t| t.is_finite() && *t > 0.0)
        {
            return Err("fits must have ascending temperatures above 0, at least one".into());
        }
        for fit in &self.fits {
            let at = fit.temperature;
            if fit.tau.len() > MOST_DEPTHS {
                return Err(format!(
                    "the fit at temperature {at} has {} depths",
                    fit.tau.len()
                ));
            }
            if !fit.tau.iter().all(|tau| tau.is_finite() && *tau >= 0.0) {
                return Err(format!("tau at temperature {at} must be numbers >= 0"));
            }
            if fit.acceptance.len() != fit.tau.len() {
                return Err(format!(
                    "the fit at temperature {at} has {} depths of tau and {} of acceptance",
                    fit.tau.len(),
                    fit.acceptance.len()
                ));
            }
            let ranks = fit.acceptance.first().map_or(1, Vec::len);
            let sound = |ranks_of: &Vec<Vec<f32>>| {
                ranks_of.len() == ranks
                    && ranks_of.iter().all(|gaps| {
                        gaps.len() == self.gaps.len() + 1 && gaps.iter().all(probability)
                    })
            };
            if !(1..=MOST_CELLS).contains(&ranks) || !fit.acceptance.iter().all(sound) {
                return Err(format!(
                    "acceptance at temperature {at} must be [depth][rank][gap] of numbers in [0, 1] with {} gaps",
                    self.gaps.len() + 1
                ));
            }
        }
        Ok(())
    }
}

/// Which of the gaps between ascending borders `gap` is in; on a border the one above.
pub fn gap_index(borders: &[f32], gap: f32) -> usize {
    borders.partition_point(|&border| border <= gap)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> CouplingProfile {
        let fit = |temperature: f32| TemperatureFit {
            temperature,
            tau: vec![0.5, 0.0],
            acceptance: vec![vec![vec![0.9, 0.1]; 3]; 2],
        };
        CouplingProfile {
            gaps: vec![1.0],
            fits: vec![fit(0.5), fit(1.0)],
        }
    }

    #[test]
    fn a_directory_gives_back_what_was_saved() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(CouplingProfile::open(directory.path()).unwrap(), None);
        profile().save(directory.path()).unwrap();
        assert_eq!(
            CouplingProfile::open(directory.path()).unwrap(),
            Some(profile())
        );
    }

    #[test]
    fn the_nearest_temperature_counts() {
        let profile = profile();
        for (asked, found) in [(0.01, 0.5), (0.7, 0.5), (0.8, 1.0), (9.0, 1.0)] {
            assert_eq!(profile.fit(asked).temperature, found);
        }
        assert_eq!(
            (
                profile.gap(0.9),
                profile.gap(1.0),
                profile.gap(f32::INFINITY)
            ),
            (0, 1, 1)
        );
    }

    #[test]
    fn tables_that_do_not_fit_are_refused() {
        type Edit = fn(&mut CouplingProfile);
        let edits: [(&str, Edit); 8] = [
            ("ascending", |p| p.gaps = vec![1.0, 1.0]),
            ("ascending", |p| p.fits.reverse()),
            ("at least one", |p| p.fits.clear()),
            ("above 0", |p| p.fits[0].temperature = 0.0),
            (">= 0", |p| p.fits[1].tau[0] = -1.0),
            ("2 depths of tau and 1", |p| {
                drop(p.fits[0].acceptance.pop())
            }),
            ("[depth][rank][gap]", |p| {
                p.fits[0].acceptance[1][2][0] = 1.5
            }),
            ("[depth][rank][gap]", |p| {
                p.fits[0].acceptance[1][2].truncate(1)
            }),
        ];
        for (part, edit) in edits {
            let mut profile = profile();
            edit(&mut profile);
            let directory = tempfile::tempdir().unwrap();
            profile.save(directory.path()).unwrap();
            let error = CouplingProfile::open(directory.path())
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(part) && error.contains("coupling.json"),
                "{error}"
            );
        }
    }
}
