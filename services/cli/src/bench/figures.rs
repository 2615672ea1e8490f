//! From the runs of a sweep to the figures of a mode.

use serde::{Serialize, Serializer};
use treespec_rpc::proto::verify::v1::StageSeconds;

use super::statistics::{Spread, ratio};
use crate::{answer::Answer, mode::Mode};

/// The stages of a step, in the order in which they happen.
pub(super) const STAGES: [&str; 6] = ["draft", "head", "tree", "wire", "verify", "accept"];

/// One value per stage, in the order of [`STAGES`]; in JSON an object with the stages' names.
#[derive(Debug, Clone, Copy)]
pub(super) struct ByStage<T>(pub(super) [T; STAGES.len()]);

impl<T: Serialize> Serialize for ByStage<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(STAGES.iter().zip(&self.0))
    }
}

/// One measured request.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Run {
    /// Counted from 0.
    pub(super) repetition: u32,
    /// Index into the prompts.
    pub(super) prompt: usize,
    completion_tokens: u32,
    steps: u32,
    decode_seconds: f64,
    time_to_first_token_seconds: f64,
    stage_seconds: ByStage<f64>,
    /// The answer equals the first mode's answer to the same prompt.
    same: bool,
}

impl Run {
    /// The figures of `answer`.
    pub(super) fn new(repetition: u32, prompt: usize, answer: &Answer, same: bool) -> Self {
        let StageSeconds {
            draft,
            head,
            tree,
            wire,
            verify,
            accept,
        } = answer.stats.stage_seconds.unwrap_or_default();
        Self {
            repetition,
            prompt,
            completion_tokens: answer.usage.completion_tokens,
            steps: answer.stats.steps,
            decode_seconds: answer.stats.decode_seconds,
            time_to_first_token_seconds: answer.stats.time_to_first_token_seconds,
            stage_seconds: ByStage([draft, head, tree, wire, verify, accept]),
            same,
        }
    }
}

/// The figures of one mode. Every spread is over the repetitions, each of which covers all prompts.
#[derive(Debug, Serialize)]
pub(super) struct ModeFigures {
    /// As the command line writes it.
    pub(super) mode: String,
    /// Generated tokens after the first one, per second of decoding.
    pub(super) tokens_per_second: Spread,
    /// The same tokens per target forward.
    pub(super) tokens_per_step: Spread,
    /// Milliseconds of decoding per target forward.
    pub(super) step_ms: Spread,
    /// Milliseconds of each stage per target forward.
    pub(super) stage_ms: ByStage<Spread>,
    /// Median over the prompts.
    pub(super) time_to_first_token_ms: Spread,
    /// How many answers equal the first mode's.
    pub(super) same_answers: usize,
    /// How many answers there are.
    pub(super) answers: usize,
    runs: Vec<Run>,
}

/// The figures of one repetition: sums over its prompts, so that a long answer weighs more than a short one.
struct RepetitionFigures {
    tokens_per_second: f64,
    tokens_per_step: f64,
    step_ms: f64,
    stage_ms: [f64; STAGES.len()],
    first_token_ms: f64,
}

impl RepetitionFigures {
    /// `None` without runs.
    fn of(runs: &[&Run]) -> Option<Self> {
        let sum = |value: &dyn Fn(&Run) -> f64| runs.iter().map(|run| value(run)).sum::<f64>();
        let tokens = sum(&|run| f64::from(run.completion_tokens.saturating_sub(1)));
        let steps = sum(&|run| f64::from(run.steps));
        let seconds = sum(&|run| run.decode_seconds);
        let first_tokens = runs.iter().map(|run| run.time_to_first_token_seconds * 1e3);
        Some(Self {
            tokens_per_second: ratio(tokens, seconds),
            tokens_per_step: ratio(tokens, steps),
            step_ms: ratio(seconds * 1e3, steps),
            stage_ms: std::array::from_fn(|stage| {
                ratio(sum(&|run| run.stage_seconds.0[stage]) * 1e3, steps)
            }),
            first_token_ms: Spread::of(first_tokens)?.median,
        })
    }
}

impl ModeFigures {
    /// The figures of all runs in `mode`; `None` without runs.
    pub(super) fn new(mode: Mode, runs: Vec<Run>) -> Option<Self> {
        let last = runs.iter().map(|run| run.repetition).max()?;
        let repetitions: Vec<RepetitionFigures> = (0..=last)
            .filter_map(|repetition| {
                let of_it: Vec<&Run> = runs
                    .iter()
                    .filter(|run| run.repetition == repetition)
                    .collect();
                RepetitionFigures::of(&of_it)
            })
            .collect();
        let spread =
            |value: &dyn Fn(&RepetitionFigures) -> f64| Spread::of(repetitions.iter().map(value));
        let mut stage_ms = [spread(&|_| 0.0)?; STAGES.len()];
        for (stage, slot) in stage_ms.iter_mut().enumerate() {
            *slot = spread(&|figures| figures.stage_ms[stage])?;
        }
        Some(Self {
            mode: mode.to_string(),
            tokens_per_second: spread(&|figures| figures.tokens_per_second)?,
            tokens_per_step: spread(&|figures| figures.tokens_per_step)?,
            step_ms: spread(&|figures| figures.step_ms)?,
            stage_ms: ByStage(stage_ms),
            time_to_first_token_ms: spread(&|figures| figures.first_token_ms)?,
            same_answers: runs.iter().filter(|run| run.same).count(),
            answers: runs.len(),
            runs,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(repetition: u32, tokens: u32, steps: u32, seconds: f64) -> Run {
        Run {
            repetition,
            prompt: 0,
            completion_tokens: tokens,
            steps,
            decode_seconds: seconds,
            time_to_first_token_seconds: 0.1,
            stage_seconds: ByStage([0.0, 0.0, 0.0, 0.0, seconds, 0.0]),
            same: true,
        }
    }

    #[test]
    fn figures_are_sums_over_prompts_and_medians_over_repetitions() {
        let runs = vec![
            run(0, 11, 5, 1.0),
            run(0, 31, 15, 3.0),
            run(1, 11, 5, 0.5),
            run(1, 31, 15, 1.5),
            run(2, 11, 5, 2.0),
            run(2, 31, 15, 6.0),
        ];
        let figures = ModeFigures::new(Mode::Chain, runs).unwrap();
        assert_eq!(
            figures.tokens_per_second,
            Spread {
                median: 10.0,
                min: 5.0,
                max: 20.0
            }
        );
        assert_eq!(figures.tokens_per_step.median, 2.0);
        assert_eq!(figures.step_ms.median, 200.0);
        assert_eq!(figures.stage_ms.0[4].median, 200.0);
        assert_eq!((figures.same_answers, figures.answers), (6, 6));
        assert!(ModeFigures::new(Mode::Chain, vec![]).is_none());
    }

    #[test]
    fn stages_are_an_object_in_json() {
        let json = serde_json::to_string(&ByStage([1, 2, 3, 4, 5, 6])).unwrap();
        assert_eq!(
            json,
            r#"{"draft":1,"head":2,"tree":3,"wire":4,"verify":5,"accept":6}"#
        );
    }
}
