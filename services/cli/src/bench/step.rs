//! `treespec bench step`: what one target forward costs by its number of rows.

use std::{num::NonZeroUsize, path::PathBuf, time::Instant};

use anyhow::{Result, ensure};
use serde::Serialize;

use super::{
    report::{Report, Table},
    statistics::Spread,
};
use crate::{
    local_target::{LocalTarget, open_drafter, open_target},
    models::ModelArgs,
    stdout,
};

/// Spreads the tokens over the embedding, so that no forward finds its rows in the cache by luck.
const TOKEN_STRIDE: usize = 7919;

/// Flags of `treespec bench step`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct StepArgs {
    /// Rows of a forward: the root and the nodes of a tree
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2,4,8,17,33",
        value_name = "N"
    )]
    pub rows: Vec<usize>,
    /// Committed tokens before the rows
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: u32,
    /// How often each number of rows is run
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub models: ModelArgs,
}

#[derive(Debug, Serialize)]
struct StepConfig {
    model: String,
    numerics_profile: String,
    /// The drafter's features are computed too, as in a service that speculates.
    features: bool,
    threads: Option<NonZeroUsize>,
    context: u32,
    repetitions: u32,
}

#[derive(Debug, Serialize)]
struct RowsResult {
    rows: usize,
    forward_ms: Spread,
}

/// Runs the benchmark, prints the table and writes the JSON report.
///
/// # Errors
/// Models that can't be loaded, rows beyond the context, or a report that can't be written.
pub(crate) fn run(args: &StepArgs) -> Result<()> {
    ensure!(
        !args.rows.is_empty() && !args.rows.contains(&0),
        "--rows needs positive numbers"
    );
    let paths = args.models.resolve()?;
    let checkpoint = open_target(&paths.target)?;
    let drafter = paths
        .drafter
        .map(|path| open_drafter(&path, &checkpoint))
        .transpose()?;
    let most_rows = args.rows.iter().copied().max().unwrap_or(1);
    let context = args.context as usize;
    ensure!(
        most_rows <= checkpoint.config.context_length.saturating_sub(context),
        "{context} committed tokens and {most_rows} rows exceed the context length {}",
        checkpoint.config.context_length
    );
    let mut target = LocalTarget::load(
        &checkpoint,
        drafter.as_ref(),
        args.models.threads,
        context + most_rows,
    )?;

    let vocabulary = target.vocabulary().len();
    let tokens: Vec<u32> = (0..context + most_rows)
        .map(|index| (index * TOKEN_STRIDE % vocabulary) as u32)
        .collect();
    target.prefill(&tokens[..context], false)?;
    let results = measure(&mut target, &tokens[context..], args, drafter.is_some())?;

    stdout::print(&table(&results).render())?;
    if let Some(path) = &args.json {
        let config = StepConfig {
            model: checkpoint.label(),
            numerics_profile: target.numerics_profile().to_owned(),
            features: drafter.is_some(),
            threads: args.models.threads,
            context: args.context,
            repetitions: args.repetitions,
        };
        Report::new("bench step", config, results).write(path)?;
    }
    Ok(())
}

/// All numbers of rows in turn, again and again: a slow moment of the machine hits every one of them.
fn measure(
    target: &mut LocalTarget,
    tokens: &[u32],
    args: &StepArgs,
    features: bool,
) -> Result<Vec<RowsResult>> {
    for &rows in &args.rows {
        target.verify_rows(&tokens[..rows], features)?;
    }
    let mut milliseconds = vec![Vec::new(); args.rows.len()];
    for _ in 0..args.repetitions {
        for (&rows, measured) in args.rows.iter().zip(&mut milliseconds) {
            let start = Instant::now();
            target.verify_rows(&tokens[..rows], features)?;
            measured.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok(args
        .rows
        .iter()
        .zip(milliseconds)
        .filter_map(|(&rows, measured)| {
            Some(RowsResult {
                rows,
                forward_ms: Spread::of(measured)?,
            })
        })
        .collect())
}

fn table(results: &[RowsResult]) -> Table {
    let mut table = Table::new(["rows", "ms", "min", "max", "ms/row"]);
    for RowsResult { rows, forward_ms } in results {
        table.row([
            rows.to_string(),
            format!("{:.2}", forward_ms.median),
            format!("{:.2}", forward_ms.min),
            format!("{:.2}", forward_ms.max),
            format!("{:.2}", forward_ms.median / *rows as f64),
        ]);
    }
    table
}
