use thiserror::Error;

/// How the next token is chosen. The default is greedy decoding.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// Nucleus mass in (0, 1].
    pub top_p: f32,
    /// Keep this many most probable tokens; `None` keeps all.
    pub top_k: Option<u32>,
    /// Drop tokens below this fraction of the best probability, in [0, 1).
    pub min_p: f32,
    /// Seed of the counter-based generator; `None` until the coordinator has drawn one.
    pub seed: Option<u64>,
    /// Divides positive and multiplies negative logits of tokens already seen; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens already generated, in [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted per occurrence from tokens already generated, in [-2, 2].
    pub frequency_penalty: f32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            seed: None,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
        }
    }
}

/// Why sampling parameters are refused. `field` is the name in `SamplingParams`.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum SamplingError {
    /// No service could honour the value.
    #[error("{field} is {value}, allowed is {allowed}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// The refused value.
        value: f32,
        /// The allowed values in words.
        allowed: &'static str,
    },
    /// A sound value that this version cannot honour yet.
    #[error("{field} {value} is not supported yet: use {supported}")]
    Unsupported {
        /// Name of the field.
        field: &'static str,
        /// The refused value.
        value: f32,
        /// The values that work.
        supported: &'static str,
    },
}

impl SamplingError {
    /// Name of the refused field.
    pub fn field(&self) -> &'static str {
        match self {
            Self::OutOfRange { field, .. } | Self::Unsupported { field, .. } => field,
        }
    }
}

impl SamplingParams {
    /// Checks every range, then that this version can honour the values. Values outside their range are reported
    /// before values that are only unsupported.
    ///
    /// # Errors
    /// [`SamplingError`] names the first refused field. NaN is outside every range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        self.check_ranges()?;
        self.check_support()
    }

    /// True when the most probable token is taken without noise.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    fn check_ranges(&self) -> Result<(), SamplingError> {
        let penalty = -2.0..=2.0;
        let checks = [
            (
                "temperature",
                self.temperature,
                self.temperature.is_finite() && self.temperature >= 0.0,
                "a finite number >= 0",
            ),
            (
                "top_p",
                self.top_p,
                self.top_p > 0.0 && self.top_p <= 1.0,
                "a number in (0, 1]",
            ),
            (
                "min_p",
                self.min_p,
                self.min_p >= 0.0 && self.min_p < 1.0,
                "a number in [0, 1)",
            ),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0,
                "a finite number > 0",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                penalty.contains(&self.presence_penalty),
                "a number in [-2, 2]",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                penalty.contains(&self.frequency_penalty),
                "a number in [-2, 2]",
            ),
        ];
        for (field, value, sound, allowed) in checks {
            if !sound {
                return Err(SamplingError::OutOfRange {
                    field,
                    value,
                    allowed,
                });
            }
        }
        if self.top_k == Some(0) {
            return Err(SamplingError::OutOfRange {
                field: "top_k",
                value: 0.0,
                allowed: "an integer >= 1, or absent for all tokens",
            });
        }
        Ok(())
    }

    /// top_p, top_k and min_p never change a greedy choice, so they need no support of their own.
    fn check_support(&self) -> Result<(), SamplingError> {
        let greedy_only = [
            ("temperature", self.temperature, 0.0, "0, greedy decoding"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                1.0,
                "1, no penalty",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                0.0,
                "0, no penalty",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                0.0,
                "0, no penalty",
            ),
        ];
        for (field, value, neutral, supported) in greedy_only {
            if value != neutral {
                return Err(SamplingError::Unsupported {
                    field,
                    value,
                    supported,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(edit: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
        let mut params = SamplingParams::default();
        edit(&mut params);
        params
    }

    #[test]
    fn the_default_is_greedy_and_valid() {
        let params = SamplingParams::default();
        assert!(params.is_greedy());
        assert_eq!(params.validate(), Ok(()));
    }

    #[test]
    fn filters_do_not_matter_to_greedy_decoding() {
        let params = params(|p| {
            p.top_p = 0.9;
            p.top_k = Some(40);
            p.min_p = 0.05;
            p.seed = Some(7);
        });
        assert_eq!(params.validate(), Ok(()));
    }

    #[test]
    fn values_outside_their_range_are_named() {
        type Edit = fn(&mut SamplingParams);
        let cases: [(&str, Edit); 16] = [
            ("temperature", |p| p.temperature = -0.1),
            ("temperature", |p| p.temperature = f32::NAN),
            ("temperature", |p| p.temperature = f32::INFINITY),
            ("top_p", |p| p.top_p = 0.0),
            ("top_p", |p| p.top_p = 1.01),
            ("top_p", |p| p.top_p = f32::NAN),
            ("min_p", |p| p.min_p = -0.01),
            ("min_p", |p| p.min_p = 1.0),
            ("min_p", |p| p.min_p = f32::NAN),
            ("top_k", |p| p.top_k = Some(0)),
            ("repetition_penalty", |p| p.repetition_penalty = 0.0),
            ("repetition_penalty", |p| p.repetition_penalty = f32::NAN),
            ("presence_penalty", |p| p.presence_penalty = 2.5),
            ("presence_penalty", |p| p.presence_penalty = f32::NAN),
            ("frequency_penalty", |p| p.frequency_penalty = -2.5),
            ("frequency_penalty", |p| p.frequency_penalty = f32::NAN),
        ];
        for (field, edit) in cases {
            let error = params(edit).validate().unwrap_err();
            assert!(
                matches!(error, SamplingError::OutOfRange { .. }),
                "{field}: {error}"
            );
            assert_eq!(error.field(), field);
            assert!(error.to_string().contains(field), "{error}");
        }
    }

    #[test]
    fn sound_values_of_later_versions_are_unsupported() {
        type Edit = fn(&mut SamplingParams);
        let cases: [(&str, Edit); 4] = [
            ("temperature", |p| p.temperature = 0.7),
            ("repetition_penalty", |p| p.repetition_penalty = 1.1),
            ("presence_penalty", |p| p.presence_penalty = 0.5),
            ("frequency_penalty", |p| p.frequency_penalty = -0.5),
        ];
        for (field, edit) in cases {
            let error = params(edit).validate().unwrap_err();
            assert!(
                matches!(error, SamplingError::Unsupported { .. }),
                "{field}: {error}"
            );
            assert_eq!(error.field(), field);
        }
    }

    #[test]
    fn a_bad_value_is_reported_before_an_unsupported_one() {
        let error = params(|p| {
            p.temperature = 0.7;
            p.top_p = 2.0;
        })
        .validate()
        .unwrap_err();
        assert_eq!(error.field(), "top_p");
    }
}
