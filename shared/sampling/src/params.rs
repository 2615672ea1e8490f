use thiserror::Error;

/// Beyond this all tokens are equally probable.
const MAX_TEMPERATURE: f32 = 100.0;
const MAX_REPETITION_PENALTY: f32 = 100.0;

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
}

impl SamplingError {
    /// Name of the refused field.
    pub fn field(&self) -> &'static str {
        match self {
            Self::OutOfRange { field, .. } => field,
        }
    }
}

impl SamplingParams {
    /// Checks every range.
    ///
    /// # Errors
    /// [`SamplingError`] names the first refused field. NaN is outside every range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        for (field, value, sound, allowed) in self.checks() {
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

    /// True when the most probable token is taken without noise.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Field, value, whether it is sound, and what is.
    fn checks(&self) -> [(&'static str, f32, bool, &'static str); 6] {
        let penalty = -2.0..=2.0;
        [
            (
                "temperature",
                self.temperature,
                (0.0..=MAX_TEMPERATURE).contains(&self.temperature),
                "a number in [0, 100]",
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
                self.repetition_penalty > 0.0 && self.repetition_penalty <= MAX_REPETITION_PENALTY,
                "a number in (0, 100]",
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
        ]
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
    fn sound_values_pass() {
        let params = params(|p| {
            p.top_p = 0.9;
            p.top_k = Some(40);
            p.min_p = 0.05;
            p.seed = Some(7);
            p.temperature = 1.5;
            p.repetition_penalty = 1.1;
            p.presence_penalty = -2.0;
            p.frequency_penalty = 2.0;
        });
        assert_eq!(params.validate(), Ok(()));
    }

    #[test]
    fn values_outside_their_range_are_named() {
        type Edit = fn(&mut SamplingParams);
        let cases: [(&str, Edit); 18] = [
            ("temperature", |p| p.temperature = -0.1),
            ("temperature", |p| p.temperature = f32::NAN),
            ("temperature", |p| p.temperature = f32::INFINITY),
            ("temperature", |p| p.temperature = 101.0),
            ("top_p", |p| p.top_p = 0.0),
            ("top_p", |p| p.top_p = 1.01),
            ("top_p", |p| p.top_p = f32::NAN),
            ("min_p", |p| p.min_p = -0.01),
            ("min_p", |p| p.min_p = 1.0),
            ("min_p", |p| p.min_p = f32::NAN),
            ("top_k", |p| p.top_k = Some(0)),
            ("repetition_penalty", |p| p.repetition_penalty = 0.0),
            ("repetition_penalty", |p| p.repetition_penalty = f32::NAN),
            ("repetition_penalty", |p| p.repetition_penalty = 1e9),
            ("presence_penalty", |p| p.presence_penalty = 2.5),
            ("presence_penalty", |p| p.presence_penalty = f32::NAN),
            ("frequency_penalty", |p| p.frequency_penalty = -2.5),
            ("frequency_penalty", |p| p.frequency_penalty = f32::NAN),
        ];
        for (field, edit) in cases {
            let error = params(edit).validate().unwrap_err();
            assert_eq!(error.field(), field);
            assert!(error.to_string().contains(field), "{error}");
        }
    }
}
