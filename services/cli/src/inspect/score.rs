//! `treespec inspect score`: the target's distribution at every node of a tree, in one forward.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use treespec_tree::TokenTree;

use super::TopTokens;
use crate::{
    local_target::{LocalTarget, open_target},
    models::ModelArgs,
    prompt::TokenList,
    stdout,
    token_text::TokenTexts,
};

/// Flags of `treespec inspect score`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ScoreArgs {
    /// Committed tokens before the root, separated by commas
    #[arg(long, value_name = "IDS")]
    pub tokens: TokenList,
    /// JSON {"tokens": […], "parents": […]}: node 0 is the root with parent -1, parents before their children
    #[arg(long, value_name = "FILE")]
    pub tree: PathBuf,
    /// How many tokens to print at each node
    #[arg(long, default_value_t = 5, value_name = "K")]
    pub top: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub models: ModelArgs,
}

#[derive(Debug, Deserialize)]
struct TreeFile {
    tokens: Vec<u32>,
    parents: Vec<i32>,
}

#[derive(Debug, Serialize)]
struct ScoreJson {
    nodes: Vec<TopTokens>,
}

/// Runs `treespec inspect score`.
///
/// # Errors
/// A bad tree file, a target that can't be loaded, or a token that it does not know.
pub(crate) fn run(args: &ScoreArgs) -> Result<()> {
    let tree = read_tree(&args.tree)?;
    let path = args.models.target()?;
    let checkpoint = open_target(&path)?;
    let TokenList(tokens) = &args.tokens;
    let mut target = LocalTarget::load(&checkpoint, None, &args.models, tokens.len() + tree.len())?;
    if !tokens.is_empty() {
        target.prefill(tokens, false)?;
    }
    let nodes: Vec<TopTokens> = target
        .score_tree(&tree, args.top)?
        .iter()
        .map(TopTokens::of)
        .collect();
    if args.json {
        return stdout::print_json(&ScoreJson { nodes });
    }
    let texts = TokenTexts::open(&path);
    for (node, top) in nodes.iter().enumerate() {
        let token = tree.tokens()[node];
        stdout::print(&format!(
            "{node:>3} depth {:>2} {token} {}: {}\n",
            tree.depth(node),
            texts.quoted(token),
            top.line(|id| texts.quoted(id))
        ))?;
    }
    Ok(())
}

fn read_tree(path: &PathBuf) -> Result<TokenTree> {
    let name = path.display();
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    let file: TreeFile = serde_json::from_str(&text)
        .with_context(|| format!("{name} is not {{\"tokens\": […], \"parents\": […]}}"))?;
    TokenTree::from_parents(&file.tokens, &file.parents)
        .with_context(|| format!("{name} is not a tree"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_files_are_checked_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tree.json");
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            read_tree(&path).map_err(|error| format!("{error:#}"))
        };
        // Other fields are allowed: recorded trees carry more.
        let tree = read(r#"{"tokens": [1, 2], "parents": [-1, 0], "depths": [0, 1]}"#).unwrap();
        assert_eq!(tree.len(), 2);
        for bad in [
            "[]",
            r#"{"tokens": [1]}"#,
            r#"{"tokens": [1, 2], "parents": [-1]}"#,
            r#"{"tokens": [1, 2], "parents": [0, -1]}"#,
            r#"{"tokens": [], "parents": []}"#,
        ] {
            assert!(read(bad).unwrap_err().contains("tree.json"), "{bad}");
        }
    }
}
