//! `treespec bench topk`: from a drafter's hidden rows to a tree on a GPU, by the size of the vocabulary. The dense way of
//! the same is `deploy/bench/dense_topk.py`.

#[cfg(feature = "cuda")]
mod draft_graphs;

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use treespec_engine::DeviceChoice;
use treespec_tree::MAX_BUDGET;

use super::{
    gpu::Gpu,
    report::{Report, Table},
    statistics::{Spread, ratio},
};
use crate::stdout;

/// Flags of `treespec bench topk`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TopkArgs {
    /// Rows of the head
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "49152,151936,248320",
        value_name = "N"
    )]
    pub vocab: Vec<usize>,
    /// Width of a hidden row
    #[arg(long, default_value_t = 4096, value_name = "N")]
    pub hidden: usize,
    /// Hidden rows: the depths of the tree
    #[arg(long, default_value_t = 15, value_name = "N")]
    pub rows: usize,
    /// Candidates per depth, and nodes of the tree
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub k: usize,
    /// How often everything is run after the warm-up
    #[arg(long, default_value_t = 30, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// The GPU: cuda:N
    #[arg(long, default_value = "cuda:0", value_name = "DEVICE")]
    pub device: DeviceChoice,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct TopkConfig {
    hidden: usize,
    rows: usize,
    k: usize,
    repetitions: u32,
    device: String,
    /// Bytes a second that a copy reads and writes, measured before and after.
    copy_bytes_per_second: Spread,
}

/// The measurements of one vocabulary, in microseconds; the same repetition at the same index.
#[derive(Debug, Default)]
struct Samples {
    weight_bytes: u64,
    /// The head's product alone.
    gemm: Vec<f64>,
    /// With the selection of the k best.
    select: Vec<f64>,
    /// With the tree, too.
    tree: Vec<f64>,
    /// From the launch of all of it to the tree in the host's memory, as the host's clock sees it.
    total: Vec<f64>,
}

/// The figures of one vocabulary. Device times are those of one draft among many that follow each other in one graph.
#[derive(Debug, Serialize)]
struct VocabularyResult {
    vocab: usize,
    weight_bytes: u64,
    gemm_us: Spread,
    /// Share of the copy's rate at which the product reads the head.
    gemm_share_of_copy: f64,
    gemm_select_us: Spread,
    gemm_select_tree_us: Spread,
    /// What the selection adds: the spread of the differences of each repetition.
    select_beyond_gemm_us: Spread,
    /// What selection and tree add.
    select_tree_beyond_gemm_us: Spread,
    total_us: Spread,
}

