//! What a step leaves for the host, and waiting for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use treespec_engine::{EngineError, HeadRequest, HeadRow, ScoredToken};

use super::TargetCore;
use crate::Device;
use crate::acceptance::{AcceptanceBuffers, Outcome, Walked};
use crate::step_rows::StepRows;

/// The outcome of a step, or the row whose logits hold no number.
pub(crate) fn walked(outcome: Outcome) -> Result<Walked, EngineError> {
    outcome
        .walked
        .map_err(|row| EngineError::NonFiniteLogits { row })
}

/// Waits until the device has written the next outcome of every sequence. Kernels behind the walk may still run then.
pub(crate) fn wait_for_outcomes(
    device: &Arc<Device>,
    acceptance: &AcceptanceBuffers,
    steps: &mut [u32],
) -> Result<Vec<Outcome>, EngineError> {
    /// Looks between two questions to the driver, which take microseconds.
    const LOOKS: usize = 20_000;
    /// A step takes milliseconds; a kernel that runs for this long does not end.
    const LONGEST: Duration = Duration::from_secs(30);
    let started = Instant::now();
    let mut outcomes = Vec::with_capacity(steps.len());
    for (sequence, step) in steps.iter_mut().enumerate() {
        *step = step.wrapping_add(1);
        let outcome = loop {
            let seen = (0..LOOKS).find_map(|_| {
                std::hint::spin_loop();
                acceptance.poll(sequence, *step)
            });
            if let Some(outcome) = seen {
                break outcome;
            }
            if device.stream().is_idle()? {
                // The record may have come between the last look and the question.
                break acceptance.poll(sequence, *step).ok_or_else(|| {
                    EngineError::DeviceLost(format!("step {step} left no outcome"))
                })?;
            }
            if started.elapsed() > LONGEST {
                return Err(EngineError::DeviceLost(format!(
                    "step {step} did not end within {LONGEST:?}"
                )));
            }
        };
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

/// The head rows of accepted paths.
pub(crate) struct AcceptedHeads {
    stride: usize,
    /// All rows of the step, where one of them wants more than the best token.
    rows: Vec<HeadRow>,
}

impl AcceptedHeads {
    /// Reads what `requests`, one per sequence, want. The step's kernels must have ended when one of them wants more than
    /// the best token.
    pub(crate) fn read(
        core: &TargetCore,
        rows: &StepRows,
        requests: impl Iterator<Item = HeadRequest> + Clone,
    ) -> Result<Self, EngineError> {
        let stride = rows.stride;
        if requests
            .clone()
            .all(|request| request == HeadRequest::ARGMAX)
        {
            return Ok(Self {
                stride,
                rows: Vec::new(),
            });
        }
        let wanted: Vec<HeadRequest> = requests
            .flat_map(|request| std::iter::repeat_n(request, stride))
            .collect();
        Ok(Self {
            stride,
            rows: core.head.read_rows(&wanted)?,
        })
    }

    /// The head rows of a path: row `i` chose the `i`-th new token, and says so where it is `sampled`.
    pub(crate) fn of(&self, sequence: usize, walked: &Walked, sampled: bool) -> Vec<HeadRow> {
        let start = sequence * self.stride;
        let tokens = walked.tokens.iter().skip(1).chain([&walked.bonus]);
        let rows = walked.path.iter().zip(tokens).zip(&walked.logits);
        rows.map(|((node, &token), &score)| {
            let choice = ScoredToken { token, score };
            let row = self.rows.get(start + node).cloned();
            HeadRow {
                chosen: sampled.then_some(choice),
                ..row.unwrap_or_else(|| HeadRow {
                    log_normaliser: f32::NAN,
                    top: vec![choice],
                    gathered: None,
                    chosen: None,
                })
            }
        })
        .collect()
    }
}
