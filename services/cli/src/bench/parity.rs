//! `treespec bench parity`: token ids and accepted counts over a cluster against a reference file.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;

use super::{greedy_request, report::Table, statistics::ratio};
use crate::{answer::Answer, client::Client, connection::ConnectionArgs, mode::Mode, stdout};

/// Prompt and answer together in the reference file.
const REFERENCE_LENGTH: u32 = 512;

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

/// The part of the reference file that is compared.
#[derive(Debug, Deserialize)]
struct Reference {
    prompts: Vec<ReferencePrompt>,
}

#[derive(Debug, Clone, Deserialize)]
struct ReferencePrompt {
    prompt: String,
    prompt_tokens: u32,
    /// The answer; a final end-of-sequence token is part of it.
    token_ids: Vec<u32>,
    /// Smallest distance of the two best logits on the path: a flip below 1e-3 may be rounding.
    min_top1_top2_gap: f64,
    /// Accepted counts by mode: `chain`, or a tree's budget.
    rounds: HashMap<String, Vec<u32>>,
}

impl ReferencePrompt {
    fn max_tokens(&self, limit: Option<u32>) -> u32 {
        let room = REFERENCE_LENGTH.saturating_sub(self.prompt_tokens);
        limit.map_or(room, |limit| limit.min(room))
    }

    /// The ids that a generation of at most `max_tokens` must give.
    fn expected_ids(&self, max_tokens: u32) -> &[u32] {
        &self.token_ids[..self.token_ids.len().min(max_tokens as usize)]
    }

    /// The accepted counts that `tokens` generated tokens take in `mode`; `None` when the file has none for it.
    fn expected_rounds(&self, mode: Mode, tokens: usize) -> Option<&[u32]> {
        let key = match mode {
            Mode::Chain => "chain".to_owned(),
            Mode::Tree(Some(budget)) => budget.to_string(),
            Mode::Auto | Mode::Ar | Mode::Tree(None) => return None,
        };
        let rounds = self.rounds.get(&key)?;
        Some(&rounds[..rounds_for(rounds, tokens)])
    }
}

/// How many rounds make `tokens` tokens, the first of which comes from the prefill.
fn rounds_for(rounds: &[u32], tokens: usize) -> usize {
    let mut made = 1;
    rounds
        .iter()
        .take_while(|&&accepted| {
            let needed = made < tokens;
            made += accepted as usize + 1;
            needed
        })
        .count()
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

    fn add(
        &mut self,
        index: usize,
        prompt: &ReferencePrompt,
        mode: Mode,
        max_tokens: u32,
        answer: &Answer,
    ) {
        let expected_ids = prompt.expected_ids(max_tokens);
        let expected_rounds = prompt.expected_rounds(mode, expected_ids.len());
        let ids = compare_ids(prompt, expected_ids, answer);
        let rounds = expected_rounds.map_or(Ok(()), |expected| {
            compare_rounds(expected, &answer.stats.rounds)
        });

        self.prompts += 1;
        self.equal_ids += usize::from(ids.is_ok());
        if let Some(expected) = expected_rounds {
            self.with_rounds += 1;
            self.equal_rounds += usize::from(rounds.is_ok());
            self.expected_steps += expected.len() as u64;
        }
        self.tokens += u64::from(answer.usage.completion_tokens.saturating_sub(1));
        self.steps += u64::from(answer.stats.steps);
        if let Err(difference) = ids.and(rounds)
            && self.first_difference.is_none()
        {
            self.first_difference = Some(format!("prompt {index}: {difference}"));
        }
    }
}

fn compare_ids(prompt: &ReferencePrompt, expected: &[u32], answer: &Answer) -> Result<(), String> {
    if answer.usage.prompt_tokens != prompt.prompt_tokens {
        return Err(format!(
            "the prompt has {} tokens, the reference {}: tokenizer or chat template differ",
            answer.usage.prompt_tokens, prompt.prompt_tokens
        ));
    }
    let Some((position, got, wanted)) = first_difference(&answer.token_ids, expected) else {
        return Ok(());
    };
    let step = rounds_for(&answer.stats.rounds, position + 1);
    Err(format!(
        "token {position} (step {step}) is {got}, expected {wanted}; smallest top-1/top-2 gap of the reference {:.1e}",
        prompt.min_top1_top2_gap
    ))
}

fn compare_rounds(expected: &[u32], got: &[u32]) -> Result<(), String> {
    first_difference(got, expected).map_or(Ok(()), |(step, got, wanted)| {
        Err(format!(
            "step {} accepted {got}, expected {wanted}",
            step + 1
        ))
    })
}

/// Index and both values of the first difference; a missing value is `nothing`.
fn first_difference(got: &[u32], expected: &[u32]) -> Option<(usize, String, String)> {
    let shown = |values: &[u32], index: usize| {
        values
            .get(index)
            .map_or_else(|| "nothing".to_owned(), u32::to_string)
    };
    (0..got.len().max(expected.len()))
        .find(|&index| got.get(index) != expected.get(index))
        .map(|index| (index, shown(got, index), shown(expected, index)))
}

