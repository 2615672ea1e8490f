//! `treespec bench engine`: the modes on a target that hosts its drafter in this process, without services. It is what the
//! engine can do at best, and where greedy ids are compared across devices.

mod against_reference;
mod decoding;
mod draft_mode;

use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use indicatif::ProgressBar;
use serde::Serialize;
use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_engine::{BLOCK_TOKENS, DraftShape, DrafterOptions, Speculator, TargetOptions};
use treespec_sampling::SamplingParams;

pub(super) use self::decoding::{Decoder, Draw};
use self::{
    against_reference::AgainstReference,
    draft_mode::{draft_shape, most_nodes},
};
use super::{
    figures::{ModeFigures, Run},
    gpu::Gpu,
    mode_table::mode_table,
    progress_bar,
    questions::{self, Question, Questions},
    report::Report,
    run_log::{Measured, RunLog},
};
use crate::{
    local_target::{open_drafter, open_target},
    mode::Mode,
    models::ModelArgs,
    sampling::Ranking,
    stdout,
};

/// Flags of `treespec bench engine`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct EngineArgs {
    /// Modes to compare: ar, chain, tree:N; the first one's ids are the reference of the column "same"
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "ar,chain,tree:8,tree:16",
        value_name = "MODES"
    )]
    pub modes: Vec<Mode>,
    /// Take prompts and answers from this file, and tell where the ids differ and by which gap
    #[arg(long, value_name = "FILE", conflicts_with = "prompts")]
    pub reference: Option<PathBuf>,
    /// Prompts, one {"prompt": "…"} a line [default: the built-in list of 32]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Use the first N prompts only [default: 8, all of a reference]
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Tokens per answer at most [default: 128, or up to 512 of prompt and answer with --reference]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// Sequences that are decoded together
    #[arg(long, value_name = "N", default_value = "1")]
    pub batch: NonZeroUsize,
    /// How often everything is run after the warm-up
    #[arg(long, alias = "repeats", default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Sample at this temperature instead of taking the best token
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_hyphen_values = true
    )]
    pub temperature: f32,
    /// Seed of the noise above temperature 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Nucleus of the draw above temperature 0, in (0, 1]
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f32,
    /// How drafts are ranked above temperature 0; the ids do not depend on it
    #[arg(long, value_enum, default_value_t = Ranking::Fitted, value_name = "HOW")]
    pub ranking: Ranking,
    /// Also write the figures of every run to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub models: ModelArgs,
}

/// Prompts of a run without a reference and without `--limit`.
const DEFAULT_LIMIT: usize = 8;

#[derive(Debug, Serialize)]
struct EngineConfig {
    modes: Vec<String>,
    prompts: Vec<String>,
    reference: Option<String>,
    max_tokens: Option<u32>,
    batch: usize,
    repetitions: u32,
    temperature: f32,
    seed: u64,
    top_p: f32,
    ranking: String,
    device: String,
    threads: Option<NonZeroUsize>,
    model: String,
    drafter: String,
    numerics_profile: String,
}

#[derive(Debug, Serialize)]
struct ModeResult {
    #[serde(flatten)]
    figures: ModeFigures,
    #[serde(skip_serializing_if = "Option::is_none")]
    against_reference: Option<AgainstReference>,
}

