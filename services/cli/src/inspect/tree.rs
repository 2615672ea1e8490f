//! `treespec inspect tree`: the tree builder alone.

use std::{fs, io, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use treespec_tree::{Candidate, DepthCandidates, MAX_BUDGET, TokenTree, best_first};

use super::outline;
use crate::stdout;

/// Flags of `treespec inspect tree`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TreeArgs {
    /// JSON {"root": ID, "budget": N, "depths": [[[ID, LOGPROB], …], …]}, best candidates first; "-" for stdin
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Nodes below the root, instead of the file's
    #[arg(long, value_name = "N")]
    pub budget: Option<usize>,
    /// Print JSON instead of an outline
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    root: u32,
    budget: Option<usize>,
    depths: Vec<Vec<(u32, f32)>>,
}

/// A tree as parallel lists in pop order.
#[derive(Debug, Serialize)]
struct TreeJson<'a> {
    tokens: &'a [u32],
    /// -1 for the root.
    parents: Vec<i64>,
    depths: &'a [u32],
    cum_logprobs: &'a [f64],
}

impl<'a> From<&'a TokenTree> for TreeJson<'a> {
    fn from(tree: &'a TokenTree) -> Self {
        Self {
            tokens: tree.tokens(),
            parents: (0..tree.len())
                .map(|node| tree.parent(node).map_or(-1, |parent| parent as i64))
                .collect(),
            depths: tree.depths(),
            cum_logprobs: tree.log_probs(),
        }
    }
}

/// Runs `treespec inspect tree`.
///
/// # Errors
/// A file that can't be read or is not of the described form, or a budget out of range.
pub(crate) fn run(args: &TreeArgs) -> Result<()> {
    let name = args.file.display();
    let text = if args.file.as_os_str() == "-" {
        io::read_to_string(io::stdin())
    } else {
        fs::read_to_string(&args.file)
    }
    .with_context(|| format!("cannot read {name}"))?;
    let input: Input = serde_json::from_str(&text)
        .with_context(|| format!("{name} is not the input of a tree"))?;
    let tree = build(input, args.budget)?;
    if args.json {
        stdout::print_json(&TreeJson::from(&tree))
    } else {
        stdout::print(&outline::render(&tree, |token| token.to_string(), &[]))
    }
}

fn build(input: Input, budget: Option<usize>) -> Result<TokenTree> {
    let budget = budget
        .or(input.budget)
        .context("no budget: give --budget N or \"budget\" in the file")?;
    ensure!(
        (1..=MAX_BUDGET).contains(&budget),
        "budget {budget} is not in 1..={MAX_BUDGET}"
    );
    for (depth, candidates) in input.depths.iter().enumerate() {
        ensure!(
            candidates.is_sorted_by(|one, next| one.1 >= next.1),
            "the candidates of depth {} are not sorted by log-probability",
            depth + 1
        );
    }
    let depths = input
        .depths
        .into_iter()
        .map(|depth| {
            depth
                .into_iter()
                .map(|(token, log_prob)| Candidate { token, log_prob })
                .collect()
        })
        .collect();
    Ok(best_first(input.root, &DepthCandidates(depths), budget))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(text: &str) -> Input {
        serde_json::from_str(text).unwrap()
    }

    const TWO_DEPTHS: &str =
        r#"{"root": 9, "budget": 3, "depths": [[[1, -0.1], [2, -2.5]], [[3, -0.2], [4, -1.7]]]}"#;

    #[test]
    fn nodes_come_in_pop_order() {
        let tree = build(input(TWO_DEPTHS), None).unwrap();
        let json = serde_json::to_value(TreeJson::from(&tree)).unwrap();
        assert_eq!(json["tokens"], serde_json::json!([9, 1, 3, 4]));
        assert_eq!(json["parents"], serde_json::json!([-1, 0, 1, 1]));
        assert_eq!(json["depths"], serde_json::json!([0, 1, 2, 2]));
    }

    #[test]
    fn the_flag_wins_and_bad_input_is_named() {
        assert_eq!(build(input(TWO_DEPTHS), Some(1)).unwrap().budget(), 1);
        for budget in [0, 256] {
            assert!(build(input(TWO_DEPTHS), Some(budget)).is_err());
        }
        let unsorted = r#"{"root": 9, "depths": [[[1, -2.0], [2, -1.0]]]}"#;
        let error = build(input(unsorted), Some(4)).unwrap_err().to_string();
        assert!(error.contains("depth 1"), "{error}");
        let error = build(input(r#"{"root": 9, "depths": []}"#), None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("--budget"), "{error}");
    }
}
