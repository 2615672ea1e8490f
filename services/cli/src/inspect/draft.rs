//! `treespec inspect draft`: what the drafter proposes for each slot of a block.

use anyhow::{Context as _, Result};
use serde::Serialize;
use treespec_engine::{BlockRequest, DrafterOptions};

use super::TopTokens;
use crate::{
    local_target::{LocalTarget, open_drafter, open_target},
    models::ModelArgs,
    prompt::TokenList,
    stdout,
    token_text::TokenTexts,
};

/// Flags of `treespec inspect draft`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DraftArgs {
    /// Committed tokens, separated by commas
    #[arg(long, value_name = "IDS")]
    pub tokens: TokenList,
    /// The decided token after them [default: the target's greedy choice]
    #[arg(long, value_name = "ID")]
    pub root: Option<u32>,
    /// How many tokens to print in each slot
    #[arg(long, default_value_t = 5, value_name = "K")]
    pub top: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub models: ModelArgs,
}

#[derive(Debug, Serialize)]
struct DraftJson {
    root: u32,
    slots: Vec<TopTokens>,
}

/// Runs `treespec inspect draft`.
///
/// # Errors
/// Models that can't be loaded or do not belong together, or a token that the target does not know.
pub(crate) fn run(args: &DraftArgs) -> Result<()> {
    let paths = args.models.resolve()?;
    let drafter_path = paths
        .drafter
        .context("there is no drafter to inspect: give --drafter PATH")?;
    let target_checkpoint = open_target(&paths.target)?;
    let drafter_checkpoint = open_drafter(&drafter_path, &target_checkpoint)?;
    let TokenList(tokens) = &args.tokens;

    let mut target = LocalTarget::load(
        &target_checkpoint,
        Some(&drafter_checkpoint),
        &args.models,
        tokens.len(),
    )?;
    let (last, features) = target.prefill(tokens, true)?;
    drop(target);
    let root = match args.root {
        Some(root) => root,
        None => last.top.first().context("the target chose no token")?.token,
    };

    let options = DrafterOptions {
        cpu: args.models.cpu()?,
        context_window: tokens.len(),
        max_contexts: 1,
        with_head: true,
    };
    let mut drafter = treespec_draft::load_drafter(
        args.models.device.unwrap_or_default(),
        &drafter_checkpoint,
        &target_checkpoint,
        &options,
        &mut |_| {},
    )?;
    let context = drafter.open()?;
    drafter.append_context(context, 0, &features)?;
    let hidden = drafter.block_hidden(&[BlockRequest {
        context,
        root_token: root,
    }])?;
    let top = args.top.min(drafter.spec().vocab_size);
    let slots: Vec<TopTokens> = drafter
        .head_topk(&hidden, top)?
        .iter()
        .map(TopTokens::of)
        .collect();

    if args.json {
        return stdout::print_json(&DraftJson { root, slots });
    }
    let texts = TokenTexts::open(&paths.target);
    stdout::print(&format!(
        "root {root} {} at position {}\n",
        texts.quoted(root),
        tokens.len()
    ))?;
    for (index, slot) in slots.iter().enumerate() {
        let line = slot.line(|id| texts.quoted(id));
        stdout::print(&format!("slot {:>2} {line}\n", index + 1))?;
    }
    Ok(())
}
