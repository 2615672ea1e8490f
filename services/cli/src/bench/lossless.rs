//! `treespec bench lossless`: the proof that no draft changes a token. Every prompt is answered by plain decoding, and then
//! with drafts of every kind, and with a drafter that knows nothing; ids, text, ends, ranks and log-probabilities must be
//! the same.

mod comparison;
mod conditions;
mod random_drafter;

use std::{num::NonZeroUsize, path::PathBuf};

use anyhow::{Result, bail, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use indicatif::ProgressBar;
use serde::Serialize;
use treespec_rpc::proto::{
    coordinator::v1::GenerateRequest,
    verify::v1::{DraftRanking, OutputOptions},
};

use self::{comparison::Agreement, conditions::Condition};
use super::{
    progress_bar, prompts,
    report::{Report, Table},
};
use crate::{
    answer::Answer,
    client::Client,
    connection::ConnectionArgs,
    local_target::{open_drafter, open_target},
    mode::Mode,
    prompt,
    sampling::Ranking,
    stderr, stdout,
};

/// Alternatives whose log-probabilities are compared.
const TOP_LOGPROBS: u32 = 5;

/// Flags of `treespec bench lossless`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LosslessArgs {
    /// Drafts to compare with plain decoding
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "chain,tree:4,tree:8,tree:16",
        value_name = "MODES"
    )]
    pub modes: Vec<Mode>,
    /// Temperatures, each alone, with filters, with penalties and with a JSON schema
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0,0.3,0.7,1,1.5",
        value_name = "T"
    )]
    pub temperatures: Vec<f32>,
    /// Prompts, one {"prompt": "…"} a line [default: the built-in list of 32]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Use the first N prompts only
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub limit: usize,
    /// Seeds per prompt
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub seeds: u64,
    /// Tokens per answer at most
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub max_tokens: u32,
    /// Requests at a time
    #[arg(long, value_name = "N", default_value = "1")]
    pub streams: NonZeroUsize,
    /// Leave out the drafter with random weights
    #[arg(long)]
    pub skip_random_drafter: bool,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

#[derive(Debug, Serialize)]
struct LosslessConfig {
    modes: Vec<String>,
    temperatures: Vec<f32>,
    prompts: usize,
    seeds: u64,
    max_tokens: u32,
    streams: usize,
    model: String,
    numerics_profile: String,
}

/// One line of the result.
#[derive(Debug, Serialize)]
struct Outcome {
    condition: String,
    drafter: &'static str,
    mode: String,
    ranking: String,
    answers: usize,
    equal: usize,
    logprob_difference: f32,
    tokens_per_step: f64,
}

/// Runs all comparisons, prints the table and writes the JSON report. False when an answer differs.
///
/// # Errors
/// Bad prompts, a cluster that fails, a status of the service, or a report that can't be written.
pub(crate) async fn run(args: LosslessArgs) -> Result<bool> {
    ensure!(args.seeds > 0, "--seeds must be at least 1");
    let bench = Bench::new(&args)?;
    stderr::print(&format!("{} answers to compare\n", bench.comparisons()));
    let (model, plain, mut outcomes) = args
        .connection
        .run(async |endpoint| {
            let mut client = Client::new(endpoint)?;
            let model = client.model_info().await?;
            let plain = bench.plain(&client).await?;
            let outcomes = bench.compare(&client, &plain, "own").await?;
            Ok((model, plain, outcomes))
        })
        .await?;
    if !args.skip_random_drafter {
        outcomes.extend(bench.with_random_drafter(&plain).await?);
    }
    let equal = outcomes
        .iter()
        .all(|outcome| outcome.equal == outcome.answers);
    stdout::print(&table(&outcomes).render())?;
    let answers: usize = outcomes.iter().map(|outcome| outcome.answers).sum();
    let same: usize = outcomes.iter().map(|outcome| outcome.equal).sum();
    stdout::print(&format!(
        "{same} of {answers} answers are those of plain decoding\n"
    ))?;
    if let Some(path) = &args.json {
        let config = LosslessConfig {
            modes: args.modes.iter().map(Mode::to_string).collect(),
            temperatures: args.temperatures.clone(),
            prompts: bench.prompts.len(),
            seeds: args.seeds,
            max_tokens: args.max_tokens,
            streams: args.streams.get(),
            model: model.name,
            numerics_profile: model.numerics_profile,
        };
        Report::new("bench lossless", config, outcomes).write(path)?;
    }
    Ok(equal)
}

/// What is asked.
struct Bench<'a> {
    args: &'a LosslessArgs,
    prompts: Vec<String>,
    conditions: Vec<Condition>,
}

impl<'a> Bench<'a> {
    fn new(args: &'a LosslessArgs) -> Result<Self> {
        if args.modes.contains(&Mode::Ar) {
            bail!("--modes names drafts: plain decoding is what they are compared with");
        }
        Ok(Self {
            args,
            prompts: prompts::load(args.prompts.as_deref(), Some(args.limit))?,
            conditions: conditions::all(&args.temperatures),
        })
    }

    /// Answers of all drafters, but for those of plain decoding.
    fn comparisons(&self) -> usize {
        let drafters = if self.args.skip_random_drafter { 1 } else { 2 };
        drafters * self.runs().len() * self.prompts.len() * self.args.seeds as usize
    }

