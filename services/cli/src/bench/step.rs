//! `treespec bench step`: what the verification of a tree costs by its number of rows.

mod limits;
mod shape;
mod work;

use std::{num::NonZeroUsize, path::PathBuf, time::Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint, TargetConfig};
use treespec_engine::{Backend, CpuOptions, CpuTarget, TargetOptions};

use self::{
    limits::{Device, Limits, Shares},
    shape::{Shape, weight_bytes},
    work::{Work, token},
};
use super::{
    gpu::Gpu,
    kernels::{self, KernelClass},
    report::{Report, Table, milliseconds},
    statistics::{Spread, ratio},
};
use crate::{
    local_target::{LocalTarget, open_drafter, open_target},
    models::ModelArgs,
    stdout,
};

/// Steps of each number of rows whose kernels are timed one by one.
const PROFILED_STEPS: u32 = 5;

/// Flags of `treespec bench step`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct StepArgs {
    /// Rows of a step: the root and the nodes of a tree; above 256 the rows of a prompt
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
    /// Random weights of this shape instead of a model (GPU only)
    #[arg(
        long,
        value_enum,
        value_name = "SHAPE",
        conflicts_with_all = ["target", "drafter", "no_drafter"]
    )]
    pub shape: Option<Shape>,
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
    device: String,
    threads: Option<NonZeroUsize>,
    context: u32,
    repetitions: u32,
    #[serde(flatten)]
    limits: Limits,
}

#[derive(Debug, Serialize)]
struct RowsResult {
    rows: usize,
    ms: Spread,
    /// Against one row, where that is measured, too: the spread of the quotients of each repetition.
    #[serde(skip_serializing_if = "Option::is_none")]
    to_one_row: Option<Spread>,
    #[serde(flatten)]
    shares: Shares,
    /// The step by kind of kernel, from steps whose kernels were timed one by one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    kernels: Vec<KernelClass>,
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
    let mut subject = Subject::load(args)?;
    let vocabulary = subject.target.vocabulary().len();
    let works = args
        .rows
        .iter()
        .map(|&rows| Work::new(rows, vocabulary))
        .collect::<Result<Vec<_>>>()?;
    let prompt: Vec<u32> = (0..args.context as usize)
        .map(|index| token(index, vocabulary))
        .collect();
    subject.target.prefill(&prompt, false)?;

    let device = subject.device.clone();
    let (limits, measured) = device.around(|| subject.time(&works, args.repetitions))?;
    let mut results = results(&works, &measured, &limits);
    for (result, work) in results.iter_mut().zip(&works) {
        result.kernels = subject.split(work)?;
    }

    stdout::print(&table(&results).render())?;
    if let Some(kernels) = kernel_table(&results) {
        stdout::print(&kernels.render())?;
    }
    if let Some(path) = &args.json {
        let config = StepConfig {
            model: subject.label,
            numerics_profile: subject.target.numerics_profile().to_owned(),
            features: subject.features,
            device: args.models.device.unwrap_or_default().to_string(),
            threads: args.models.threads,
            context: args.context,
            repetitions: args.repetitions,
            limits,
        };
        Report::new("bench step", config, results)
            .with_gpu(device.gpu().map(Gpu::name))
            .write(path)?;
    }
    Ok(())
}

impl StepArgs {
    /// KV rows of the context and the most rows of a step.
    fn cache_rows(&self, config: &TargetConfig) -> Result<usize> {
        let most_rows = self.rows.iter().copied().max().unwrap_or(1);
        let context = self.context as usize;
        ensure!(
            most_rows <= config.context_length.saturating_sub(context),
            "{context} committed tokens and {most_rows} rows exceed the context length {}",
            config.context_length
        );
        Ok(context + most_rows)
    }
}

/// The target whose steps are measured.
struct Subject {
    target: LocalTarget,
    label: String,
    features: bool,
    device: Device,
}

