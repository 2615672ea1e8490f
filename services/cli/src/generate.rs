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
    stderr, stdout, summary,
};

/// Flags of `treespec generate`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub prompt: PromptArgs,
    #[command(flatten)]
    pub generation: GenerationArgs,
    /// Log-probability of every generated token with the K most probable alternatives (0..20)
    #[arg(long, value_name = "K")]
    pub logprobs: Option<u32>,
    /// Log-probability of every prompt token given the tokens before it
    #[arg(long)]
    pub prompt_logprobs: bool,
    /// Print one JSON object instead of streaming text
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
    /// 0 is greedy decoding
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    pub temperature: f32,
    /// End after this token id too; repeat it or separate ids by commas
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub stop_token: Vec<u32>,
    /// Go on after the model's end-of-sequence token
    #[arg(long)]
    pub ignore_eos: bool,
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
        Ok(GenerateRequest {
            request_id: self.request_id.clone(),
            prompt: Some(prompt.to_prompt()?),
            max_tokens: Some(self.max_tokens),
            stop_token_ids: self.stop_token.clone(),
            ignore_eos: Some(self.ignore_eos),
            sampling: Some(proto::SamplingParams {
                temperature: Some(self.temperature),
                ..Default::default()
            }),
            speculation: Some(self.mode.speculation(self.budget)),
            output: Some(output),
        })
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
    };
    let request = args.generation.request(&args.prompt, output)?;
    let answer = args
        .connection
        .run(async |endpoint| {
            let mut client = Client::new(endpoint)?;
            stream_answer(&mut client, request, args.json).await
        })
        .await?;
    if args.json {
        stdout::print_json(&answer.to_json(args.logprobs.is_some(), args.prompt_logprobs))
    } else {
        let summary = summary::render(&answer, &mode_name(&args.generation));
        stderr::print(&format!("\n{summary}"));
        Ok(())
    }
}

/// Generates, with prefill progress on stderr and, unless `quiet`, the text on stdout as it arrives.
async fn stream_answer(
    client: &mut Client,
    request: GenerateRequest,
    quiet: bool,
) -> Result<Answer> {
    let prefill = prefill_bar();
    let mut printed = false;
    let answer = client
        .generate(request, |update| match update {
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
    answer
}

/// A bar that is drawn when stderr is a terminal.
fn prefill_bar() -> ProgressBar {
    let style =
        ProgressStyle::with_template("    prefill {wide_bar:.cyan/dim} {pos} of {len} tokens")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::no_length().with_style(style)
}

fn mode_name(args: &GenerationArgs) -> String {
    match args.budget {
        Some(budget) => format!("{} budget {budget}", args.mode),
        None => args.mode.to_string(),
    }
}
