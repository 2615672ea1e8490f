//! How tokens are chosen and what ends an answer, as the command line writes it.

use std::{fmt, fs, path::PathBuf, str::FromStr};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use treespec_rpc::proto::{
    coordinator::v1::GenerateRequest,
    verify::v1::{self as proto, constraint::Kind},
};

/// How the next token is chosen. What is left out takes the service's default.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// 0 is greedy decoding
    #[arg(
        long,
        default_value_t = 0.0,
        value_name = "T",
        allow_negative_numbers = true
    )]
    pub temperature: f32,
    /// Keep the most probable tokens that together have this share, in (0, 1]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Keep the K most probable tokens
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Drop tokens below this share of the best one's probability, in [0, 1)
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Same seed, same answer [default: drawn by the service and reported]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Make tokens of prompt and answer less likely, above 1
    #[arg(long, value_name = "X")]
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens of the answer, in [-2, 2]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtracted from them per occurrence, in [-2, 2]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Add to the logit of a token id; repeat it or separate by commas
    #[arg(
        long,
        value_name = "ID=X",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    pub logit_bias: Vec<Bias>,
    /// Only these token ids can be chosen; repeat it or separate ids by commas
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub allow_token: Vec<u32>,
    /// These token ids cannot be chosen; repeat it or separate ids by commas
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub ban_token: Vec<u32>,
    /// How drafts are ranked at a temperature above 0; the text does not depend on it
    #[arg(long, value_enum, default_value_t = Ranking::Fitted, value_name = "HOW")]
    pub ranking: Ranking,
}

/// What ends an answer, and what it must be.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Ending and form")]
pub(crate) struct EndingArgs {
    /// End before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Keep the text given to --stop in the answer
    #[arg(long)]
    pub include_stop: bool,
    /// End after this token id too; repeat it or separate ids by commas
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub stop_token: Vec<u32>,
    /// Go on after the model's end-of-sequence token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Nothing ends the answer before it has so many tokens
    #[arg(long, value_name = "N")]
    pub min_tokens: Option<u32>,
    /// The answer follows the JSON schema in this file, "-" for stdin
    #[arg(long, value_name = "FILE", group = "form")]
    pub json_schema: Option<PathBuf>,
    /// The whole answer matches this regular expression
    #[arg(long, value_name = "REGEX", group = "form")]
    pub regex: Option<String>,
    /// The answer is one of these texts; repeat it
    #[arg(long, value_name = "TEXT", group = "form")]
    pub choice: Vec<String>,
    /// The answer follows the Lark grammar in this file, "-" for stdin
    #[arg(long, value_name = "FILE", group = "form")]
    pub lark: Option<PathBuf>,
}

/// The drafter's part in the draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Ranking {
    /// By its probability alone
    Plain,
    /// With all of the noise that the target draws with
    Full,
    /// With as much of it as was fitted to the drafter
    Fitted,
}

/// A token id and what is added to its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bias {
    token: u32,
    value: f32,
}

impl FromStr for Bias {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text:?} is not a token id and a number, such as 17=-1.5");
        let (token, value) = text.split_once('=').ok_or_else(wrong)?;
        Ok(Self {
            token: token.trim().parse().map_err(|_| wrong())?,
            value: value.trim().parse().map_err(|_| wrong())?,
        })
    }
}

impl From<Ranking> for proto::DraftRanking {
    fn from(ranking: Ranking) -> Self {
        match ranking {
            Ranking::Plain => Self::Plain,
            Ranking::Full => Self::Full,
            Ranking::Fitted => Self::Fitted,
        }
    }
}

impl From<Ranking> for treespec_sampling::Ranking {
    fn from(ranking: Ranking) -> Self {
        match ranking {
            Ranking::Plain => Self::Plain,
            Ranking::Full => Self::Full,
            Ranking::Fitted => Self::Fitted,
        }
    }
}

impl fmt::Display for Ranking {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Plain => "plain",
            Self::Full => "full",
            Self::Fitted => "fitted",
        })
    }
}

impl SamplingArgs {
    /// The request's sampling parameters.
    pub(crate) fn to_proto(&self) -> proto::SamplingParams {
        proto::SamplingParams {
            temperature: Some(self.temperature),
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.iter().map(|b| (b.token, b.value)).collect(),
            allowed_token_ids: self.allow_token.clone(),
            banned_token_ids: self.ban_token.clone(),
        }
    }
}

impl EndingArgs {
    /// Puts them into a request.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(crate) fn apply(&self, request: &mut GenerateRequest) -> Result<()> {
        request.stop_strings.clone_from(&self.stop);
        request.include_stop = Some(self.include_stop);
        request.stop_token_ids.clone_from(&self.stop_token);
        request.ignore_eos = Some(self.ignore_eos);
        request.min_tokens = self.min_tokens;
        request.constraint = self
            .form()?
            .map(|kind| proto::Constraint { kind: Some(kind) });
        Ok(())
    }

    fn form(&self) -> Result<Option<Kind>> {
        Ok(if let Some(path) = &self.json_schema {
            Some(Kind::JsonSchema(read(path)?))
        } else if let Some(path) = &self.lark {
            Some(Kind::Lark(read(path)?))
        } else if let Some(regex) = &self.regex {
            Some(Kind::Regex(regex.clone()))
        } else if self.choice.is_empty() {
            None
        } else {
            let options = self.choice.clone();
            Some(Kind::Choices(proto::Choices { options }))
        })
    }
}

fn read(path: &PathBuf) -> Result<String> {
    match path.as_os_str() == "-" {
        true => std::io::read_to_string(std::io::stdin()),
        false => fs::read_to_string(path),
    }
    .with_context(|| format!("cannot read the file {} (\"-\" is stdin)", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_are_ids_with_numbers() {
        let parsed: Result<Bias, _> = "17=-1.5".parse();
        assert_eq!(
            parsed,
            Ok(Bias {
                token: 17,
                value: -1.5
            })
        );
        for bad in ["", "17", "x=1", "17=", "-1=2"] {
            assert!(bad.parse::<Bias>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let args = EndingArgs {
            json_schema: Some("absent.json".into()),
            ..EndingArgs::default()
        };
        let error = args.apply(&mut GenerateRequest::default()).unwrap_err();
        assert!(format!("{error:#}").contains("absent.json"));
    }
}
