//! Whole steps: `Backend::step` against plain decoding, and `Speculator::speculate` against its parts.

use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint};
use treespec_engine::{
    Backend as _, BlockTable, Colocated, ContextId, CpuDrafter, CpuOptions, CpuTarget, DraftShape,
    Drafter as _, DrafterOptions, EngineError, HeadRequest, RowShape, Speculated, SpeculativeStep,
    Speculator as _, StepBatch, TreeRows,
};
use treespec_tests::{DENSE_CASES, Expected, case_json, case_path};
use treespec_tree::TokenTree;

use crate::harness::Target;

const CASE: &str = DENSE_CASES[1];
const SHAPE: DraftShape = DraftShape::Tree { budget: 16 };

fn checkpoint() -> DrafterCheckpoint {
    DrafterCheckpoint::open(&case_path(CASE, "drafter_fit")).unwrap()
}

fn drafter(checkpoint: &DrafterCheckpoint) -> CpuDrafter {
    let target = TargetCheckpoint::open(&case_path(CASE, "model")).unwrap();
    let options = DrafterOptions {
        cpu: CpuOptions::f32(1),
        ..DrafterOptions::default()
    };
    CpuDrafter::load(checkpoint, &target, &options, &mut |_| {}).unwrap()
}

/// A sequence whose prompt is in target and drafter.
struct Sequence {
    table: BlockTable,
    committed: usize,
    root: u32,
    context: ContextId,
    greedy: Vec<u32>,
}

impl Sequence {
    fn step(&self) -> SpeculativeStep<'_> {
        SpeculativeStep {
            table: &self.table,
            committed: self.committed,
            root: self.root,
            context: self.context,
            shape: SHAPE,
            max_depth: 100,
            head: HeadRequest::ARGMAX,
            sampling: None,
            coupling: None,
        }
    }

    /// Commits a step and returns what it decided.
    fn commit(&mut self, speculated: &Speculated) -> Vec<u32> {
        let acceptance = &speculated.verified.acceptance;
        let tokens = speculated.tree.tokens();
        let mut decided: Vec<u32> = acceptance.path[1..].iter().map(|&n| tokens[n]).collect();
        decided.push(acceptance.bonus);
        self.committed += acceptance.path.len();
        self.root = acceptance.bonus;
        decided
    }
}

/// The fixture's prompts, ready to speculate.
fn speculator() -> (Colocated<CpuTarget, CpuDrafter>, Vec<Sequence>) {
    let checkpoint = checkpoint();
    let mut target = Target::load(CASE, Some(&checkpoint));
    let mut drafter = drafter(&checkpoint);
    let expected: Expected = case_json(CASE, "expected.json");
    let sequences = expected.prompts.iter().map(|prompt| {
        let table = target.table(prompt.prompt.len() + prompt.greedy.len() + 32);
        let rows = target.rows(&table, 0, &prompt.prompt, RowShape::Chain);
        let context = drafter.open().unwrap();
        drafter.append_context(context, 0, &rows.features).unwrap();
        Sequence {
            table,
            committed: prompt.prompt.len(),
            root: prompt.greedy[0],
            context,
            greedy: prompt.greedy.clone(),
        }
    });
    let sequences = sequences.collect();
    (Colocated::new(target.backend, drafter).unwrap(), sequences)
}

#[test]
fn speculation_decides_the_reference_tokens_alone_and_in_company() {
    let (mut speculator, mut sequences) = speculator();
    let mut decided: Vec<Vec<u32>> = sequences.iter().map(|s| vec![s.root]).collect();
    let mut accepted = 0;
    // Every third round alone, the others together.
    for round in 0.. {
        let open: Vec<usize> = (0..sequences.len())
            .filter(|&s| decided[s].len() < sequences[s].greedy.len())
            .collect();
        if open.is_empty() {
            break;
        }
        let width = if round % 3 == 0 { 1 } else { open.len() };
        for some in open.chunks(width) {
            let steps: Vec<_> = some.iter().map(|&s| sequences[s].step()).collect();
            let speculated = speculator.speculate(&steps).unwrap();
            assert_eq!(speculated.len(), some.len());
            for (&s, speculated) in some.iter().zip(&speculated) {
                assert!(speculated.verified.features.is_empty());
                assert_eq!(speculated.tree.budget(), 16);
                accepted += speculated.verified.acceptance.accepted();
                decided[s].extend(sequences[s].commit(speculated));
                let context = speculator.drafter().context(sequences[s].context);
                assert_eq!(context.unwrap().end as usize, sequences[s].committed);
            }
        }
    }
    for (decided, sequence) in decided.iter().zip(&sequences) {
        assert_eq!(decided[..sequence.greedy.len()], sequence.greedy);
    }
    assert!(accepted > 0);
}

