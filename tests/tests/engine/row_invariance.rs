//! A row's result is a function of its own path by bits, whatever runs with it.

use treespec_checkpoint::TargetCheckpoint;
use treespec_engine::{
    Backend, BlockTable, CpuOptions, HeadRow, Isa, Precision, RowBatch, RowShape, SequenceRows,
};
use treespec_testkit::{default_target, is_there};
use treespec_tests::{
    DENSE_CASES, DefaultModelsReference, Expected, case_json, fixture, read_json,
};
use treespec_tree::TokenTree;

use crate::harness::{TOP5, Target, bits};

/// A row as plain decode, in chunks of every size, as a tree node, in a ragged batch, and after commit.
#[test]
fn a_row_has_the_same_bits_however_it_is_run() {
    for case in DENSE_CASES {
        let expected: Expected = case_json(case, "expected.json");
        let prompt = &expected.prompts[5];
        let tokens: Vec<u32> = prompt
            .prompt
            .iter()
            .chain(&prompt.greedy)
            .copied()
            .cycle()
            .take(300)
            .collect();
        check(&mut Target::load(case, None), &tokens, case);
    }
}

/// The same with integer products, on the default target: every instruction set that this processor has.
#[test]
fn a_row_in_integers_has_the_same_bits_however_it_is_run() {
    let target = default_target();
    if !is_there(&target) {
        return;
    }
    let checkpoint = TargetCheckpoint::open(&target).unwrap();
    let reference: DefaultModelsReference = read_json(&fixture("eval32_f32.json"));
    let tokens = reference.prompts[0].tokens(ROWS_IN_INTEGERS);
    for isa in Isa::available() {
        // The portable form is slow, and differs from the others in single roundings only.
        let tokens = match isa {
            Isa::Portable => &tokens[..20],
            _ => tokens,
        };
        let cpu = CpuOptions {
            threads: 2,
            isa: Some(isa),
            precision: Some(Precision::Quantised),
        };
        check(
            &mut Target::open(&checkpoint, None, cpu),
            tokens,
            isa.name(),
        );
    }
}

const ROWS_IN_INTEGERS: usize = 70;

fn check(target: &mut Target, tokens: &[u32], what: &str) {
    let table = target.table(600);
    let mut one_by_one = Vec::new();
    for (position, token) in tokens.iter().enumerate() {
        let rows = target.rows(&table, position, &[*token], RowShape::Chain);
        one_by_one.extend(rows.head);
    }
    let expected = bits(&one_by_one);
    for chunk in [2, 5, 17, 65, 300] {
        let table = target.table(300);
        let mut rows = Vec::new();
        for (i, tokens) in tokens.chunks(chunk).enumerate() {
            rows.extend(target.rows(&table, i * chunk, tokens, RowShape::Chain).head);
        }
        assert_eq!(bits(&rows), expected, "{what} in chunks of {chunk}");
    }
    tree_rows_have_the_same_bits(target, tokens, &expected, what);
}

fn tree_rows_have_the_same_bits(
    target: &mut Target,
    tokens: &[u32],
    expected: &[(u32, Vec<(u32, u32)>)],
    case: &str,
) {
    // The true continuation is one path of a tree; wrong siblings hang off every node of it.
    let committed = tokens.len() * 2 / 5;
    let mut tree = TokenTree::root_only(tokens[committed]);
    let mut spine = vec![0];
    let depths = 20.min(tokens.len() / 4);
    for depth in 1..depths {
        let parent = spine[depth - 1];
        for wrong in 1..4 {
            let token = (tokens[committed + depth] + wrong) % 500;
            tree.push(parent, token, 0.0).unwrap();
        }
        spine.push(tree.push(parent, tokens[committed + depth], 0.0).unwrap());
    }
    let table = target.table(committed + tree.len() + 40);
    target.rows(&table, 0, &tokens[..committed], RowShape::Chain);
    let rows = target.tree(&table, committed, &tree);
    let path: Vec<HeadRow> = spine.iter().map(|&node| rows[node].clone()).collect();
    assert_eq!(
        bits(&path),
        expected[committed..committed + spine.len()],
        "{case} as tree nodes"
    );
    target.backend.compact(&table, committed, &spine).unwrap();
    let next = committed + spine.len();
    let rows = target.rows(&table, next, &tokens[next..next + 5], RowShape::Chain);
    assert_eq!(
        bits(&rows.head),
        expected[next..next + 5],
        "{case} after a commit"
    );
}

#[test]
fn sequences_of_a_ragged_batch_do_not_see_each_other() {
    let case = DENSE_CASES[0];
    let expected: Expected = case_json(case, "expected.json");
    let mut target = Target::load(case, None);
    let prompts: Vec<&[u32]> = expected.prompts.iter().map(|p| &p.prompt[..]).collect();
    let tables: Vec<BlockTable> = prompts.iter().map(|p| target.table(p.len())).collect();
    let heads: Vec<Vec<_>> = prompts.iter().map(|p| vec![Some(TOP5); p.len()]).collect();
    let sequences = prompts
        .iter()
        .zip(&tables)
        .zip(&heads)
        .map(|((tokens, table), head)| SequenceRows {
            table,
            committed: 0,
            tokens,
            shape: RowShape::Chain,
            head,
            sampling: None,
            features: false,
        })
        .collect();
    let together = target.backend.forward(&RowBatch { sequences }).unwrap();
    for (prompt, output) in prompts.iter().zip(&together) {
        let table = target.table(prompt.len());
        let alone = target.rows(&table, 0, prompt, RowShape::Chain);
        assert_eq!(bits(&alone.head), bits(&output.head));
    }
}