impl Subject {
    fn load(args: &StepArgs) -> Result<Self> {
        let gpu = Gpu::open(args.models.device.unwrap_or_default())?;
        if let Some(shape) = args.shape {
            let gpu = gpu.context("--shape makes its weights on a GPU: give --device cuda:N")?;
            let config = shape.config();
            let rows = args.cache_rows(&config)?;
            return Ok(Self {
                target: LocalTarget::new(gpu.random_target(&config, rows)?, rows)?,
                label: format!("{} (random weights)", shape.name()),
                features: false,
                device: Device::Gpu {
                    gpu,
                    weight_bytes: weight_bytes(&config, None),
                },
            });
        }
        let paths = args.models.resolve()?;
        let checkpoint = open_target(&paths.target)?;
        let drafter = paths
            .drafter
            .map(|path| open_drafter(&path, &checkpoint))
            .transpose()?;
        let drafter = drafter.as_ref();
        let rows = args.cache_rows(&checkpoint.config)?;
        let (backend, device) = match gpu {
            Some(gpu) => {
                let drafter_config = drafter.map(|one| &one.config);
                let weight_bytes = weight_bytes(&checkpoint.config, drafter_config);
                let backend = gpu.load_target(&checkpoint, drafter, rows)?;
                (backend, Device::Gpu { gpu, weight_bytes })
            }
            None => load_on_cpu(&checkpoint, drafter, args.models.cpu()?, rows)?,
        };
        Ok(Self {
            target: LocalTarget::new(backend, rows)?,
            label: checkpoint.label(),
            features: drafter.is_some(),
            device,
        })
    }

    fn run(&mut self, work: &Work) -> Result<()> {
        match work {
            Work::Tree(tree) => self.target.verify_tree(tree, self.features),
            Work::Prompt(tokens) => self.target.run_prompt(tokens, self.features),
        }
    }