/// Runs the benchmark, prints the table and writes the JSON report.
///
/// # Errors
/// Bad prompts, models that can't be loaded or have no room for the prompts, or a report that can't be written.
pub(crate) async fn run(args: EngineArgs) -> Result<()> {
    let shapes = args
        .modes
        .iter()
        .map(|&mode| draft_shape(mode))
        .collect::<Result<Vec<_>>>()?;
    let paths = args.models.resolve()?;
    let drafter_path = paths
        .drafter
        .context("bench engine hosts the drafter, too: give --drafter PATH")?;
    let target = open_target(&paths.target)?;
    let drafter = open_drafter(&drafter_path, &target)?;
    let asked = args.questions(&paths.target)?;
    let block_size = drafter.config.block_size;
    let nodes = shapes.iter().map(|&shape| most_nodes(shape, block_size));
    let kv_tokens = kv_tokens(&asked.questions, args.batch, nodes.max().unwrap_or(0));
    let model = load(&args.models, &target, &drafter, kv_tokens, args.batch)?;
    let mut decoder = Decoder::new(model, target.config.eos_token_ids.clone(), args.draw()?);

    let Measurements { runs, answers } =
        measure(&mut decoder, &args, &shapes, &asked.questions).await?;
    let figures = ModeFigures::of_modes(&args.modes, runs);
    let mut text = mode_table(&figures).render();
    let mut compared = Vec::new();
    if let Some(reference) = &asked.reference {
        compared = against_reference::compare(&mut decoder, &asked.questions, reference, &answers)?;
        for (mode, outcome) in args.modes.iter().zip(&compared) {
            let AgainstReference { equal, prompts, .. } = outcome;
            text.push_str(&format!(
                "{mode}: {equal}/{prompts} answers are the reference's\n"
            ));
        }
        text.push_str(&against_reference::describe(&args.modes, &compared));
    }
    stdout::print(&text)?;
    if let Some(path) = &args.json {
        let device = args.models.device.unwrap_or_default();
        let config = EngineConfig {
            modes: args.modes.iter().map(Mode::to_string).collect(),
            prompts: asked.texts,
            reference: args
                .reference
                .as_ref()
                .map(|path| path.display().to_string()),
            max_tokens: args.answer_limit(),
            batch: args.batch.get(),
            repetitions: args.repetitions,
            temperature: args.temperature,
            seed: args.seed,
            top_p: args.top_p,
            ranking: args.ranking.to_string(),
            device: device.to_string(),
            threads: args.models.threads,
            model: target.label(),
            drafter: drafter.label(),
            numerics_profile: decoder.numerics_profile().to_owned(),
        };
        let mut compared = compared.into_iter();
        let results = figures
            .into_iter()
            .map(|figures| ModeResult {
                figures,
                against_reference: compared.next(),
            })
            .collect();
        Report::new("bench engine", config, results)
            .with_gpu(Gpu::open(device)?.map(|gpu| gpu.name()))
            .write(path)?;
    }
    Ok(())
}

impl EngineArgs {
    fn questions(&self, target: &Path) -> Result<Questions> {
        let limit = match (self.limit, &self.reference) {
            (None, None) => Some(DEFAULT_LIMIT),
            (limit, _) => limit,
        };
        Questions::load(
            self.reference.as_deref(),
            self.prompts.as_deref(),
            limit,
            self.answer_limit(),
            target,
        )
    }

    /// How tokens are drawn; `None` takes the best.
    fn draw(&self) -> Result<Option<Draw>> {
        let params = SamplingParams {
            temperature: self.temperature,
            top_p: self.top_p,
            seed: Some(self.seed),
            ..SamplingParams::default()
        };
        params.validate()?;
        Ok((!params.is_greedy()).then(|| Draw {
            params,
            ranking: self.ranking.into(),
        }))
    }

    /// Tokens per answer at most; `None` goes as far as the reference.
    fn answer_limit(&self) -> Option<u32> {
        match &self.reference {
            Some(_) => self.max_tokens,
            None => Some(self.max_tokens.unwrap_or(questions::DEFAULT_MAX_TOKENS)),
        }
    }
}

/// Both models on the device and with the threads of `args`, with room for `batch` sequences.
pub(super) fn load(
    args: &ModelArgs,
    target: &TargetCheckpoint,
    drafter: &DrafterCheckpoint,
    kv_tokens: usize,
    batch: NonZeroUsize,
) -> Result<Box<dyn Speculator>> {
    let cpu = args.cpu()?;
    let options = TargetOptions { cpu, kv_tokens };
    let drafter_options = DrafterOptions {
        cpu,
        max_contexts: batch.get(),
        ..Default::default()
    };
    let device = args.device.unwrap_or_default();
    let options = (&options, &drafter_options);
    let model = treespec_verify::load_speculator(device, target, drafter, options, &mut |_| {})?;
    Ok(model)
}

