//! The command line of treespec: the three services, a local cluster of them, a client, a benchmark and a microscope.

// Progress, statistics and errors for the person at the terminal; results go through the module `stdout`.
#![allow(clippy::print_stderr)]

mod answer;
mod arguments;
mod bench;
mod client;
mod cluster;
mod connection;
mod generate;
mod inspect;
mod local_target;
mod mode;
mod models;
mod prompt;
mod sampling;
mod serve;
mod signals;
mod stderr;
mod stdout;
mod summary;
mod token_text;
mod up;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser as _;
use tracing::level_filters::LevelFilter;
use treespec_telemetry::LogFormat;

use crate::{
    arguments::{Arguments, Command},
    connection::Interrupted,
};

/// What a shell reports for a program that Ctrl-C ended.
const EXIT_INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments.command) {
        Ok(code) => code,
        Err(error) if error.is::<Interrupted>() => {
            // The shell's prompt should not follow half an answer.
            stderr::print_line("");
            ExitCode::from(EXIT_INTERRUPTED)
        }
        Err(error) if error.is::<stdout::Closed>() => ExitCode::FAILURE,
        Err(error) => {
            stderr::print_line(&format!("error: {}", one_line(&error)));
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    let _logs = if command.is_service() {
        None
    } else {
        Some(treespec_telemetry::init(
            LogFormat::Pretty,
            LevelFilter::WARN,
        )?)
    };
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    let outcome = runtime.block_on(async {
        match command {
            Command::Up(args) => up::run(args).await?,
            Command::Generate(args) => generate::run(*args).await?,
            Command::Bench(command) => return bench::run(command).await,
            Command::Inspect(command) => inspect::run(command).await?,
            Command::Coordinator(args) => serve::coordinator(args).await?,
            Command::Draft(args) => serve::draft(args).await?,
            Command::Verify(args) => serve::verify(args).await?,
        }
        Ok(ExitCode::SUCCESS)
    });
    // A blocked read of stdin must not keep the process alive.
    runtime.shutdown_background();
    outcome
}

/// The error with its causes, in one line.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let message = cause.to_string();
        // Many errors print their source themselves.
        if line.contains(&message) {
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&message);
    }
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn errors_take_one_line_and_name_every_cause_once() {
        let error = anyhow!("no such\n  file").context("cannot read x");
        assert_eq!(one_line(&error), "cannot read x: no such file");
        let repeated = anyhow!("inner").context("outer: inner");
        assert_eq!(one_line(&repeated), "outer: inner");
    }
}
