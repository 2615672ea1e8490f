//! `treespec generate`: one answer, streamed to stdout, its statistics on stderr; or one JSON object.

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use treespec_rpc::proto::{coordinator::v1::GenerateRequest, verify::v1 as proto};

use crate::{
    answer::Answer,
    client::{Client, Update},
    connection::ConnectionArgs,
    mode::Mode,
    prompt::PromptArgs,
    sampling::{EndingArgs, SamplingArgs},
    stderr, stdout, summary,
};

/// Flags of `treespec generate`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub prompt: PromptArgs,
    #[command(flatten)]
    pub generation: GenerationArgs,
    /// Log-probability of every generated token with the K most probable alternatives (0..20), in the JSON object
    #[arg(long, value_name = "K", requires = "json")]
    pub logprobs: Option<u32>,
    /// Log-probability of every prompt token given the tokens before it, in the JSON object
    #[arg(long, requires = "json")]
    pub prompt_logprobs: bool,
    /// Log-probabilities of the distribution that tokens are drawn from, not of the model's own
    #[arg(long, requires = "logprobs")]
    pub processed_logprobs: bool,
    /// So many answers, each with a seed of its own
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub answers: u32,
    /// Print one JSON object instead of streaming text, with several answers a list of them
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// How to generate, shared by the commands that generate.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GenerationArgs {
    /// Which drafts are verified: auto, ar, chain, tree, tree:N; the text does not depend on it
    #[arg(long, default_value_t = Mode::Auto, value_name = "MODE")]
    pub mode: Mode,
    /// Tree nodes below the root (1..255) [default: the service's]
    #[arg(long, value_name = "N")]
    pub budget: Option<u32>,
    /// Generate at most this many tokens
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub max_tokens: u32,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub ending: EndingArgs,
    /// Name of the request in logs and traces [default: the service mints one]
    #[arg(long, value_name = "ID", default_value = "", hide_default_value = true)]
    pub request_id: String,
}

impl GenerationArgs {
    /// A request with these settings for `prompt`.
    ///
    /// # Errors
    /// When the prompt can't be read.
    pub(crate) fn request(
        &self,
        prompt: &PromptArgs,
        output: proto::OutputOptions,
    ) -> Result<GenerateRequest> {
        if let (Mode::Tree(Some(own)), Some(budget)) = (self.mode, self.budget) {
            bail!("--mode tree:{own} and --budget {budget} both name a budget: give one of them");
        }
        let mut speculation = self.mode.speculation(self.budget);
        speculation.ranking = Some(proto::DraftRanking::from(self.sampling.ranking).into());
        let mut request = GenerateRequest {
            request_id: self.request_id.clone(),
            prompt: Some(prompt.to_prompt()?),
            max_tokens: Some(self.max_tokens),
            sampling: Some(self.sampling.to_proto()),
            speculation: Some(speculation),
            output: Some(output),
            ..GenerateRequest::default()
        };
        self.ending.apply(&mut request)?;
        Ok(request)
    }
}

/// Runs `treespec generate`.
///
/// # Errors
/// A bad prompt file, the own cluster's failure, the service's status, or a closed stdout.
pub(crate) async fn run(args: GenerateArgs) -> Result<()> {
    let output = proto::OutputOptions {
        top_logprobs: args.logprobs,
        prompt_logprobs: Some(args.prompt_logprobs),
        include_trees: None,
        logprob_kind: args
            .processed_logprobs
            .then_some(proto::LogprobKind::Processed.into()),
    };
    let mut request = args.generation.request(&args.prompt, output)?;
    request.choices = Some(args.answers);
    let answers = args
        .connection
        .run(async |endpoint| {
            let mut client = Client::new(endpoint)?;
            stream_answers(&mut client, request, args.json).await
        })
        .await?;
    if args.json {
        let json = |answer: &Answer| {
            let value = answer.to_json(args.logprobs.is_some(), args.prompt_logprobs);
            serde_json::to_value(value)
        };
        return match &answers[..] {
            [answer] => stdout::print_json(&json(answer)?),
            answers => {
                stdout::print_json(&answers.iter().map(json).collect::<Result<Vec<_>, _>>()?)
            }
        };
    }
    let count = answers.len();
    for (number, answer) in (1..).zip(&answers) {
        if count > 1 {
            stderr::print(&format!("\n    answer {number} of {count}\n"));
        }
        // The first was printed as it came.
        if number > 1 {
            stdout::print(&answer.text)?;
            stdout::print("\n")?;
        }
        let summary = summary::render(answer, &mode_name(&args.generation, answer));
        stderr::print(&format!("\n{summary}"));
    }
    Ok(())
}

/// Generates, with prefill progress on stderr and, unless `quiet`, the first answer's text on stdout as it arrives.
async fn stream_answers(
    client: &mut Client,
    request: GenerateRequest,
    quiet: bool,
) -> Result<Vec<Answer>> {
    let prefill = prefill_bar();
    let mut printed = false;
    let answers = client
        .generate_all(request, |update| match update {
            Update::Prefill { done, total } => {
                prefill.set_length(total.into());
                prefill.set_position(done.into());
                Ok(())
            }
            Update::Text(text) => {
                if !prefill.is_finished() {
                    prefill.finish_and_clear();
                }
                if quiet {
                    return Ok(());
                }
                printed = true;
                stdout::print(text)
            }
        })
        .await;
    prefill.finish_and_clear();
    if printed {
        stdout::print("\n")?;
    }
    answers
}

/// A bar that is drawn when stderr is a terminal.
fn prefill_bar() -> ProgressBar {
    let style =
        ProgressStyle::with_template("    prefill {wide_bar:.cyan/dim} {pos} of {len} tokens")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::no_length().with_style(style)
}

/// How drafts were made and, where tokens were drawn, the seed that repeats it.
fn mode_name(args: &GenerationArgs, answer: &Answer) -> String {
    let mut name = args.mode.to_string();
    if let Some(budget) = args.budget {
        name += &format!(" budget {budget}");
    }
    if args.sampling.temperature > 0.0 {
        name += &format!(" · seed {}", answer.seed);
    }
    name
}