/// KV rows for the batch that needs most, every sequence in whole blocks.
pub(super) fn kv_tokens(questions: &[Question], batch: NonZeroUsize, most_nodes: usize) -> usize {
    let rows = |question: &Question| {
        let rows = question.tokens.len() + question.max_tokens as usize + most_nodes;
        rows.next_multiple_of(BLOCK_TOKENS)
    };
    questions
        .chunks(batch.get())
        .map(|batch| batch.iter().map(rows).sum())
        .max()
        .unwrap_or(0)
}

/// The runs, and the answers of the first repetition, by mode.
struct Measurements {
    runs: Vec<Vec<Run>>,
    answers: Vec<Vec<Vec<u32>>>,
}

/// Every mode on every batch, in rotating order, again and again.
async fn measure(
    decoder: &mut Decoder,
    args: &EngineArgs,
    shapes: &[Option<DraftShape>],
    questions: &[Question],
) -> Result<Measurements> {
    let batch = args.batch.get();
    let batches = questions.len().div_ceil(batch);
    let progress = progress_bar(shapes.len() * (1 + batches * args.repetitions as usize));
    warm_up(decoder, args, shapes, questions, &progress)?;
    let mut log = RunLog::new(shapes.len(), questions.len());
    let mut answers = vec![Vec::new(); shapes.len()];
    for repetition in 0..args.repetitions {
        for (index, questions) in questions.chunks(batch).enumerate() {
            log.round(repetition, index * batch, async |mode| {
                progress.set_message(args.modes[mode].to_string());
                let (answered, cost) = decoder.answer(questions, shapes[mode])?;
                progress.inc(1);
                let ids: Vec<Vec<u32>> = answered.into_iter().map(|one| one.tokens).collect();
                if repetition == 0 {
                    answers[mode].extend(ids.iter().cloned());
                }
                anyhow::Ok(Measured { cost, answers: ids })
            })
            .await?;
        }
    }
    progress.finish_and_clear();
    Ok(Measurements {
        runs: log.into_runs(),
        answers,
    })
}

fn warm_up(
    decoder: &mut Decoder,
    args: &EngineArgs,
    shapes: &[Option<DraftShape>],
    questions: &[Question],
    progress: &ProgressBar,
) -> Result<()> {
    let first = &questions[..questions.len().min(args.batch.get())];
    for (mode, &shape) in args.modes.iter().zip(shapes) {
        progress.set_message(format!("warm-up {mode}"));
        decoder.answer(first, shape)?;
        progress.inc(1);
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;

    use serde_json::Value;

    use super::*;

    pub(in crate::bench) fn fixture(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/fixtures")
            .join(path)
    }

    pub(super) fn fixture_json(path: &str) -> Value {
        serde_json::from_str(&fs::read_to_string(fixture(path)).unwrap()).unwrap()
    }

    /// A tiny model with a drafter that was fitted to it, on one thread, with no stop tokens.
    pub(super) fn decoder(case: &str, sequences: usize, kv_tokens: usize) -> Decoder {
        let target = open_target(&fixture(&format!("cases/{case}/model"))).unwrap();
        let drafter =
            open_drafter(&fixture(&format!("cases/{case}/drafter_fit")), &target).unwrap();
        let args = ModelArgs {
            threads: NonZeroUsize::new(1),
            ..Default::default()
        };
        let batch = NonZeroUsize::new(sequences).unwrap();
        let model = load(&args, &target, &drafter, kv_tokens, batch).unwrap();
        Decoder::new(model, Vec::new(), None)
    }

    #[test]
    fn the_cache_holds_the_largest_batch_in_whole_blocks() {
        let question = |prompt: usize, max_tokens: u32| Question {
            tokens: vec![0; prompt],
            max_tokens,
        };
        let questions = [question(10, 5), question(20, 12), question(30, 30)];
        let pairs = NonZeroUsize::new(2).unwrap();
        // 10 + 5 + 8 rows take 32, 20 + 12 + 8 take 48, 30 + 30 + 8 take 80.
        assert_eq!(kv_tokens(&questions, pairs, 8), 80);
        assert_eq!(kv_tokens(&questions[..2], pairs, 8), 80);
        assert_eq!(kv_tokens(&questions, NonZeroUsize::MIN, 0), 64);
    }
}
