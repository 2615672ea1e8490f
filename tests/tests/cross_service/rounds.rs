//! The reference's rounds and trees, round by round.

use treespec_rpc::proto::verify::v1::StepTree;
use treespec_testkit::{Answer, Ask, Client, Mode};
use treespec_tests::{DENSE_CASES, DraftTree, DrafterExpected, Round, TOLERANCE, case_json};

use crate::models::Placement;

const FILES: [&str; 3] = [
    "drafter_expected.json",
    "drafter_fit_expected.json",
    "drafter_fit_expected_2.json",
];

#[tokio::test]
async fn rounds_and_trees_are_those_of_the_reference_with_the_top_k_pass_at_the_drafter() {
    every_file(Placement::Draft).await;
}

#[tokio::test]
async fn rounds_and_trees_are_those_of_the_reference_with_the_top_k_pass_at_the_verifier() {
    every_file(Placement::DraftWithoutTopk).await;
}

#[tokio::test]
async fn rounds_and_trees_are_those_of_the_reference_with_the_drafter_in_the_verifier() {
    every_file(Placement::Local).await;
}

async fn every_file(placement: Placement) {
    for case in DENSE_CASES {
        for file in FILES {
            let expected: DrafterExpected = case_json(case, file);
            let drafter = expected.meta.drafter.trim_end_matches('/');
            let cluster = placement.cluster(case, drafter).start().await;
            for run in expected.runs.keys() {
                let what = format!("{case} {file} {placement:?} {run}");
                check_run(&cluster.client(), &expected, run, &what).await;
            }
        }
    }
}

async fn check_run(client: &Client, expected: &DrafterExpected, run: &str, what: &str) {
    let mode = match run.strip_prefix("ddtree_") {
        Some(budget) => Mode::Tree(budget.parse().unwrap()),
        None => Mode::Chain,
    };
    let rounds = &expected.runs[run].rounds;
    // The reference goes on until 48 tokens are committed, not just decided: one token more.
    let tokens = 49;
    let ask = Ask::tokens(&expected.prompt)
        .mode(mode)
        .max_tokens(tokens)
        .trees();
    let answer = client.generate(ask).await.unwrap();
    assert_eq!(
        answer.token_ids,
        expected.greedy_continuation[..tokens],
        "{what}"
    );
    let starts = starts(&answer, expected.prompt.len());
    assert_eq!(&starts, rounds, "{what}");
    assert_eq!(answer.trees.len(), rounds.len(), "{what}");

    let mut compared = 0;
    for position in &expected.positions {
        let Some(step) = rounds
            .iter()
            .position(|round| round.start == position.start)
        else {
            continue;
        };
        let tree = &answer.trees[step];
        let what = format!("{what}, start {}", position.start);
        assert_eq!(tree.token_ids[0], position.root_token, "{what}");
        match mode {
            Mode::Tree(budget) => check_tree(tree, &position.trees[&budget.to_string()], &what),
            _ => check_chain(tree, &position.chain_tokens, &what),
        }
        compared += 1;
    }
    assert!(compared >= 3, "{what}: {compared} trees compared");
}

/// Where each round started and what it accepted.
fn starts(answer: &Answer, prompt: usize) -> Vec<Round> {
    let mut start = prompt;
    answer
        .rounds
        .iter()
        .map(|&accepted| {
            let round = Round { start, accepted };
            start += accepted as usize + 1;
            round
        })
        .collect()
}

fn check_tree(tree: &StepTree, expected: &DraftTree, what: &str) {
    assert_eq!(tree.token_ids, expected.tokens, "{what}");
    assert_eq!(tree.parents, expected.parents, "{what}");
    for (got, expected) in tree.log_probs.iter().zip(&expected.cum_logprobs) {
        assert!((got - expected).abs() <= f64::from(TOLERANCE), "{what}");
    }
    let accepted: Vec<usize> = tree.accepted_nodes.iter().map(|&n| n as usize).collect();
    assert_eq!(accepted, expected.accepted_nodes, "{what}");
    assert_eq!(tree.bonus_token_id, expected.next_token, "{what}");
}

fn check_chain(tree: &StepTree, expected: &[u32], what: &str) {
    assert_eq!(tree.token_ids[1..], *expected, "{what}");
    let parents: Vec<i32> = (-1..expected.len() as i32).collect();
    assert_eq!(tree.parents, parents, "{what}");
}
