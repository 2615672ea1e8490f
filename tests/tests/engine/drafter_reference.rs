//! The drafter's slots and trees against the reference, and its sliding context.

use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_engine::{
    Backend, BlockRequest, CpuDrafter, CpuOptions, DraftShape, Drafter, DrafterOptions, RowShape,
    build_draft,
};
use treespec_tests::{DENSE_CASES, DrafterExpected, case_json, case_path};
use treespec_tree::walk;

use crate::harness::{Target, bits, log_probs};

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
        cpu: CpuOptions::f32(2),
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
        let chain = build_draft(position.root_token, &rows, DraftShape::Chain, None);
        assert_eq!(chain.tokens()[1..], position.chain_tokens, "{what} chain");
        for (budget, expected_tree) in &position.trees {
            let budget: usize = budget.parse().unwrap();
            let rows = drafter.head_topk(&hidden, budget).unwrap();
            let tree = build_draft(
                position.root_token,
                &rows,
                DraftShape::Tree { budget },
                None,
            );
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
        cpu: CpuOptions::f32(2),
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