#[test]
fn a_context_that_is_not_where_the_sequence_is_fails_the_step_and_commits_nothing() {
    let (mut speculator, mut sequences) = speculator();
    let step = sequences[0].step();
    let behind = SpeculativeStep {
        committed: step.committed + 1,
        ..step
    };
    let error = speculator.speculate(&[behind]).unwrap_err();
    assert!(matches!(error, EngineError::ContextGap { .. }), "{error}");
    let context = sequences[1].context;
    speculator.drafter().close(context);
    let steps = [sequences[0].step(), sequences[1].step()];
    let error = speculator.speculate(&steps).unwrap_err();
    assert!(matches!(error, EngineError::UnknownContext(_)), "{error}");

    let speculated = speculator.speculate(&[sequences[0].step()]).unwrap();
    let decided = sequences[0].commit(&speculated[0]);
    assert_eq!(decided, sequences[0].greedy[1..][..decided.len()]);
}

#[test]
fn depth_is_cut_from_the_finished_tree() {
    let (mut speculator, sequences) = speculator();
    let whole = speculator.speculate(&[sequences[0].step()]).unwrap();
    let (mut speculator, sequences) = self::speculator();
    let shallow = SpeculativeStep {
        max_depth: 2,
        ..sequences[0].step()
    };
    let shallow = speculator.speculate(&[shallow]).unwrap();
    let mut cut = whole[0].tree.clone();
    assert!(cut.max_depth() > 2);
    cut.truncate_depth(2);
    assert_eq!(shallow[0].tree, cut);
}

#[test]
fn a_target_without_the_drafters_features_is_refused() {
    let target = Target::load(CASE, None).backend;
    let error = Colocated::new(target, drafter(&checkpoint()))
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("computes no features"),
        "{error}"
    );
}

#[test]
fn a_step_takes_prompts_and_trees_together() {
    let checkpoint = checkpoint();
    let mut target = Target::load(CASE, Some(&checkpoint));
    let expected: Expected = case_json(CASE, "expected.json");
    let (one, other) = (&expected.prompts[0], &expected.prompts[1]);
    let table = target.table(one.prompt.len() + 16);
    target.rows(&table, 0, &one.prompt, RowShape::Chain);
    let other_table = target.table(other.prompt.len());
    // The reference's next tokens and a sibling each: the whole trunk is accepted, whose rows are not neighbours.
    let trunk = &one.greedy[..4];
    let mut tree = TokenTree::root_only(trunk[0]);
    let mut parent = 0;
    for &token in &trunk[1..] {
        tree.push(parent, token ^ 1, 0.0).unwrap();
        parent = tree.push(parent, token, 0.0).unwrap();
    }
    let mut head = vec![None; other.prompt.len()];
    *head.last_mut().unwrap() = Some(HeadRequest::ARGMAX);
    let committed = one.prompt.len();
    let batch = StepBatch {
        rows: vec![treespec_engine::SequenceRows {
            table: &other_table,
            committed: 0,
            tokens: &other.prompt,
            shape: RowShape::Chain,
            head: &head,
            sampling: None,
            features: false,
        }],
        trees: vec![TreeRows {
            table: &table,
            committed,
            tree: &tree,
            head: HeadRequest::ARGMAX,
            sampling: None,
            features: true,
        }],
    };
    let output = target.backend.step(&batch).unwrap();
    assert_eq!(output.rows[0].head[0].top[0].token, other.greedy[0]);
    assert!(output.rows[0].features.is_empty());
    let verified = &output.trees[0];
    assert_eq!(verified.acceptance.path, [0, 2, 4, 6]);
    assert_eq!(verified.acceptance.bonus, one.greedy[4]);
    let chosen: Vec<u32> = verified.head.iter().map(|row| row.top[0].token).collect();
    assert_eq!(chosen, one.greedy[1..5]);

    // What was committed is what plain decoding would have left there.
    let next = target.rows(&table, committed + 4, &one.greedy[4..6], RowShape::Chain);
    let mut plain = Target::load(CASE, Some(&checkpoint));
    let plain_table = plain.table(one.prompt.len() + 16);
    let tokens = [&one.prompt[..], &one.greedy[..6]].concat();
    let rows = plain.rows(&plain_table, 0, &tokens, RowShape::Chain);
    assert_eq!(next.head, rows.head[committed + 4..]);
    let width = rows.features.len() / tokens.len();
    let features = &rows.features[committed * width..(committed + 4) * width];
    assert_eq!(verified.features, features);
}
