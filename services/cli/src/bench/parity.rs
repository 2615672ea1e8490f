//! `treespec bench parity`: token ids and accepted counts over a cluster against a reference file.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use treespec_engine::Precision;

use super::{
    greedy_request, progress_bar,
    reference::{self, Comparison, ReferencePrompt},
    report::Table,
    statistics::ratio,
};
use crate::{answer::Answer, client::Client, connection::ConnectionArgs, mode::Mode, stdout};

/// Flags of `treespec bench parity`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ParityArgs {
    /// Reference answers of the default models
    #[arg(
        long,
        value_name = "FILE",
        default_value = "tests/fixtures/eval32_f32.json"
    )]
    pub reference: PathBuf,
    /// Modes to compare
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "MODES",
        default_value = "ar,chain,tree:8,tree:16,tree:32,tree:64"
    )]
    pub modes: Vec<Mode>,
    /// Use the first N prompts only
    #[arg(long, alias = "prompts", value_name = "N")]
    pub limit: Option<usize>,
    /// Compare the first N tokens of each answer only
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// What was found for one mode.
#[derive(Debug, Default)]
struct ModeOutcome {
    prompts: usize,
    equal_ids: usize,
    /// Prompts whose reference has accepted counts for the mode.
    with_rounds: usize,
    equal_rounds: usize,
    tokens: u64,
    steps: u64,
    expected_steps: u64,
    first_difference: Option<String>,
}

impl ModeOutcome {
    fn is_equal(&self) -> bool {
        self.first_difference.is_none()
    }

    /// Counts the answer to prompt `index`.
    fn add(&mut self, index: usize, answer: &Answer, comparison: Comparison) {
        let Comparison { ids, rounds } = comparison;
        self.prompts += 1;
        self.equal_ids += usize::from(ids.is_ok());
        self.tokens += u64::from(answer.usage.completion_tokens.saturating_sub(1));
        self.steps += u64::from(answer.stats.steps);
        let mut outcome = ids;
        if let Some(rounds) = rounds {
            self.with_rounds += 1;
            self.equal_rounds += usize::from(rounds.outcome.is_ok());
            self.expected_steps += rounds.expected_steps as u64;
            outcome = outcome.and(rounds.outcome);
        }
        if let (Err(difference), None) = (outcome, &self.first_difference) {
            self.first_difference = Some(format!("prompt {index}: {difference}"));
        }
    }
}

/// Runs the comparison and prints one line per mode. True when nothing differs.
///
/// # Errors
/// A bad reference file, a cluster that fails, or a status of the service.
pub(crate) async fn run(mut args: ParityArgs) -> Result<bool> {
    // The reference is in f32: an own cluster computes like that unless told otherwise.
    let models = &mut args.connection.cluster.models;
    models.cpu_precision.get_or_insert(Precision::F32);
    let mut prompts = reference::read(&args.reference)?;
    prompts.truncate(args.limit.unwrap_or(usize::MAX));
    ensure!(!prompts.is_empty(), "there are no prompts to compare");

    let outcomes = args
        .connection
        .run(async |endpoint| compare(&mut Client::new(endpoint)?, &prompts, &args).await)
        .await?;
    let mut text = table(&args.modes, &outcomes).render();
    for (mode, outcome) in args.modes.iter().zip(&outcomes) {
        if let Some(difference) = &outcome.first_difference {
            text.push_str(&format!("{mode} differs first at {difference}\n"));
        }
    }
    stdout::print(&text)?;
    Ok(outcomes.iter().all(ModeOutcome::is_equal))
}

async fn compare(
    client: &mut Client,
    prompts: &[ReferencePrompt],
    args: &ParityArgs,
) -> Result<Vec<ModeOutcome>> {
    let progress = progress_bar(prompts.len() * args.modes.len());
    let mut outcomes: Vec<ModeOutcome> =
        args.modes.iter().map(|_| ModeOutcome::default()).collect();
    for (index, prompt) in prompts.iter().enumerate() {
        let max_tokens = prompt.max_tokens(args.max_tokens);
        for (&mode, outcome) in args.modes.iter().zip(&mut outcomes) {
            progress.set_message(format!("prompt {index} {mode}"));
            let request = greedy_request(&prompt.prompt, max_tokens, mode);
            let answer = client.generate(request, |_| Ok(())).await?;
            outcome.add(
                index,
                &answer,
                prompt.compare(mode, max_tokens, (&answer).into()),
            );
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(outcomes)
}

fn table(modes: &[Mode], outcomes: &[ModeOutcome]) -> Table {
    let mut table = Table::new(["mode", "same ids", "same rounds", "tok/step", "reference"]);
    for (mode, outcome) in modes.iter().zip(outcomes) {
        let (rounds, reference) = if outcome.with_rounds == 0 {
            ("-".to_owned(), "-".to_owned())
        } else {
            (
                format!("{}/{}", outcome.equal_rounds, outcome.with_rounds),
                format!(
                    "{:.3}",
                    ratio(outcome.tokens as f64, outcome.expected_steps as f64)
                ),
            )
        };
        table.row([
            mode.to_string(),
            format!("{}/{}", outcome.equal_ids, outcome.prompts),
            rounds,
            format!("{:.3}", ratio(outcome.tokens as f64, outcome.steps as f64)),
            reference,
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use treespec_rpc::proto::verify::v1::{SpeculationStats, Usage};

    use super::{reference::RoundsComparison, *};

    fn answer() -> Answer {
        Answer {
            usage: Usage {
                completion_tokens: 7,
                ..Default::default()
            },
            stats: SpeculationStats {
                steps: 2,
                ..Default::default()
            },
            ..Default::default()
        }
    }

    fn comparison(ids: Result<(), String>, rounds: Result<(), String>) -> Comparison {
        Comparison {
            ids,
            rounds: Some(RoundsComparison {
                expected_steps: 3,
                outcome: rounds,
            }),
        }
    }

    #[test]
    fn equal_answers_count_and_the_first_difference_is_kept() {
        let mut outcome = ModeOutcome::default();
        outcome.add(0, &answer(), comparison(Ok(()), Ok(())));
        outcome.add(
            1,
            &answer(),
            Comparison {
                ids: Ok(()),
                rounds: None,
            },
        );
        assert!(outcome.is_equal());
        outcome.add(2, &answer(), comparison(Ok(()), Err("rounds".into())));
        outcome.add(3, &answer(), comparison(Err("ids".into()), Ok(())));
        assert_eq!(
            outcome.first_difference.as_deref(),
            Some("prompt 2: rounds")
        );

        let text = table(&[Mode::Chain], &[outcome]).render();
        let cells: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(cells, ["chain", "3/4", "2/3", "3.000", "2.667"]);
    }
}
