//! `treespec bench precision`: how far the CPU's integer arithmetic is from f32.

use std::{fmt, path::PathBuf, str::FromStr};

use anyhow::{Result, ensure};
use serde::Serialize;
use treespec_checkpoint::TargetCheckpoint;
use treespec_engine::{DeviceChoice, Isa, Precision, ScoredToken};

use super::{
    questions::Questions,
    report::{Report, Table},
    statistics::ratio,
};
use crate::{
    local_target::{LocalTarget, open_target},
    models::ModelArgs,
    stdout,
};

/// Flags of `treespec bench precision`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PrecisionArgs {
    /// Texts to score: prompts with their answers
    #[arg(
        long,
        value_name = "FILE",
        default_value = "tests/fixtures/eval32_f32.json"
    )]
    pub reference: PathBuf,
    /// What to compare with f32: a precision, or PRECISION:ISA for an instruction set that is not the best
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "VARIANTS",
        default_value = "quantised"
    )]
    pub variants: Vec<Variant>,
    /// Use the first N texts only
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub models: ModelArgs,
}

/// A precision, and an instruction set where not the best one is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Variant {
    precision: Precision,
    isa: Option<Isa>,
}

impl FromStr for Variant {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (precision, isa) = match text.split_once(':') {
            Some((precision, isa)) => (precision, Some(isa.parse()?)),
            None => (text, None),
        };
        Ok(Self {
            precision: precision.parse()?,
            isa,
        })
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.isa {
            Some(isa) => write!(formatter, "{}:{isa}", self.precision),
            None => write!(formatter, "{}", self.precision),
        }
    }
}

#[derive(Debug, Serialize)]
struct PrecisionConfig {
    model: String,
    texts: usize,
    /// Answer tokens that were scored.
    tokens: usize,
    f32_perplexity: f64,
}

/// A variant against f32.
#[derive(Debug, Serialize)]
struct VariantResult {
    variant: String,
    numerics_profile: String,
    perplexity: f64,
    /// Share of the tokens after which the best next token is the one of f32.
    same_best: f64,
    /// Of the log-probability of the text's next token, in nats.
    mean_difference: f64,
    largest_difference: f64,
}

