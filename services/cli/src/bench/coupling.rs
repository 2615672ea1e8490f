//! `treespec bench coupling`: how much of the target's noise a drafter's ranking should take, fitted on sampled answers and
//! compared with none and all of it.

mod fit;
mod simulation;
mod traces;

use std::{num::NonZeroUsize, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use treespec_checkpoint::CouplingProfile;
use treespec_engine::DraftShape;
use treespec_sampling::{Coupling, Ranking, SamplingParams};

use self::{fit::fit, simulation::simulate, traces::Trace};
use super::{
    engine::{Decoder, Draw, kv_tokens, load},
    progress_bar,
    questions::{Question, Questions},
    report::Report,
};
use crate::{
    local_target::{open_drafter, open_target},
    models::ModelArgs,
    stdout,
};

/// Candidates of a depth that are recorded: as many as a draft ranks.
const CANDIDATES: usize = 64;

/// Flags of `treespec bench coupling`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CouplingArgs {
    /// Temperatures to fit and to compare at
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0.3,0.7,1,1.5",
        value_name = "T"
    )]
    pub temperatures: Vec<f32>,
    /// Tree budgets to compare
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4,8,16,32",
        value_name = "N"
    )]
    pub budgets: Vec<usize>,
    /// Answers per prompt and temperature to fit on, with seeds 0, 1, …
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub fit_seeds: u64,
    /// Answers per prompt and temperature to compare on, with seeds of their own
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub test_seeds: u64,
    /// Prompts, one {"prompt": "…"} a line [default: the built-in list of 32]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Use the first N prompts only
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Tokens per answer at most
    #[arg(long, default_value_t = 96, value_name = "N")]
    pub max_tokens: u32,
    /// Store the fit with the drafter
    #[arg(long)]
    pub write: bool,
    /// Compare the fit that is stored with the drafter, without a new one
    #[arg(long, conflicts_with = "write")]
    pub stored: bool,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub models: ModelArgs,
}

#[derive(Debug, Serialize)]
struct CouplingConfig {
    temperatures: Vec<f32>,
    fit_seeds: u64,
    test_seeds: u64,
    prompts: usize,
    max_tokens: u32,
    model: String,
    drafter: String,
}

/// Tokens per step of the three rankings.
#[derive(Debug, Serialize)]
struct Comparison {
    temperature: f32,
    shape: String,
    answers: usize,
    tokens: usize,
    plain: f64,
    full: f64,
    fitted: f64,
}

/// Fits, compares, prints the table and stores what was asked for.
///
/// # Errors
/// Bad prompts, models that can't be loaded, or files that can't be written.
pub(crate) fn run(args: &CouplingArgs) -> Result<()> {
    let mut temperatures = args.temperatures.clone();
    temperatures.sort_by(f32::total_cmp);
    temperatures.dedup();
    ensure!(
        temperatures.first().is_some_and(|&lowest| lowest > 0.0),
        "--temperatures must be above 0"
    );
    let paths = args.models.resolve()?;
    let drafter_path = paths.drafter.context("give --drafter PATH")?;
    let target = open_target(&paths.target)?;
    let drafter = open_drafter(&drafter_path, &target)?;
    let limit = Some(args.max_tokens);
    let asked = Questions::load(
        None,
        args.prompts.as_deref(),
        args.limit,
        limit,
        &paths.target,
    )?;
    let rows = kv_tokens(&asked.questions, NonZeroUsize::MIN, 0);
    let model = load(&args.models, &target, &drafter, rows, NonZeroUsize::MIN)?;
    let eos = target.config.eos_token_ids.clone();
    let mut recorder = Recorder {
        decoder: Decoder::new(model, eos, None),
        questions: asked.questions,
    };
    let fit_seeds = if args.stored { 0..0 } else { 0..args.fit_seeds };
    let test_seeds = args.fit_seeds..args.fit_seeds + args.test_seeds;
    let profile = match args.stored {
        true => drafter
            .coupling
            .clone()
            .context("the drafter has no stored fit")?,
        false => fit(&recorder.all(&temperatures, fit_seeds)?),
    };
    let tests = recorder.all(&temperatures, test_seeds)?;
    let comparisons = compare(&tests, &args.budgets, &profile);
    stdout::print(&table(&comparisons))?;
    if args.write {
        profile
            .save(&drafter_path)
            .with_context(|| format!("cannot write to {}", drafter_path.display()))?;
    }
    if let Some(path) = &args.json {
        let config = CouplingConfig {
            temperatures,
            fit_seeds: args.fit_seeds,
            test_seeds: args.test_seeds,
            prompts: recorder.questions.len(),
            max_tokens: args.max_tokens,
            model: target.label(),
            drafter: drafter.label(),
        };
        Report::new("bench coupling", config, comparisons).write(path)?;
    }
    Ok(())
}