/// Runs the benchmark, prints the table and writes the JSON report.
///
/// # Errors
/// A build without CUDA, no such GPU, shapes that the kernels do not cover, or a report that can't be written.
pub(crate) fn run(args: &TopkArgs) -> Result<()> {
    args.check()?;
    let gpu = Gpu::open(args.device)?.context("bench topk needs a GPU: give --device cuda:N")?;
    let copy_before = gpu.copy_bandwidth()?;
    let samples = measure(&gpu, args)?;
    let copies = [copy_before, gpu.copy_bandwidth()?];
    let copy = Spread::of(copies).context("no copy was measured")?;
    let results: Vec<VocabularyResult> = args
        .vocab
        .iter()
        .zip(&samples)
        .filter_map(|(&vocab, samples)| VocabularyResult::new(vocab, samples, copy.median))
        .collect();
    stdout::print(&table(&results).render())?;
    if let Some(path) = &args.json {
        let config = TopkConfig {
            hidden: args.hidden,
            rows: args.rows,
            k: args.k,
            repetitions: args.repetitions,
            device: args.device.to_string(),
            copy_bytes_per_second: copy,
        };
        Report::new("bench topk", config, results)
            .with_gpu(Some(gpu.name()))
            .write(path)?;
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn measure(gpu: &Gpu, args: &TopkArgs) -> Result<Vec<Samples>> {
    draft_graphs::measure(&gpu.0, args)
}

#[cfg(not(feature = "cuda"))]
fn measure(gpu: &Gpu, _: &TopkArgs) -> Result<Vec<Samples>> {
    match *gpu {}
}

impl TopkArgs {
    fn check(&self) -> Result<()> {
        let TopkArgs {
            vocab,
            hidden,
            rows,
            k,
            ..
        } = self;
        ensure!(
            !vocab.is_empty() && !vocab.contains(&0) && *hidden > 0 && *rows > 0,
            "--vocab, --hidden and --rows need positive numbers"
        );
        ensure!(
            (1..=MAX_BUDGET).contains(k),
            "--k {k}: a tree has 1 to {MAX_BUDGET} nodes below its root"
        );
        Ok(())
    }
}

impl VocabularyResult {
    /// `None` without measurements.
    fn new(vocab: usize, samples: &Samples, copy_bytes_per_second: f64) -> Option<Self> {
        let spread = |values: &[f64]| Spread::of(values.iter().copied());
        let beyond = |values: &[f64]| {
            let pairs = values.iter().zip(&samples.gemm);
            Spread::of(pairs.map(|(with, gemm)| with - gemm))
        };
        let gemm_us = spread(&samples.gemm)?;
        let rate = ratio(samples.weight_bytes as f64, gemm_us.median / 1e6);
        Some(Self {
            vocab,
            weight_bytes: samples.weight_bytes,
            gemm_us,
            gemm_share_of_copy: ratio(rate, copy_bytes_per_second),
            gemm_select_us: spread(&samples.select)?,
            gemm_select_tree_us: spread(&samples.tree)?,
            select_beyond_gemm_us: beyond(&samples.select)?,
            select_tree_beyond_gemm_us: beyond(&samples.tree)?,
            total_us: spread(&samples.total)?,
        })
    }
}

fn table(results: &[VocabularyResult]) -> Table {
    let mut table = Table::new([
        "vocab", "gemm us", "of copy", "+ select", "+ tree", "beyond", "min", "max", "total us",
    ]);
    for result in results {
        let beyond = result.select_tree_beyond_gemm_us;
        let microseconds = |value: f64| format!("{value:.1}");
        table.row([
            result.vocab.to_string(),
            microseconds(result.gemm_us.median),
            format!("{:.1} %", result.gemm_share_of_copy * 100.0),
            microseconds(result.gemm_select_us.median),
            microseconds(result.gemm_select_tree_us.median),
            microseconds(beyond.median),
            microseconds(beyond.min),
            microseconds(beyond.max),
            microseconds(result.total_us.median),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(k: usize) -> TopkArgs {
        TopkArgs {
            vocab: vec![100],
            hidden: 64,
            rows: 15,
            k,
            repetitions: 1,
            device: DeviceChoice::Cpu,
            json: None,
        }
    }

    #[test]
    fn what_is_added_is_a_difference_of_the_same_repetition() {
        let samples = Samples {
            weight_bytes: 400_000_000,
            gemm: vec![100.0, 200.0, 100.0],
            select: vec![108.0, 209.0, 107.0],
            tree: vec![115.0, 216.0, 118.0],
            total: vec![130.0, 240.0, 131.0],
        };
        let result = VocabularyResult::new(49_152, &samples, 4.0e12).unwrap();
        assert_eq!(result.select_beyond_gemm_us.median, 8.0);
        assert_eq!(result.select_tree_beyond_gemm_us.median, 16.0);
        assert_eq!(result.select_tree_beyond_gemm_us.max, 18.0);
        assert!((result.gemm_share_of_copy - 1.0).abs() < 1e-12);
        let text = table(&[result]).render();
        assert!(text.contains("100.0 %"), "{text}");
        assert!(VocabularyResult::new(1, &Samples::default(), 1.0).is_none());
    }

    #[test]
    fn shapes_without_a_tree_and_devices_without_kernels_are_refused() {
        for k in [0, 256] {
            let error = run(&args(k)).unwrap_err().to_string();
            assert!(error.contains(&format!("--k {k}")), "{error}");
        }
        let error = run(&args(64)).unwrap_err().to_string();
        assert!(error.contains("--device cuda:N"), "{error}");
    }
}