/// Runs the comparison, prints the table and writes the JSON report.
///
/// # Errors
/// A GPU, models or texts that can't be loaded, or a report that can't be written.
pub(crate) fn run(args: &PrecisionArgs) -> Result<()> {
    ensure!(
        matches!(args.models.device, None | Some(DeviceChoice::Cpu)),
        "bench precision compares the CPU's arithmetics: leave out --device"
    );
    ensure!(
        args.models.cpu_precision.is_none() && args.models.drafter.is_none(),
        "bench precision runs the target in each of --variants: leave out --cpu-precision and --drafter"
    );
    let path = args.models.target()?;
    let checkpoint = open_target(&path)?;
    let texts = Texts::load(args, &path)?;
    let reference = Variant {
        precision: Precision::F32,
        isa: None,
    };
    let (expected, _) = texts.score(args, &checkpoint, reference)?;
    let results = args
        .variants
        .iter()
        .map(|&variant| {
            let (got, numerics_profile) = texts.score(args, &checkpoint, variant)?;
            Ok(VariantResult {
                variant: variant.to_string(),
                numerics_profile,
                ..compare(&expected, &got)
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let f32_perplexity = perplexity(&expected);
    stdout::print(&table(f32_perplexity, &results).render())?;
    if let Some(path) = &args.json {
        let config = PrecisionConfig {
            model: checkpoint.label(),
            texts: texts.0.len(),
            tokens: expected.len(),
            f32_perplexity,
        };
        Report::new("bench precision", config, results).write(path)?;
    }
    Ok(())
}

/// Token ids, and where the answers begin.
struct Texts(Vec<(Vec<u32>, usize)>);

impl Texts {
    fn load(args: &PrecisionArgs, target: &std::path::Path) -> Result<Self> {
        let asked = Questions::load(Some(&args.reference), None, args.limit, None, target)?;
        let answers = asked.reference.into_iter().flatten();
        let texts = asked.questions.into_iter().zip(answers);
        let text = texts.map(|(question, answer)| {
            let start = question.tokens.len();
            ([&question.tokens[..], answer.token_ids()].concat(), start)
        });
        Ok(Self(text.collect()))
    }

    /// The answers' tokens by the target in `variant`, and its numerics profile.
    fn score(
        &self,
        args: &PrecisionArgs,
        checkpoint: &TargetCheckpoint,
        variant: Variant,
    ) -> Result<(Vec<ScoredToken>, String)> {
        let models = ModelArgs {
            cpu_precision: Some(variant.precision),
            cpu_isa: variant.isa.or(args.models.cpu_isa),
            ..args.models.clone()
        };
        let rows = self.0.iter().map(|(tokens, _)| tokens.len()).max();
        let mut target = LocalTarget::load(checkpoint, None, &models, rows.unwrap_or(1))?;
        let mut scored = Vec::new();
        for (tokens, start) in &self.0 {
            scored.extend(target.score_text(tokens, *start)?);
        }
        Ok((scored, target.numerics_profile().to_owned()))
    }
}

fn perplexity(scored: &[ScoredToken]) -> f64 {
    let sum: f64 = scored.iter().map(|one| f64::from(one.score)).sum();
    (-ratio(sum, scored.len() as f64)).exp()
}

fn compare(expected: &[ScoredToken], got: &[ScoredToken]) -> VariantResult {
    let pairs = || expected.iter().zip(got);
    let count = expected.len() as f64;
    let differences = || pairs().map(|(a, b)| f64::from((a.score - b.score).abs()));
    let same = pairs().filter(|(a, b)| a.token == b.token).count();
    VariantResult {
        variant: String::new(),
        numerics_profile: String::new(),
        perplexity: perplexity(got),
        same_best: ratio(same as f64, count),
        mean_difference: ratio(differences().sum(), count),
        largest_difference: differences().fold(0.0, f64::max),
    }
}

fn table(f32_perplexity: f64, results: &[VariantResult]) -> Table {
    let mut table = Table::new([
        "variant",
        "numerics",
        "perplexity",
        "of f32",
        "same best",
        "mean nats",
        "max nats",
    ]);
    table.row([
        "f32".to_owned(),
        String::new(),
        format!("{f32_perplexity:.5}"),
        "1.0000".to_owned(),
        String::new(),
        String::new(),
        String::new(),
    ]);
    for result in results {
        table.row([
            result.variant.clone(),
            result.numerics_profile.clone(),
            format!("{:.5}", result.perplexity),
            format!("{:.4}", ratio(result.perplexity, f32_perplexity)),
            format!("{:.2} %", result.same_best * 100.0),
            format!("{:.4}", result.mean_difference),
            format!("{:.3}", result.largest_difference),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_name_a_precision_and_maybe_an_instruction_set() {
        let variant: Variant = "quantised:avx2".parse().unwrap();
        assert_eq!(variant.isa, Some(Isa::Avx2));
        assert_eq!(variant.to_string(), "quantised:avx2");
        assert_eq!("f32".parse::<Variant>().unwrap().to_string(), "f32");
        for text in ["", "f16", "quantised:", "quantised:sse"] {
            let error = text.parse::<Variant>().unwrap_err().to_string();
            assert!(error.contains("unknown"), "{error}");
        }
    }

    #[test]
    fn choices_and_log_probabilities_are_compared() {
        let scored = |token, score| ScoredToken { token, score };
        let expected = [scored(1, -1.0), scored(2, -3.0)];
        let result = compare(&expected, &[scored(1, -1.5), scored(9, -2.5)]);
        assert!((perplexity(&expected) - 2.0_f64.exp()).abs() < 1e-9);
        assert!((result.perplexity - 2.0_f64.exp()).abs() < 1e-9);
        assert_eq!(result.same_best, 0.5);
        assert_eq!(
            (result.mean_difference, result.largest_difference),
            (0.5, 0.5)
        );
    }
}
