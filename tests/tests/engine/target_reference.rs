//! The target's distributions against the f32 reference.

use treespec_engine::RowShape;
use treespec_tests::{DENSE_CASES, Expected, TreeForward, case_json};
use treespec_tree::TokenTree;

use crate::harness::{Target, log_probs};

#[test]
fn every_node_of_a_tree_has_the_distribution_of_its_path() {
    for case in DENSE_CASES {
        let expected: TreeForward = case_json(case, "tree_forward.json");
        let tree = TokenTree::from_parents(&expected.tokens, &expected.parents).unwrap();
        let mut target = Target::load(case, None);
        let table = target.table(expected.prompt.len() + tree.len());
        target.rows(&table, 0, &expected.prompt, RowShape::Chain);
        let rows = target.tree(&table, expected.prompt.len(), &tree);
        for (node, (row, expected)) in rows.iter().zip(&expected.nodes).enumerate() {
            expected.assert_close(&log_probs(row), &format!("{case} node {node}"));
        }
    }
}

#[test]
fn prefill_gives_the_reference_distributions() {
    for case in DENSE_CASES {
        let expected: Expected = case_json(case, "expected.json");
        let mut target = Target::load(case, None);
        for prompt in &expected.prompts {
            let tokens = [&prompt.prompt[..], &prompt.greedy[..]].concat();
            let table = target.table(tokens.len());
            let rows = target.rows(&table, 0, &tokens, RowShape::Chain).head;
            let first = prompt.prompt.len() - 1;
            for (j, top5) in prompt.top5.iter().enumerate() {
                let what = format!("{case}, prompt of {}, token {j}", prompt.prompt.len());
                top5.assert_close(&log_probs(&rows[first + j]), &what);
                assert_eq!(rows[first + j].top[0].token, prompt.greedy[j], "{what}");
            }
        }
    }
}