/// Runs the comparison and prints one line per mode. True when nothing differs.
///
/// # Errors
/// A bad reference file, a cluster that fails, or a status of the service.
pub(crate) async fn run(args: ParityArgs) -> Result<bool> {
    let mut prompts = read(&args.reference)?.prompts;
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
    let progress = progress_bar((prompts.len() * args.modes.len()) as u64);
    let mut outcomes: Vec<ModeOutcome> =
        args.modes.iter().map(|_| ModeOutcome::default()).collect();
    for (index, prompt) in prompts.iter().enumerate() {
        let max_tokens = prompt.max_tokens(args.max_tokens);
        for (&mode, outcome) in args.modes.iter().zip(&mut outcomes) {
            progress.set_message(format!("prompt {index} {mode}"));
            let request = greedy_request(&prompt.prompt, max_tokens, mode);
            let answer = client.generate(request, |_| Ok(())).await?;
            outcome.add(index, prompt, mode, max_tokens, &answer);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(outcomes)
}

fn read(path: &Path) -> Result<Reference> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not a reference file", path.display()))
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

fn progress_bar(total: u64) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{wide_bar:.cyan/dim} {pos} of {len}, {eta} left, {msg:20}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}

#[cfg(test)]
mod tests {
    use treespec_rpc::proto::verify::v1::{SpeculationStats, Usage};

    use super::*;

    fn prompt() -> ReferencePrompt {
        ReferencePrompt {
            prompt: "p".into(),
            prompt_tokens: 4,
            token_ids: vec![10, 11, 12, 13, 14, 2],
            min_top1_top2_gap: 0.01,
            rounds: HashMap::from([("8".to_owned(), vec![1, 2, 3])]),
        }
    }

    fn answer(token_ids: &[u32], rounds: &[u32]) -> Answer {
        Answer {
            token_ids: token_ids.to_vec(),
            usage: Usage {
                prompt_tokens: 4,
                completion_tokens: token_ids.len() as u32,
                cached_tokens: 0,
            },
            stats: SpeculationStats {
                steps: rounds.len() as u32,
                rounds: rounds.to_vec(),
                ..Default::default()
            },
            ..Default::default()
        }
    }

    #[test]
    fn rounds_are_cut_where_the_tokens_end() {
        // 1 token from prefill, then 2, 3 and 4 tokens.
        assert_eq!(
            [1, 2, 3, 4, 6, 7, 10, 11].map(|tokens| rounds_for(&[1, 2, 3], tokens)),
            [0, 1, 1, 2, 2, 3, 3, 3]
        );
        assert_eq!(
            prompt().expected_rounds(Mode::Tree(Some(8)), 4),
            Some(&[1, 2][..])
        );
        assert_eq!(prompt().expected_rounds(Mode::Ar, 4), None);
        assert_eq!(prompt().expected_rounds(Mode::Tree(Some(9)), 4), None);
    }

    #[test]
    fn the_limit_never_leaves_the_reference() {
        assert_eq!(prompt().max_tokens(None), 508);
        assert_eq!(prompt().max_tokens(Some(3)), 3);
        assert_eq!(prompt().expected_ids(3), [10, 11, 12]);
        assert_eq!(prompt().expected_ids(508).len(), 6);
    }

    #[test]
    fn equal_answers_count_and_the_first_difference_is_told() {
        let mode = Mode::Tree(Some(8));
        let mut outcome = ModeOutcome::default();
        outcome.add(
            0,
            &prompt(),
            mode,
            508,
            &answer(&[10, 11, 12, 13, 14, 2], &[1, 2]),
        );
        assert!(outcome.is_equal());
        assert_eq!((outcome.equal_ids, outcome.equal_rounds), (1, 1));

        outcome.add(
            1,
            &prompt(),
            mode,
            508,
            &answer(&[10, 11, 12, 99, 14, 2], &[1, 2]),
        );
        outcome.add(
            2,
            &prompt(),
            mode,
            508,
            &answer(&[10, 11, 12, 13, 14], &[1, 1, 0]),
        );
        assert_eq!(
            (outcome.prompts, outcome.equal_ids, outcome.equal_rounds),
            (3, 1, 2)
        );
        let told = outcome.first_difference.unwrap();
        assert!(
            told.starts_with("prompt 1: token 3 (step 2) is 99, expected 13"),
            "{told}"
        );
    }

    #[test]
    fn missing_values_and_other_prompts_are_differences() {
        assert_eq!(
            compare_rounds(&[1, 2], &[1]),
            Err("step 2 accepted nothing, expected 2".to_owned())
        );
        let mut other = answer(&[10], &[]);
        other.usage.prompt_tokens = 5;
        let told = compare_ids(&prompt(), &[10], &other).unwrap_err();
        assert!(told.contains("chat template"), "{told}");
    }
}
