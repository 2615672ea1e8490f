//! `treespec inspect`: what the models and the tree builder do, one call at a time.

mod draft;
mod outline;
mod score;
mod step;
mod tree;

use anyhow::Result;
use clap::Subcommand;
use serde::Serialize;

use crate::answer::TopEntry;

/// What to look at.
#[derive(Debug, Subcommand)]
pub(crate) enum InspectCommand {
    /// The target's most probable tokens at every node of a tree
    Score(score::ScoreArgs),
    /// The drafter's most probable tokens in every slot of a block
    Draft(draft::DraftArgs),
    /// The best-first tree of given per-depth log-probabilities
    Tree(tree::TreeArgs),
    /// The tree of every step of a generation, with the accepted path marked
    Step(Box<step::StepArgs>),
}

/// Runs an inspection.
///
/// # Errors
/// Bad input files, a model that can't be loaded, a cluster that fails, or a status of the service.
pub(crate) async fn run(command: InspectCommand) -> Result<()> {
    match command {
        InspectCommand::Score(args) => score::run(&args),
        InspectCommand::Draft(args) => draft::run(&args),
        InspectCommand::Tree(args) => tree::run(&args),
        InspectCommand::Step(args) => step::run(*args).await,
    }
}

/// The best tokens at one place, best first.
#[derive(Debug, Serialize)]
struct TopTokens {
    top: Vec<TopEntry>,
}

impl TopTokens {
    /// The best tokens of a head row that has its normaliser.
    fn of(row: &treespec_engine::HeadRow) -> Self {
        let top = row
            .top
            .iter()
            .enumerate()
            .filter_map(|(rank, scored)| {
                let logprob = row.log_prob(rank)?;
                Some(TopEntry {
                    id: scored.token,
                    logprob,
                })
            })
            .collect();
        Self { top }
    }

    /// `id "text" logprob` of every token, separated by two blanks.
    fn line(&self, text: impl Fn(u32) -> String) -> String {
        self.top
            .iter()
            .map(|entry| format!("{} {} {:.3}", entry.id, text(entry.id), entry.logprob))
            .collect::<Vec<_>>()
            .join("  ")
    }
}
