//! `treespec bench`: measurements that others can repeat, and the comparison with reference answers.

mod coupling;
mod engine;
mod figures;
mod gpu;
mod kernels;
mod lossless;
mod mode_table;
mod parity;
mod precision;
mod prompts;
mod questions;
mod reference;
mod report;
mod run_log;
mod statistics;
mod step;
mod sweep;
mod topk;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use treespec_rpc::proto::{
    coordinator::v1::GenerateRequest,
    verify::v1::{OutputOptions, SamplingParams},
};

use crate::{mode::Mode, prompt};

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Tokens per second and time by stage for several modes, over a cluster
    Sweep(sweep::SweepArgs),
    /// Tokens per second and time by stage for several modes, in this process without services
    Engine(engine::EngineArgs),
    /// Milliseconds of a target's step by its number of rows, in this process
    Step(step::StepArgs),
    /// What rounding activations changes on a CPU: perplexity and choices against f32, by precision and instruction set
    Precision(precision::PrecisionArgs),
    /// Microseconds from a drafter's hidden rows to a tree on a GPU, by the size of the vocabulary
    Topk(topk::TopkArgs),
    /// Whether drafts of every kind give the answers of plain decoding, over clusters; exit status 1 on a difference
    Lossless(lossless::LosslessArgs),
    /// Tokens per step at temperatures above 0 by how drafts are ranked, and the fit that is stored with a drafter
    Coupling(coupling::CouplingArgs),
    /// Token ids and accepted counts against a reference file, over a cluster; exit status 1 on a difference
    Parity(parity::ParityArgs),
}

/// Runs a benchmark.
///
/// # Errors
/// Bad input files, a cluster that fails, or a status of the service.
pub(crate) async fn run(command: BenchCommand) -> Result<ExitCode> {
    match command {
        BenchCommand::Sweep(args) => sweep::run(args).await.map(|()| ExitCode::SUCCESS),
        BenchCommand::Engine(args) => engine::run(args).await.map(|()| ExitCode::SUCCESS),
        BenchCommand::Step(args) => step::run(&args).map(|()| ExitCode::SUCCESS),
        BenchCommand::Precision(args) => precision::run(&args).map(|()| ExitCode::SUCCESS),
        BenchCommand::Topk(args) => topk::run(&args).map(|()| ExitCode::SUCCESS),
        BenchCommand::Coupling(args) => coupling::run(&args).map(|()| ExitCode::SUCCESS),
        BenchCommand::Lossless(args) => lossless::run(args).await.map(exit_code),
        BenchCommand::Parity(args) => parity::run(args).await.map(exit_code),
    }
}

/// Of a comparison.
fn exit_code(equal: bool) -> ExitCode {
    match equal {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// A greedy request for one user message.
fn greedy_request(prompt: &str, max_tokens: u32, mode: Mode) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(prompt::user_message(prompt)),
        max_tokens: Some(max_tokens),
        sampling: Some(SamplingParams {
            temperature: Some(0.0),
            ..Default::default()
        }),
        speculation: Some(mode.speculation(None)),
        output: Some(OutputOptions::default()),
        ..Default::default()
    }
}

/// A bar for `total` requests, drawn when stderr is a terminal. Its message says what runs.
fn progress_bar(total: usize) -> ProgressBar {
    let template = "{wide_bar:.cyan/dim} {pos} of {len}, {eta} left, {msg:20}";
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total as u64).with_style(style)
}
