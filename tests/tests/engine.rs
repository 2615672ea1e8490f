//! The CPU engine against the f32 reference: forwards of trees, drafter slots, trees node by node, and row
//! invariance by bits.

use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_engine::{
    Backend, BlockPool, BlockRequest, BlockTable, CpuDrafter, CpuTarget, DraftShape, Drafter,
    DrafterOptions, ForwardOutput, HeadRequest, HeadRow, RowBatch, RowShape, SequenceRows,
    TargetOptions, build_draft,
};
use treespec_tests::{DENSE_CASES, DrafterExpected, Expected, TreeForward, case_json, case_path};
use treespec_tree::{TokenTree, walk};

const TOP5: HeadRequest = HeadRequest {
    top_k: 5,
    normaliser: true,
    gather: None,
};

struct Target {
    backend: CpuTarget,
    pool: BlockPool,
}

impl Target {
    fn load(case: &str, drafter: Option<&DrafterCheckpoint>) -> Self {
        let checkpoint = TargetCheckpoint::open(&case_path(case, "model")).unwrap();
        let options = TargetOptions {
            threads: 2,
            kv_tokens: 4_096,
            isa: None,
        };
        let backend = CpuTarget::load(&checkpoint, drafter, &options, &mut |_| {}).unwrap();
        let pool = BlockPool::new(backend.spec().num_blocks);
        Self { backend, pool }
    }

    fn table(&mut self, tokens: usize) -> BlockTable {
        let mut table = BlockTable::default();
        self.pool.grow(&mut table, tokens).unwrap();
        table
    }

    /// Rows of one sequence, head and features of all of them.
    fn rows(
        &mut self,
        table: &BlockTable,
        committed: usize,
        tokens: &[u32],
        shape: RowShape<'_>,
    ) -> ForwardOutput {
        let head = vec![Some(TOP5); tokens.len()];
        let features = self.backend.spec().feature_size.is_some();
        let sequences = vec![SequenceRows {
            table,
            committed,
            tokens,
            shape,
            head: &head,
            features,
        }];
        self.backend
            .forward(&RowBatch { sequences })
            .unwrap()
            .remove(0)
    }

    fn tree(&mut self, table: &BlockTable, committed: usize, tree: &TokenTree) -> Vec<HeadRow> {
        let ancestors = tree.ancestors();
        let shape = RowShape::tree(tree, &ancestors);
        self.rows(table, committed, tree.tokens(), shape).head
    }
}

fn log_probs(row: &HeadRow) -> Vec<(u32, f32)> {
    row.top
        .iter()
        .map(|s| (s.token, s.score - row.log_normaliser))
        .collect()
}

fn bits(rows: &[HeadRow]) -> Vec<(u32, Vec<(u32, u32)>)> {
    rows.iter()
        .map(|row| {
            let top = row.top.iter().map(|s| (s.token, s.score.to_bits()));
            (row.log_normaliser.to_bits(), top.collect())
        })
        .collect()
}

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
        let mut target = Target::load(case, None);
        let table = target.table(600);
        let mut one_by_one = Vec::new();
        for (position, token) in tokens.iter().enumerate() {
            one_by_one.extend(
                target
                    .rows(&table, position, &[*token], RowShape::Chain)
                    .head,
            );
        }
        let expected = bits(&one_by_one);
        for chunk in [2, 5, 17, 65, 300] {
            let table = target.table(300);
            let mut rows = Vec::new();
            for (i, tokens) in tokens.chunks(chunk).enumerate() {
                rows.extend(target.rows(&table, i * chunk, tokens, RowShape::Chain).head);
            }
            assert_eq!(bits(&rows), expected, "{case} in chunks of {chunk}");
        }
        tree_rows_have_the_same_bits(&mut target, &tokens, &expected, case);
    }
}

