//! From measured requests to the figures of a mode.

use serde::{Serialize, Serializer};
use treespec_rpc::proto::verify::v1::StageSeconds;

use super::statistics::{Spread, ratio};
use crate::{answer::Answer, mode::Mode};

/// The stages of a step, in the order in which they happen.
pub(super) const STAGES: [&str; 6] = ["draft", "head", "tree", "wire", "verify", "accept"];

/// Modes that the others are compared with where they run, too.
const BASELINES: [Mode; 2] = [Mode::Ar, Mode::Chain];

/// One value per stage, in the order of [`STAGES`]; in JSON an object with the stages' names.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct ByStage<T>(pub(super) [T; STAGES.len()]);

impl<T: Serialize> Serialize for ByStage<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(STAGES.iter().zip(&self.0))
    }
}

/// What one request took, or several sequences that were decoded as one batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Cost {
    /// Sequences of the batch; 1 for a request to a service.
    pub(super) answers: u32,
    /// Generated tokens of all answers.
    pub(super) completion_tokens: u32,
    /// Steps of all sequences.
    pub(super) steps: u32,
    /// Target forwards of these steps: the sequences of a batch share them.
    pub(super) forwards: u32,
    /// From the first token of the last sequence to the last token of all.
    pub(super) decode_seconds: f64,
    pub(super) time_to_first_token_seconds: f64,
    pub(super) stage_seconds: ByStage<f64>,
}

impl From<&Answer> for Cost {
    fn from(answer: &Answer) -> Self {
        let StageSeconds {
            draft,
            head,
            tree,
            wire,
            verify,
            accept,
        } = answer.stats.stage_seconds.unwrap_or_default();
        Self {
            answers: 1,
            completion_tokens: answer.usage.completion_tokens,
            steps: answer.stats.steps,
            forwards: answer.stats.steps,
            decode_seconds: answer.stats.decode_seconds,
            time_to_first_token_seconds: answer.stats.time_to_first_token_seconds,
            stage_seconds: ByStage([draft, head, tree, wire, verify, accept]),
        }
    }
}

/// One measured request or batch.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Run {
    /// Counted from 0.
    pub(super) repetition: u32,
    /// Index of the prompt, or of the first one of a batch.
    pub(super) prompt: usize,
    #[serde(flatten)]
    pub(super) cost: Cost,
    /// How many answers equal the first mode's answers to the same prompts.
    pub(super) same_answers: u32,
}

/// The figures of one mode. Every spread is over the repetitions, each of which covers all prompts.
#[derive(Debug, Serialize)]
pub(super) struct ModeFigures {
    /// As the command line writes it.
    pub(super) mode: String,
    /// Generated tokens after the first one, per second of decoding.
    pub(super) tokens_per_second: Spread,
    /// The same tokens per step of a sequence.
    pub(super) tokens_per_step: Spread,
    /// Milliseconds of decoding per target forward.
    pub(super) step_ms: Spread,
    /// Milliseconds of each stage per target forward.
    pub(super) stage_ms: ByStage<Spread>,
    /// Median over the prompts.
    pub(super) time_to_first_token_ms: Spread,
    /// How many answers equal the first mode's.
    pub(super) same_answers: u32,
    /// How many answers there are.
    pub(super) answers: u32,
    /// Against plain decoding and the chain, where they ran.
    pub(super) ratios: Vec<Ratio>,
    #[serde(skip)]
    repetitions: Vec<RepetitionFigures>,
    runs: Vec<Run>,
}

/// How a mode compares with another: the spread of the quotients of each repetition, whose runs are interleaved, so that
/// a slow minute of the machine is in both.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Ratio {
    /// The mode that is divided by.
    pub(super) to: String,
    pub(super) tokens_per_second: Spread,
    pub(super) step_ms: Spread,
}

/// The figures of one repetition: sums over its prompts, so that a long answer weighs more than a short one.
#[derive(Debug)]
struct RepetitionFigures {
    tokens_per_second: f64,
    tokens_per_step: f64,
    step_ms: f64,
    stage_ms: [f64; STAGES.len()],
    first_token_ms: f64,
}

impl RepetitionFigures {
    /// `None` without runs.
    fn of(costs: &[Cost]) -> Option<Self> {
        let sum = |value: &dyn Fn(&Cost) -> f64| costs.iter().map(value).sum::<f64>();
        let tokens = sum(&|cost| f64::from(cost.completion_tokens.saturating_sub(cost.answers)));
        let steps = sum(&|cost| f64::from(cost.steps));
        let forwards = sum(&|cost| f64::from(cost.forwards));
        let seconds = sum(&|cost| cost.decode_seconds);
        let first_tokens = costs
            .iter()
            .map(|cost| cost.time_to_first_token_seconds * 1e3);
        Some(Self {
            tokens_per_second: ratio(tokens, seconds),
            tokens_per_step: ratio(tokens, steps),
            step_ms: ratio(seconds * 1e3, forwards),
            stage_ms: std::array::from_fn(|stage| {
                ratio(sum(&|cost| cost.stage_seconds.0[stage]) * 1e3, forwards)
            }),
            first_token_ms: Spread::of(first_tokens)?.median,
        })
    }
}