    /// The answers of plain decoding, by condition.
    async fn plain(&self, client: &Client) -> Result<Vec<Vec<Answer>>> {
        let progress = self.progress(self.conditions.len());
        let mut plain = Vec::new();
        for condition in &self.conditions {
            progress.set_message(format!("{} ar", condition.name));
            let ranking = Ranking::Plain;
            plain.push(
                self.answers(client, condition, Mode::Ar, ranking, &progress)
                    .await?,
            );
        }
        progress.finish_and_clear();
        Ok(plain)
    }

    async fn compare(
        &self,
        client: &Client,
        plain: &[Vec<Answer>],
        drafter: &'static str,
    ) -> Result<Vec<Outcome>> {
        let runs = self.runs();
        let progress = self.progress(runs.len());
        let mut outcomes = Vec::new();
        for (at, mode, ranking) in runs {
            let condition = &self.conditions[at];
            progress.set_message(format!("{} {mode} {drafter}", condition.name));
            let answers = self
                .answers(client, condition, mode, ranking, &progress)
                .await?;
            let mut agreement = Agreement::default();
            for (plain, answer) in plain[at].iter().zip(&answers) {
                agreement.add(plain, answer);
            }
            if !agreement.is_complete() {
                tracing::error!(condition = %condition.name, %mode, ?agreement, "answers differ");
            }
            outcomes.push(Outcome {
                condition: condition.name.clone(),
                drafter,
                mode: mode.to_string(),
                ranking: match condition.draws() {
                    true => ranking.to_string(),
                    false => "-".to_owned(),
                },
                answers: agreement.answers,
                equal: agreement.equal,
                logprob_difference: agreement.logprob_difference,
                tokens_per_step: agreement.tokens_per_step(),
            });
        }
        progress.finish_and_clear();
        Ok(outcomes)
    }

    /// Condition, mode and ranking of every run. Where nothing is drawn there is nothing to couple.
    fn runs(&self) -> Vec<(usize, Mode, Ranking)> {
        let mut runs = Vec::new();
        for (at, condition) in self.conditions.iter().enumerate() {
            let rankings: &[Ranking] = match condition.draws() {
                true => &[Ranking::Plain, Ranking::Full, Ranking::Fitted],
                false => &[Ranking::Plain],
            };
            for &ranking in rankings {
                runs.extend(self.args.modes.iter().map(|&mode| (at, mode, ranking)));
            }
        }
        runs
    }

    /// The same drafts by a drafter that knows nothing, on a cluster of its own.
    async fn with_random_drafter(&self, plain: &[Vec<Answer>]) -> Result<Vec<Outcome>> {
        let mut connection = self.args.connection.clone();
        ensure!(
            connection.endpoint.is_none(),
            "the drafter with random weights needs a cluster of its own: add --skip-random-drafter to --endpoint"
        );
        let paths = connection.cluster.models.resolve()?;
        let Some(drafter) = &paths.drafter else {
            bail!("there is no drafter to compare with: give --drafter PATH");
        };
        let target = open_target(&paths.target)?;
        let directory = tempfile::tempdir()?;
        random_drafter::write(&open_drafter(drafter, &target)?, directory.path())?;
        connection.cluster.models.drafter = Some(directory.path().to_owned());
        connection
            .run(async |endpoint| {
                let client = Client::new(endpoint)?;
                self.compare(&client, plain, "random").await
            })
            .await
    }

    /// An answer to every prompt with every seed, in that order.
    async fn answers(
        &self,
        client: &Client,
        condition: &Condition,
        mode: Mode,
        ranking: Ranking,
        progress: &ProgressBar,
    ) -> Result<Vec<Answer>> {
        let asked = (0..self.args.seeds).flat_map(|seed| {
            let prompts = self.prompts.iter();
            prompts.map(move |prompt| self.request(prompt, condition, mode, ranking, seed))
        });
        let answers = asked.map(|request| async move {
            let mut client = client.clone();
            let answer = client.generate(request, |_| Ok(())).await;
            progress.inc(1);
            answer
        });
        stream::iter(answers)
            .buffered(self.args.streams.get())
            .try_collect()
            .await
    }

    fn request(
        &self,
        text: &str,
        condition: &Condition,
        mode: Mode,
        ranking: Ranking,
        seed: u64,
    ) -> GenerateRequest {
        let mut sampling = condition.sampling.clone();
        sampling.seed = Some(seed);
        let mut speculation = mode.speculation(None);
        speculation.ranking = Some(DraftRanking::from(ranking).into());
        GenerateRequest {
            prompt: Some(prompt::user_message(text)),
            max_tokens: Some(self.args.max_tokens),
            sampling: Some(sampling),
            speculation: Some(speculation),
            output: Some(OutputOptions {
                top_logprobs: Some(TOP_LOGPROBS),
                ..OutputOptions::default()
            }),
            constraint: condition.constraint.clone(),
            ..GenerateRequest::default()
        }
    }

    fn progress(&self, runs: usize) -> ProgressBar {
        progress_bar(runs * self.prompts.len() * self.args.seeds as usize)
    }
}

fn table(outcomes: &[Outcome]) -> Table {
    let titles = [
        "condition",
        "drafter",
        "mode",
        "ranking",
        "tok/step",
        "logprob ±",
        "equal",
    ];
    let mut table = Table::new(titles);
    for outcome in outcomes {
        table.row(vec![
            outcome.condition.clone(),
            outcome.drafter.to_owned(),
            outcome.mode.clone(),
            outcome.ranking.clone(),
            format!("{:.3}", outcome.tokens_per_step),
            format!("{:.0e}", outcome.logprob_difference),
            format!("{}/{}", outcome.equal, outcome.answers),
        ]);
    }
    table
}