    /// Milliseconds `[work][repetition]`. All in turn, again and again: a slow moment of the machine hits every one of them.
    fn time(&mut self, works: &[Work], repetitions: u32) -> Result<Vec<Vec<f64>>> {
        for work in works {
            self.run(work)?;
        }
        let mut milliseconds = vec![Vec::new(); works.len()];
        for _ in 0..repetitions {
            for (work, measured) in works.iter().zip(&mut milliseconds) {
                let start = Instant::now();
                self.run(work)?;
                measured.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        Ok(milliseconds)
    }

    /// The kernels of a step; none on a CPU.
    fn split(&mut self, work: &Work) -> Result<Vec<KernelClass>> {
        let Some(gpu) = self.device.gpu().cloned() else {
            return Ok(Vec::new());
        };
        let steps = (0..PROFILED_STEPS)
            .map(|_| gpu.profile(|| self.run(work)))
            .collect::<Result<Vec<_>>>()?;
        Ok(kernels::split(&steps))
    }
}

/// The target in the form that tells its weights.
fn load_on_cpu(
    checkpoint: &TargetCheckpoint,
    drafter: Option<&DrafterCheckpoint>,
    options: CpuOptions,
    rows: usize,
) -> Result<(Box<dyn Backend>, Device)> {
    let target_options = TargetOptions {
        cpu: options,
        kv_tokens: rows,
    };
    let target = CpuTarget::load(checkpoint, drafter, &target_options, &mut |_| {})?;
    let weights = target.weights();
    Ok((Box::new(target), Device::Cpu { options, weights }))
}

/// One result per number of rows, from milliseconds `[work][repetition]`.
fn results(works: &[Work], measured: &[Vec<f64>], limits: &Limits) -> Vec<RowsResult> {
    let one_row = works.iter().position(|work| work.rows() == 1);
    let one_row = one_row.and_then(|index| measured.get(index));
    works
        .iter()
        .zip(measured)
        .filter_map(|(work, measured)| {
            let ms = Spread::of(measured.iter().copied())?;
            let quotients = |one_row: &Vec<f64>| {
                let pairs = measured.iter().zip(one_row);
                Spread::of(pairs.map(|(&own, &one)| ratio(own, one)))
            };
            Some(RowsResult {
                rows: work.rows(),
                ms,
                to_one_row: one_row.and_then(quotients),
                shares: limits.shares(work, ms.median),
                kernels: Vec::new(),
            })
        })
        .collect()
}

fn table(results: &[RowsResult]) -> Table {
    let titles = ["rows", "ms", "min", "max", "ms/row", "/ 1 row"];
    // All steps ran on one device, so they have the same columns.
    let shares = results.first().map(|result| result.shares.columns());
    let share_titles = shares.iter().flatten().map(|(title, _)| *title);
    let mut table = Table::new(titles.into_iter().chain(share_titles));
    for result in results {
        let RowsResult { rows, ms, .. } = result;
        let to_one_row = result
            .to_one_row
            .map(|spread| format!("{:.3}", spread.median));
        let shares = result.shares.columns().into_iter();
        let cells = [
            rows.to_string(),
            milliseconds(ms.median),
            milliseconds(ms.min),
            milliseconds(ms.max),
            milliseconds(ms.median / *rows as f64),
            to_one_row.unwrap_or_else(|| "-".to_owned()),
        ];
        table.row(
            cells
                .into_iter()
                .chain(shares.map(|(_, share)| format!("{:.1} %", share * 100.0))),
        );
    }
    table
}

/// Milliseconds of every number of rows by kind of kernel; `None` where kernels were not timed.
fn kernel_table(results: &[RowsResult]) -> Option<Table> {
    let mut classes: Vec<&str> = Vec::new();
    for kernels in results.iter().flat_map(|result| &result.kernels) {
        if !classes.contains(&kernels.class) {
            classes.push(kernels.class);
        }
    }
    if classes.is_empty() {
        return None;
    }
    let titles = ["kernel ms"].into_iter().chain(classes.iter().copied());
    let mut table = Table::new(titles.chain(["sum"]));
    for result in results {
        let of = |class: &str| {
            let kernels = result.kernels.iter().find(|one| one.class == class);
            kernels.map_or(0.0, |one| one.ms.median)
        };
        let times: Vec<f64> = classes.iter().map(|class| of(class)).collect();
        let sum = times.iter().sum();
        let cells = times.into_iter().chain([sum]).map(milliseconds);
        table.row([result.rows.to_string()].into_iter().chain(cells));
    }
    Some(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(value: f64) -> Spread {
        Spread {
            median: value,
            min: value,
            max: value,
        }
    }

    fn works(rows: [usize; 2]) -> Vec<Work> {
        let works = rows.map(|rows| Work::new(rows, 560).unwrap());
        works.into()
    }

    const LIMITS: Limits = Limits::Gpu {
        weight_bytes: 4_000_000,
        copy_bytes_per_second: Spread {
            median: 4e9,
            min: 4e9,
            max: 4e9,
        },
    };

    #[test]
    fn rows_are_compared_with_one_row_of_the_same_repetition() {
        // The second repetition is slow as a whole.
        let measured = [vec![1.0, 2.0], vec![1.25, 2.5]];
        let results = results(&works([1, 16]), &measured, &LIMITS);
        assert_eq!(results[1].to_one_row, Some(same(1.25)));
        assert_eq!(results[0].ms.median, 1.5);
        let (title, share) = results[0].shares.columns()[0];
        assert_eq!(title, "of copy");
        assert!((share - 1.0 / 1.5).abs() < 1e-12, "{share}");
        let text = table(&results).render();
        assert!(text.contains("66.7 %"), "{text}");
        assert!(kernel_table(&results).is_none());
    }

    #[test]
    fn kinds_of_kernels_are_columns() {
        let kernel = |class, ms| KernelClass {
            class,
            launches: 1,
            ms: same(ms),
            kernels: vec![],
        };
        let mut results = results(&works([1, 16]), &[vec![1.0], vec![2.0]], &LIMITS);
        results[0].kernels = vec![kernel("linear", 0.75)];
        results[1].kernels = vec![kernel("linear", 1.0), kernel("attention", 0.5)];
        let text = kernel_table(&results).unwrap().render();
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines[0], ["kernel", "ms", "linear", "attention", "sum"]);
        assert_eq!(lines[1], ["1", "0.750", "0.000", "0.750"]);
        assert_eq!(lines[2], ["16", "1.000", "0.500", "1.500"]);
    }
}
