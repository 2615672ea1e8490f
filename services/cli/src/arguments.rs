//! The command line as a whole.

use clap::{Parser, Subcommand};

use crate::{
    bench::BenchCommand, generate::GenerateArgs, inspect::InspectCommand, serve::ServiceArgs,
    up::UpArgs,
};

/// Lossless tree speculative decoding as three gRPC services.
#[derive(Debug, Parser)]
#[command(
    name = "treespec",
    version,
    about,
    propagate_version = true,
    max_term_width = 110
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start all three services on this machine and print their endpoints
    Up(UpArgs),
    /// Generate one answer
    Generate(Box<GenerateArgs>),
    /// Measure speed, or compare with reference answers
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Look inside: scores, drafts, trees, steps
    #[command(subcommand)]
    Inspect(InspectCommand),
    /// Run the public API
    Coordinator(ServiceArgs<treespec_coordinator::Config>),
    /// Run the drafter
    Draft(ServiceArgs<treespec_draft::Config>),
    /// Run the verifier with the target model
    Verify(ServiceArgs<treespec_verify::Config>),
}

impl Command {
    /// True for the services, which choose their own log format and level.
    pub(crate) fn is_service(&self) -> bool {
        matches!(
            self,
            Self::Coordinator(_) | Self::Draft(_) | Self::Verify(_)
        )
    }
}

#[cfg(test)]
mod tests;