impl ModeFigures {
    /// The figures of all modes, each with its ratios to the baselines. A mode without runs is left out.
    pub(super) fn of_modes(modes: &[Mode], runs: Vec<Vec<Run>>) -> Vec<Self> {
        let mut all: Vec<Self> = modes
            .iter()
            .zip(runs)
            .filter_map(|(&mode, runs)| Self::new(mode, runs))
            .collect();
        for baseline in BASELINES.map(|mode| mode.to_string()) {
            let Some(index) = all.iter().position(|figures| figures.mode == baseline) else {
                continue;
            };
            let ratios: Vec<Option<Ratio>> = all
                .iter()
                .map(|figures| figures.ratio_to(&all[index]))
                .collect();
            for (figures, ratio) in all.iter_mut().zip(ratios) {
                figures.ratios.extend(ratio);
            }
        }
        all
    }

    /// The figures of all runs in `mode`; `None` without runs.
    fn new(mode: Mode, runs: Vec<Run>) -> Option<Self> {
        let last = runs.iter().map(|run| run.repetition).max()?;
        let repetitions: Vec<RepetitionFigures> = (0..=last)
            .filter_map(|repetition| {
                let of_it: Vec<Cost> = runs
                    .iter()
                    .filter(|run| run.repetition == repetition)
                    .map(|run| run.cost)
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
            same_answers: runs.iter().map(|run| run.same_answers).sum(),
            answers: runs.iter().map(|run| run.cost.answers).sum(),
            ratios: Vec::new(),
            repetitions,
            runs,
        })
    }

    fn ratio_to(&self, baseline: &Self) -> Option<Ratio> {
        let spread = |value: &dyn Fn(&RepetitionFigures) -> f64| {
            let pairs = self.repetitions.iter().zip(&baseline.repetitions);
            Spread::of(pairs.map(|(own, other)| ratio(value(own), value(other))))
        };
        Some(Ratio {
            to: baseline.mode.clone(),
            tokens_per_second: spread(&|figures| figures.tokens_per_second)?,
            step_ms: spread(&|figures| figures.step_ms)?,
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
            cost: Cost {
                answers: 1,
                completion_tokens: tokens,
                steps,
                forwards: steps,
                decode_seconds: seconds,
                time_to_first_token_seconds: 0.1,
                stage_seconds: ByStage([0.0, 0.0, 0.0, 0.0, seconds, 0.0]),
            },
            same_answers: 1,
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
    fn a_batch_counts_its_forwards_once() {
        let mut batch = run(0, 22, 20, 2.0);
        batch.cost.answers = 2;
        batch.cost.forwards = 10;
        let figures = ModeFigures::new(Mode::Ar, vec![batch]).unwrap();
        assert_eq!(figures.tokens_per_second.median, 10.0);
        assert_eq!(figures.tokens_per_step.median, 1.0);
        assert_eq!(figures.step_ms.median, 200.0);
        assert_eq!(figures.answers, 2);
    }

    #[test]
    fn ratios_pair_the_repetitions() {
        // The machine is half as fast in the second repetition; the ratio does not see it.
        let ar = vec![run(0, 11, 10, 1.0), run(1, 11, 10, 2.0)];
        let tree = vec![run(0, 11, 5, 0.5), run(1, 11, 5, 1.0)];
        let modes = [Mode::Ar, Mode::Tree(Some(8))];
        let figures = ModeFigures::of_modes(&modes, vec![ar, tree]);
        let same = |value| Spread {
            median: value,
            min: value,
            max: value,
        };
        let [ratio] = &figures[1].ratios[..] else {
            panic!("{:?}", figures[1].ratios)
        };
        assert_eq!(ratio.to, "ar");
        assert_eq!(ratio.tokens_per_second, same(2.0));
        assert_eq!(ratio.step_ms, same(1.0));
        assert_eq!(figures[0].ratios[0].tokens_per_second, same(1.0));
    }

    #[test]
    fn runs_are_flat_and_stages_are_an_object_in_json() {
        let json = serde_json::to_value(run(3, 11, 5, 1.0)).unwrap();
        assert_eq!(json["repetition"], 3);
        assert_eq!(json["completion_tokens"], 11);
        let stages = ByStage([1, 2, 3, 4, 5, 6]);
        assert_eq!(
            serde_json::to_string(&stages).unwrap(),
            r#"{"draft":1,"head":2,"tree":3,"wire":4,"verify":5,"accept":6}"#
        );
    }
}