fn tree_rows_have_the_same_bits(
    target: &mut Target,
    tokens: &[u32],
    expected: &[(u32, Vec<(u32, u32)>)],
    case: &str,
) {
    // The true continuation is one path of a tree; wrong siblings hang off every node of it.
    let committed = 130;
    let mut tree = TokenTree::root_only(tokens[committed]);
    let mut spine = vec![0];
    for depth in 1..20 {
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
    let rows = target.rows(&table, next, &tokens[next..next + 10], RowShape::Chain);
    assert_eq!(
        bits(&rows.head),
        expected[next..next + 10],
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

#[test]
fn drafter_slots_trees_and_rounds_are_those_of_the_reference() {
    for case in DENSE_CASES {
        for file in [
            "drafter_expected.json",
            "drafter_fit_expected.json",
            "drafter_fit_expected_2.json",
        ] {
            let expected: DrafterExpected = case_json(case, file);
            check_drafter(case, file, &expected);
        }
    }
}

fn check_drafter(case: &str, file: &str, expected: &DrafterExpected) {
    let checkpoint = DrafterCheckpoint::open(&case_path(case, &expected.meta.drafter)).unwrap();
    let mut target = Target::load(case, Some(&checkpoint));
    let sequence = [&expected.prompt[..], &expected.greedy_continuation[..]].concat();
    let table = target.table(sequence.len());
    let output = target.rows(&table, 0, &sequence, RowShape::Chain);
    let width = target.backend.spec().feature_size.unwrap();
    let target_checkpoint = TargetCheckpoint::open(&case_path(case, "model")).unwrap();
    let options = DrafterOptions {
        threads: 2,
        ..DrafterOptions::default()
    };
    let mut drafter =
        CpuDrafter::load(&checkpoint, &target_checkpoint, &options, &mut |_| {}).unwrap();
    for position in &expected.positions {
        let what = format!("{case} {file} start {}", position.start);
        let context = drafter.open().unwrap();
        let features = &output.features[..position.start * width];
        drafter.append_context(context, 0, features).unwrap();
        let request = BlockRequest {
            context,
            root_token: position.root_token,
        };
        let hidden = drafter.block_hidden(&[request]).unwrap();
        let rows = drafter.head_topk(&hidden, 40).unwrap();
        for (slot, (row, expected)) in rows.iter().zip(&position.slots).enumerate() {
            expected.assert_close(&log_probs(row), &format!("{what} slot {slot}"));
        }
        let through_target = target.backend.head_topk(&hidden, 40).unwrap();
        assert_eq!(
            bits(&through_target),
            bits(&rows),
            "{what}: the target's head"
        );
        let chain = build_draft(position.root_token, &rows, DraftShape::Chain);
        assert_eq!(chain.tokens()[1..], position.chain_tokens, "{what} chain");
        for (budget, expected_tree) in &position.trees {
            let budget: usize = budget.parse().unwrap();
            let rows = drafter.head_topk(&hidden, budget).unwrap();
            let tree = build_draft(position.root_token, &rows, DraftShape::Tree { budget });
            assert_eq!(tree.tokens(), expected_tree.tokens, "{what} tree {budget}");
            let parents: Vec<i32> = (0..tree.len())
                .map(|n| tree.parent(n).map_or(-1, |p| p as i32))
                .collect();
            assert_eq!(parents, expected_tree.parents, "{what} tree {budget}");
            for (got, expected) in tree.log_probs().iter().zip(&expected_tree.cum_logprobs) {
                assert!((got - expected).abs() < 1e-3, "{what} tree {budget}");
            }
            let accepted = walk(&tree, |node| {
                sequence[position.start + tree.depth(node) as usize + 1]
            });
            assert_eq!(accepted.path[1..], expected_tree.accepted_nodes, "{what}");
            assert_eq!(accepted.bonus, expected_tree.next_token, "{what}");
        }
        drafter.close(context);
    }
}

/// A drafter whose window slid by blocks drafts like one that got only the rows it still holds.
#[test]
fn a_sliding_context_equals_a_fresh_one_of_the_same_rows() {
    let case = DENSE_CASES[0];
    let checkpoint = DrafterCheckpoint::open(&case_path(case, "drafter_fit")).unwrap();
    let target = TargetCheckpoint::open(&case_path(case, "model")).unwrap();
    let options = DrafterOptions {
        threads: 2,
        context_window: 40,
        max_contexts: 3,
        ..DrafterOptions::default()
    };
    let mut drafter = CpuDrafter::load(&checkpoint, &target, &options, &mut |_| {}).unwrap();
    let width = drafter.spec().hidden_size;
    let row = |p: u32| (0..width).map(move |i| ((p * 31 + i as u32 * 7) as f32).sin());
    let rows = |range: std::ops::Range<u32>| range.flat_map(row).collect::<Vec<f32>>();
    let slid = drafter.open().unwrap();
    for start in (0..150).step_by(3) {
        drafter
            .append_context(slid, start, &rows(start..start + 3))
            .unwrap();
    }
    let held = drafter.context(slid).unwrap();
    assert_eq!(held.end, 150);
    assert!(held.len() >= 40 && held.len() < 40 + 16, "{held:?}");
    let fresh = drafter.open().unwrap();
    // In two parts: rows that fill the window alone would push the oldest out.
    let middle = held.start + 30;
    for part in [held.start..middle, middle..held.end] {
        drafter
            .append_context(fresh, part.start, &rows(part.clone()))
            .unwrap();
    }
    assert_eq!(drafter.context(fresh).unwrap(), held);
    // A single long append keeps the last rows only.
    let long = drafter.open().unwrap();
    drafter.append_context(long, 0, &rows(0..150)).unwrap();
    assert_eq!(drafter.context(long).unwrap(), 110..150);
    let block = |context| BlockRequest {
        context,
        root_token: 9,
    };
    let both = drafter.block_hidden(&[block(slid), block(fresh)]).unwrap();
    let (a, b) = both.split_at(both.len() / 2);
    assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()));
    let alone = drafter.block_hidden(&[block(fresh)]).unwrap();
    assert_eq!(alone, b, "a block alone and in a batch");
    assert!(drafter.append_context(slid, 151, &rows(151..152)).is_err());
}
