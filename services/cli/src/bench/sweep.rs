//! `treespec bench sweep`: the same prompts in several modes, interleaved, so that a slow minute hits all of them.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::{
    figures::{ModeFigures, Run},
    greedy_request,
    mode_table::mode_table,
    progress_bar, prompts,
    report::Report,
    run_log::{Measured, RunLog},
};
use crate::{client::Client, connection::ConnectionArgs, mode::Mode, stdout};

/// Flags of `treespec bench sweep`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SweepArgs {
    /// Modes to compare; the first one's text is the reference of the column "same"
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "ar,chain,tree:8,tree:16",
        value_name = "MODES"
    )]
    pub modes: Vec<Mode>,
    /// Budgets that a bare "tree" in --modes stands for
    #[arg(long, value_delimiter = ',', value_name = "N")]
    pub budgets: Vec<u32>,
    /// Prompts, one {"prompt": "…"} a line [default: the built-in list of 32]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Use the first N prompts only
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub limit: usize,
    /// Tokens per answer at most
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub max_tokens: u32,
    /// How often everything is run after the warm-up
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Also write the figures of every run to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

#[derive(Debug, Serialize)]
struct SweepConfig {
    modes: Vec<String>,
    prompts: Vec<String>,
    max_tokens: u32,
    repetitions: u32,
    endpoint: Option<String>,
    model: String,
    numerics_profile: String,
}

/// Runs the sweep, prints the table and writes the JSON report.
///
/// # Errors
/// Bad prompts, a cluster that fails, a status of the service, or a report that can't be written.
pub(crate) async fn run(args: SweepArgs) -> Result<()> {
    let modes = expand(&args.modes, &args.budgets)?;
    let prompts = prompts::load(args.prompts.as_deref(), Some(args.limit))?;
    let (model, runs) = args
        .connection
        .run(async |endpoint| {
            let mut client = Client::new(endpoint)?;
            let model = client.model_info().await?;
            Ok((model, measure(&mut client, &modes, &prompts, &args).await?))
        })
        .await?;

    let results = ModeFigures::of_modes(&modes, runs);
    stdout::print(&mode_table(&results).render())?;
    if let Some(path) = &args.json {
        let config = SweepConfig {
            modes: modes.iter().map(Mode::to_string).collect(),
            prompts,
            max_tokens: args.max_tokens,
            repetitions: args.repetitions,
            endpoint: args.connection.endpoint.clone(),
            model: model.name,
            numerics_profile: model.numerics_profile,
        };
        Report::new("bench sweep", config, results).write(path)?;
    }
    Ok(())
}

/// Replaces a bare `tree` by one mode per budget.
fn expand(modes: &[Mode], budgets: &[u32]) -> Result<Vec<Mode>> {
    ensure!(
        budgets.is_empty() || modes.contains(&Mode::Tree(None)),
        "--budgets needs a bare \"tree\" in --modes"
    );
    Ok(modes
        .iter()
        .flat_map(|&mode| match mode {
            Mode::Tree(None) if !budgets.is_empty() => budgets
                .iter()
                .map(|&budget| Mode::Tree(Some(budget)))
                .collect(),
            other => vec![other],
        })
        .collect())
}

/// All runs, by mode.
async fn measure(
    client: &mut Client,
    modes: &[Mode],
    prompts: &[String],
    args: &SweepArgs,
) -> Result<Vec<Vec<Run>>> {
    let total = modes.len() * (1 + prompts.len() * args.repetitions as usize);
    let progress = progress_bar(total);
    for &mode in modes {
        progress.set_message(format!("warm-up {mode}"));
        client
            .generate(greedy_request(&prompts[0], args.max_tokens, mode), |_| {
                Ok(())
            })
            .await?;
        progress.inc(1);
    }

    let mut log = RunLog::new(modes.len(), prompts.len());
    for repetition in 0..args.repetitions {
        for (index, prompt) in prompts.iter().enumerate() {
            log.round(repetition, index, async |mode| {
                progress.set_message(modes[mode].to_string());
                let request = greedy_request(prompt, args.max_tokens, modes[mode]);
                let answer = client.generate(request, |_| Ok(())).await?;
                progress.inc(1);
                anyhow::Ok(Measured {
                    cost: (&answer).into(),
                    answers: vec![answer.token_ids],
                })
            })
            .await?;
        }
    }
    progress.finish_and_clear();
    Ok(log.into_runs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_tree_stands_for_the_budgets() {
        let modes = expand(&[Mode::Ar, Mode::Tree(None)], &[8, 16]).unwrap();
        assert_eq!(modes, [Mode::Ar, Mode::Tree(Some(8)), Mode::Tree(Some(16))]);
        assert!(expand(&[Mode::Ar], &[8]).is_err());
        assert_eq!(
            expand(&[Mode::Tree(None)], &[]).unwrap(),
            [Mode::Tree(None)]
        );
    }
}
