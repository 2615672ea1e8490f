//! What a step leaves for the host, and waiting for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use treespec_engine::{
    EngineError, HeadRequest, HeadRow, RowChoices, RowSampling, ScoredToken, SpeculativeStep,
    TreeRows,
};

use super::TargetCore;
use crate::Device;
use crate::acceptance::{AcceptanceBuffers, Outcome, Walked};
use crate::head_pass::HeadPass;
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

/// What a sequence of a step wants to know of its accepted path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AskedPath<'a> {
    /// Rows in the cache before the step: the position of the root.
    committed: usize,
    request: HeadRequest,
    /// How its rows chose; `None` when they took the best token.
    sampling: Option<RowChoices<'a>>,
}

impl<'a> From<&TreeRows<'a>> for AskedPath<'a> {
    fn from(rows: &TreeRows<'a>) -> Self {
        Self {
            committed: rows.committed,
            request: rows.head,
            sampling: rows.sampling.filter(|choices| !choices.is_argmax()),
        }
    }
}

impl<'a> From<&SpeculativeStep<'a>> for AskedPath<'a> {
    fn from(step: &SpeculativeStep<'a>) -> Self {
        let choices = step.sampling.map(RowChoices::from);
        Self {
            committed: step.committed,
            request: step.head,
            sampling: choices.filter(|choices| !choices.is_argmax()),
        }
    }
}

/// The head rows of accepted paths.
pub(crate) struct AcceptedHeads<'a> {
    head: &'a HeadPass,
    stride: usize,
    /// All rows of the step, where one of them wants more than the best token.
    rows: Vec<HeadRow>,
}

impl<'a> AcceptedHeads<'a> {
    /// Reads what `requests`, one per sequence, want. The step's kernels must have ended when one of them wants more than
    /// the best token, and no other head pass may run before all paths were read.
    pub(crate) fn read(
        core: &'a TargetCore,
        rows: &StepRows,
        requests: impl Iterator<Item = HeadRequest> + Clone,
    ) -> Result<Self, EngineError> {
        let mut heads = Self {
            head: &core.head,
            stride: rows.stride,
            rows: Vec::new(),
        };
        if requests
            .clone()
            .any(|request| request != HeadRequest::ARGMAX)
        {
            let wanted: Vec<HeadRequest> = requests
                .flat_map(|request| std::iter::repeat_n(request, rows.stride))
                .collect();
            heads.rows = core.head.read_rows(&wanted)?;
        }
        Ok(heads)
    }

    /// The head rows of a path: row `i` chose the `i`-th new token, and says so where it was sampled.
    pub(crate) fn of(
        &self,
        sequence: usize,
        walked: &Walked,
        asked: AskedPath<'_>,
    ) -> Result<Vec<HeadRow>, EngineError> {
        let start = sequence * self.stride;
        let tokens = walked.tokens.iter().skip(1).chain([&walked.bonus]);
        let choices = tokens.zip(&walked.logits).enumerate();
        let rows = choices.map(|(at, (&token, &score))| {
            let choice = ScoredToken { token, score };
            let logits_row = start + walked.path[at];
            let row = self.rows.get(logits_row).cloned();
            let mut row = row.unwrap_or_else(|| HeadRow {
                log_normaliser: f32::NAN,
                top: vec![choice],
                gathered: None,
                chosen: None,
                rank: None,
            });
            if let Some(choices) = asked.sampling {
                row.chosen = Some(choice);
                let position = (asked.committed + at) as u32 + 1;
                let sampling = RowSampling::new(choices, walked.path[at], position, || {
                    let path = walked.tokens.get(choices.counted_rows..=at);
                    path.unwrap_or_default().to_vec()
                });
                self.describe(logits_row, &sampling, asked.request, choice, &mut row)?;
            }
            Ok(row)
        });
        rows.collect()
    }

    /// Answers what a request asks about the chosen token, from the row's logits unless the list of the best has the
    /// answer: a row of them is large.
    fn describe(
        &self,
        logits_row: usize,
        sampling: &RowSampling<'_>,
        request: HeadRequest,
        choice: ScoredToken,
        row: &mut HeadRow,
    ) -> Result<(), EngineError> {
        if !request.rank && !request.processed {
            return Ok(());
        }
        let place = row.top.iter().position(|best| best.token == choice.token);
        match place.filter(|_| !request.processed) {
            Some(place) => row.rank = Some(place as u32 + 1),
            None => {
                let mut logits = self.head.row_logits(logits_row)?;
                sampling.describe(&mut logits, choice.token, &request, row);
            }
        }
        Ok(())
    }
}