/// Makes answers and records what the drafter proposes in them.
struct Recorder {
    decoder: Decoder,
    questions: Vec<Question>,
}

impl Recorder {
    /// By temperature, an answer to every question with every seed.
    fn all(
        &mut self,
        temperatures: &[f32],
        seeds: std::ops::Range<u64>,
    ) -> Result<Vec<(f32, Vec<Trace>)>> {
        let count = temperatures.len() * self.questions.len() * seeds.clone().count();
        let progress = progress_bar(count);
        let mut all = Vec::new();
        for &temperature in temperatures {
            progress.set_message(format!("temperature {temperature}"));
            let mut traces = Vec::new();
            for seed in seeds.clone() {
                for index in 0..self.questions.len() {
                    traces.push(self.one(index, temperature, seed)?);
                    progress.inc(1);
                }
            }
            all.push((temperature, traces));
        }
        progress.finish_and_clear();
        Ok(all)
    }

    fn one(&mut self, index: usize, temperature: f32, seed: u64) -> Result<Trace> {
        // Answers to different prompts are drawn with different noise.
        let seed = seed * 1_000_003 + index as u64;
        let params = SamplingParams {
            temperature,
            seed: Some(seed),
            ..SamplingParams::default()
        };
        self.decoder.set_draw(Some(Draw {
            params,
            ranking: Ranking::Full,
        }));
        let question = &self.questions[index];
        let shape = Some(DraftShape::Tree { budget: 4 });
        let (answers, _) = self.decoder.answer(std::slice::from_ref(question), shape)?;
        let answer = answers.into_iter().next().context("no answer")?;
        let model = self.decoder.model();
        Trace::of(model, &question.tokens, answer.tokens, seed, CANDIDATES)
    }
}

fn compare(
    tests: &[(f32, Vec<Trace>)],
    budgets: &[usize],
    profile: &CouplingProfile,
) -> Vec<Comparison> {
    let trees = budgets.iter().map(|&budget| DraftShape::Tree { budget });
    let shapes: Vec<DraftShape> = [DraftShape::Chain].into_iter().chain(trees).collect();
    let mut comparisons = Vec::new();
    for (temperature, traces) in tests {
        for &shape in &shapes {
            let of = |ranking| {
                let coupling = Coupling {
                    seed: 0,
                    temperature: *temperature,
                    ranking,
                };
                simulate(traces, shape, coupling, Some(profile))
            };
            let plain = of(Ranking::Plain);
            comparisons.push(Comparison {
                temperature: *temperature,
                shape: shape_name(shape),
                answers: traces.len(),
                tokens: plain.tokens,
                plain: plain.tokens_per_step(),
                full: of(Ranking::Full).tokens_per_step(),
                fitted: of(Ranking::Fitted).tokens_per_step(),
            });
        }
    }
    comparisons
}

fn shape_name(shape: DraftShape) -> String {
    match shape {
        DraftShape::Chain => "chain".to_owned(),
        DraftShape::Tree { budget } => format!("tree:{budget}"),
    }
}

fn table(comparisons: &[Comparison]) -> String {
    let mut text = String::from("tokens per step, by ranking of the drafts\n");
    text += "temperature  shape      plain    full  fitted  fitted / better\n";
    for row in comparisons {
        let better = row.plain.max(row.full);
        text += &format!(
            "{:>11}  {:8} {:>7.3} {:>7.3} {:>7.3}  {:>15.3}\n",
            row.temperature,
            row.shape,
            row.plain,
            row.full,
            row.fitted,
            row.fitted / better
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_per_temperature_and_shape() {
        let row = Comparison {
            temperature: 0.7,
            shape: "tree:8".into(),
            answers: 1,
            tokens: 95,
            plain: 2.0,
            full: 1.5,
            fitted: 2.2,
        };
        let text = table(&[row]);
        assert_eq!(text.lines().count(), 3);
        assert!(text.lines().last().unwrap().ends_with("1.100"), "{text}");
    }
}
