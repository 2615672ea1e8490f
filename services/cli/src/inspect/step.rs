//! `treespec inspect step`: a generation, step by step.

use std::collections::HashMap;

use anyhow::{Context as _, Result};
use serde::Serialize;
use treespec_rpc::proto::verify::v1::{OutputOptions, StepTree};
use treespec_tree::TokenTree;

use super::outline;
use crate::{
    answer::Answer, client::Client, connection::ConnectionArgs, generate::GenerationArgs,
    prompt::PromptArgs, stderr, stdout,
};

/// Flags of `treespec inspect step`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct StepArgs {
    #[command(flatten)]
    pub prompt: PromptArgs,
    #[command(flatten)]
    pub generation: GenerationArgs,
    /// Print one JSON object per step instead of outlines
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

#[derive(Debug, Serialize)]
struct StepJson<'a> {
    tokens: &'a [u32],
    parents: &'a [i32],
    log_probs: &'a [f64],
    accepted_nodes: &'a [u32],
    bonus_token: u32,
}

/// Runs `treespec inspect step`.
///
/// # Errors
/// A bad prompt file, a cluster that fails, or a status of the service.
pub(crate) async fn run(args: StepArgs) -> Result<()> {
    let output = OutputOptions {
        include_trees: Some(true),
        ..Default::default()
    };
    let request = args.generation.request(&args.prompt, output)?;
    let (answer, texts) = args
        .connection
        .run(async |endpoint| {
            let mut client = Client::new(endpoint)?;
            let answer = client.generate(request, |_| Ok(())).await?;
            let texts = if args.json {
                HashMap::new()
            } else {
                token_texts(&mut client, &answer).await?
            };
            Ok((answer, texts))
        })
        .await?;
    if args.json {
        return answer
            .trees
            .iter()
            .try_for_each(|tree| stdout::print_json(&StepJson::from(tree)));
    }
    if answer.trees.is_empty() {
        let mode = args.generation.mode;
        stderr::print_line(&format!("no trees: nothing was drafted in mode {mode}"));
    }
    let mut position = answer.usage.prompt_tokens;
    for (index, step) in answer.trees.iter().enumerate() {
        stdout::print(&render_step(index + 1, position, step, &texts)?)?;
        position += step.accepted_nodes.len() as u32 + 1;
    }
    Ok(())
}

/// Every token of the trees as quoted text, so that blanks and line breaks show.
async fn token_texts(client: &mut Client, answer: &Answer) -> Result<HashMap<u32, String>> {
    let mut texts = HashMap::new();
    for tree in &answer.trees {
        for &id in tree.token_ids.iter().chain([&tree.bonus_token_id]) {
            if let std::collections::hash_map::Entry::Vacant(entry) = texts.entry(id) {
                entry.insert(format!("{:?}", client.detokenize(vec![id]).await?));
            }
        }
    }
    Ok(texts)
}

/// The tree of the step whose root is at `position`, under a line that sums it up.
fn render_step(
    number: usize,
    position: u32,
    step: &StepTree,
    texts: &HashMap<u32, String>,
) -> Result<String> {
    let tree = to_tree(step)
        .with_context(|| format!("step {number}: the service sent a tree that is none"))?;
    let accepted: Vec<usize> = step
        .accepted_nodes
        .iter()
        .map(|&node| node as usize)
        .collect();
    let text = |id: u32| texts.get(&id).cloned().unwrap_or_else(|| id.to_string());
    Ok(format!(
        "step {number} · root at position {position} · {} nodes, {} accepted, then {}\n{}\n",
        tree.budget(),
        accepted.len(),
        text(step.bonus_token_id),
        outline::render(&tree, text, &accepted)
    ))
}

fn to_tree(step: &StepTree) -> Result<TokenTree> {
    let (&root, below) = step.token_ids.split_first().context("it has no root")?;
    let mut tree = TokenTree::root_only(root);
    for (index, &token) in below.iter().enumerate() {
        let node = index + 1;
        let parent = step
            .parents
            .get(node)
            .and_then(|&parent| usize::try_from(parent).ok());
        let log_prob = step.log_probs.get(node);
        let (parent, &log_prob) = parent
            .zip(log_prob)
            .with_context(|| format!("node {node} has no parent or log-probability"))?;
        tree.push(parent, token, log_prob)?;
    }
    Ok(tree)
}

impl<'a> From<&'a StepTree> for StepJson<'a> {
    fn from(tree: &'a StepTree) -> Self {
        Self {
            tokens: &tree.token_ids,
            parents: &tree.parents,
            log_probs: &tree.log_probs,
            accepted_nodes: &tree.accepted_nodes,
            bonus_token: tree.bonus_token_id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> StepTree {
        StepTree {
            token_ids: vec![7, 8, 9],
            parents: vec![-1, 0, 0],
            log_probs: vec![0.0, -0.25, -1.5],
            accepted_nodes: vec![2],
            bonus_token_id: 4,
        }
    }

    #[test]
    fn a_step_shows_texts_and_the_accepted_path() {
        let texts = HashMap::from([(7, "\"The\"".to_owned()), (9, "\"\\n\"".to_owned())]);
        let text = render_step(2, 40, &step(), &texts).unwrap();
        assert_eq!(
            text,
            "step 2 · root at position 40 · 2 nodes, 1 accepted, then 4\n\
             \"The\"\n├─ 8  -0.250\n└─ \"\\n\"  -1.500  ✓\n\n"
        );
    }

    #[test]
    fn broken_trees_are_errors() {
        let mut broken = step();
        broken.parents[1] = 5;
        assert!(render_step(1, 0, &broken, &HashMap::new()).is_err());
        broken.parents.truncate(1);
        assert!(render_step(1, 0, &broken, &HashMap::new()).is_err());
        assert!(render_step(1, 0, &StepTree::default(), &HashMap::new()).is_err());
    }
}
