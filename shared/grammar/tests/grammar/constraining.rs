//! Drafts made legal.

use std::time::Duration;

use proptest::prelude::*;
use treespec_grammar::{Grammar, GrammarSource, TreeLimits};
use treespec_tree::{Candidate, DepthCandidates, TokenTree, best_first};

use crate::vocabularies::{Model, fixture, pieces, smollm};
use crate::walks::legal;

/// No test is about time, but for the one that says so.
const PATIENCE: Duration = Duration::from_secs(600);

const LIMITS: TreeLimits = TreeLimits {
    nodes: 24,
    depth: 12,
    time: PATIENCE,
};

fn person() -> GrammarSource {
    let schema = r#"{"type": "object", "properties": {
        "name": {"type": "string"}, "colour": {"enum": ["red", "green", "grey"]}
    }, "required": ["name", "colour"], "additionalProperties": false}"#;
    GrammarSource::JsonSchema(schema.to_owned())
}

/// The drafter's best guess at `text`, with a wrong token beside each one.
fn draft_of(model: &Model, root: u32, text: &str) -> TokenTree {
    let depths = model.ids(text).into_iter().map(|token| {
        let (right, wrong) = (-0.25, -2.0);
        let candidate = |token, log_prob| Candidate { token, log_prob };
        vec![candidate(token, right), candidate(token ^ 1, wrong)]
    });
    best_first(root, &DepthCandidates(depths.collect()), 60)
}

fn text_of(model: &Model, tree: &TokenTree, node: usize) -> String {
    let ids: Vec<u32> = tree.path(node)[1..]
        .iter()
        .map(|&at| tree.tokens()[at])
        .collect();
    model.text(&ids)
}

/// The grammar after `text`.
fn after(model: &Model, source: &GrammarSource, text: &str) -> Grammar {
    let mut grammar = model.compile(source);
    for token in model.ids(text) {
        grammar.accept(token).unwrap();
    }
    grammar
}

/// Every mask is the one that a grammar has which went there token by token.
fn check_masks(grammar: &mut Grammar, model: &Model, draft: &TokenTree, limits: TreeLimits) {
    let constrained = grammar.constrain(draft, limits).unwrap();
    let tree = &constrained.tree;
    assert_eq!(constrained.masks.len(), tree.len());
    assert!(tree.budget() <= limits.nodes && tree.max_depth() as usize <= limits.depth);
    assert_eq!(tree.tokens()[0], draft.tokens()[0]);
    for node in 0..tree.len() {
        let mut there = grammar.clone();
        for &at in &tree.path(node)[1..] {
            let token = tree.tokens()[at];
            assert!(constrained.masks[tree.parent(at).unwrap()].contains(token));
            there.accept(token).unwrap();
        }
        assert_eq!(there.mask().unwrap(), constrained.masks[node]);
        if model.eos.contains(&tree.tokens()[node]) {
            assert_eq!(tree.children(node).count(), 0);
        }
    }
    assert_eq!(grammar.constrain(draft, limits).unwrap(), constrained);
}

#[test]
fn what_is_drafted_wrongly_is_pruned_and_what_is_forced_is_added() {
    for model in [Some(fixture()), smollm()].into_iter().flatten() {
        let mut grammar = after(model, &person(), "{\"name\": \"Ada");
        let root = model.id("a");
        let draft = draft_of(model, root, "\", \"size\": 3}");
        let constrained = grammar.constrain(&draft, LIMITS).unwrap();
        let texts: Vec<String> = (1..constrained.tree.len())
            .map(|node| text_of(model, &constrained.tree, node))
            .collect();
        // `size` is not a property: the name of the only one that may follow stands in its place.
        assert!(
            texts.contains(&"\", \"colour\": \"".to_owned()),
            "{texts:?}"
        );
        assert!(
            texts.iter().all(|text| !text.starts_with("\", \"size")),
            "{texts:?}"
        );
        check_masks(&mut grammar, model, &draft, LIMITS);
    }
}

#[test]
fn plain_decoding_gets_the_root_mask_and_the_forced_run() {
    let model = fixture();
    let mut grammar = model.compile(&person());
    let root = TokenTree::root_only(5);
    let nothing = TreeLimits {
        nodes: 0,
        depth: 8,
        time: PATIENCE,
    };
    let constrained = grammar.constrain(&root, nothing).unwrap();
    assert_eq!(constrained.tree, root);
    assert_eq!(constrained.masks, [grammar.mask().unwrap()]);
    let constrained = grammar.constrain(&root, LIMITS).unwrap();
    assert!(constrained.tree.is_chain());
    let longest = text_of(model, &constrained.tree, constrained.tree.budget());
    assert!(longest.starts_with("{\"name"), "{longest}");
    check_masks(&mut grammar, model, &root, LIMITS);
}

#[test]
fn a_single_legal_token_is_a_free_node_up_to_the_end() {
    let model = pieces(&["a", "b", "c"]);
    let mut grammar = model.compile(&GrammarSource::Regex("abc".to_owned()));
    let root = TokenTree::root_only(2);
    let constrained = grammar.constrain(&root, LIMITS).unwrap();
    let forced = ["a", "b", "c", "</s>"].map(|token| model.id(token));
    assert_eq!(constrained.tree.tokens()[1..], forced);
    assert_eq!(constrained.tree.log_probs(), [0.0; 5]);
    assert_eq!(legal(&constrained.masks[4]), model.eos);
}

#[test]
fn a_forced_text_that_can_be_cut_in_two_ways_comes_in_its_longest_tokens() {
    let model = pieces(&["a", "ab", "b", "c", "<0x61>"]);
    let mut grammar = model.compile(&GrammarSource::Regex("abc".to_owned()));
    let constrained = grammar.constrain(&TokenTree::root_only(2), LIMITS).unwrap();
    assert_eq!(
        constrained.tree.tokens()[1..3],
        [model.id("ab"), model.id("c")]
    );
    assert_eq!(constrained.tree.log_probs()[..3], [0.0; 3]);
    assert_eq!(legal(&constrained.masks[0]), [model.id("ab")]);
}

/// "ç" is no token, so that all legal ones are beginnings of "ab", but the text need not go on like that.
#[test]
fn a_token_that_others_begin_is_only_likely_where_the_text_is_open() {
    let model = pieces(&["a", "ab", "b", "<0xC3>", "<0xA7>"]);
    let mut grammar = model.compile(&GrammarSource::Regex("a(b|ç)".to_owned()));
    let mut both = [model.id("a"), model.id("ab")];
    both.sort_unstable();
    assert_eq!(legal(&grammar.mask().unwrap()), both);
    let constrained = grammar.constrain(&TokenTree::root_only(2), LIMITS).unwrap();
    assert_eq!(constrained.tree.tokens()[1], model.id("ab"));
    assert!(constrained.tree.log_probs()[1] < 0.0);
}

#[test]
fn a_finished_answer_has_no_draft() {
    let model = fixture();
    let mut grammar = model.compile(&GrammarSource::Regex("a".to_owned()));
    grammar.accept(model.id("a")).unwrap();
    grammar.accept(model.eos[0]).unwrap();
    let draft = draft_of(model, model.eos[0], "more");
    let constrained = grammar.constrain(&draft, LIMITS).unwrap();
    assert_eq!(constrained.tree, TokenTree::root_only(model.eos[0]));
    let mut ends = model.eos.clone();
    ends.sort_unstable();
    assert_eq!(legal(&constrained.masks[0]), ends);
}

#[test]
fn rules_that_cannot_be_undone_are_constrained_too() {
    let model = fixture();
    for lark in [
        "start: a \"x\" a\na[max_tokens=3]: /[abx]+/\n",
        "start: text \"x\"\ntext[stop=\"c\"]: /[abx]+/\n",
        "start: a <|mask|> a\na[lazy]: /[ab]+x/\n",
    ] {
        let mut grammar = model.compile(&GrammarSource::Lark(lark.to_owned()));
        check_masks(&mut grammar, model, &draft_of(model, 3, "abxabx"), LIMITS);
    }
}

#[test]
fn a_token_that_leads_nowhere_is_no_node() {
    let model = pieces(&["a", "b", "c"]);
    let mut grammar = model.compile(&GrammarSource::Regex("ax|bc".to_owned()));
    let candidates = ["a", "b"].map(|token| Candidate {
        token: model.id(token),
        log_prob: -0.5,
    });
    let draft = best_first(2, &DepthCandidates(vec![candidates.to_vec()]), 8);
    let constrained = grammar.constrain(&draft, LIMITS).unwrap();
    assert_eq!(
        constrained.tree.tokens()[1..3],
        [model.id("b"), model.id("c")]
    );
    // Nothing of the failed attempt stays behind.
    check_masks(
        &mut grammar,
        &model,
        &TokenTree::root_only(2),
        TreeLimits {
            nodes: 0,
            depth: 0,
            time: PATIENCE,
        },
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_draft_becomes_legal_and_leaves_the_state_alone(
        prefix in 0usize..20,
        tokens in prop::collection::vec(prop::collection::vec(0u32..832, 1..5), 0..8),
        nodes in 0usize..30,
        depth in 0usize..10,
    ) {
        let model = fixture();
        let answer = model.ids("{\"name\": \"Ada\", \"colour\": \"green\"}");
        let mut grammar = model.compile(&person());
        for &token in &answer[..prefix.min(answer.len())] {
            grammar.accept(token).unwrap();
        }
        // Random tokens, and the right ones among them.
        let depths = tokens.iter().enumerate().map(|(at, others)| {
            let right = answer.get(prefix + at).copied();
            let candidate = |(token, rank)| Candidate { token, log_prob: -0.3 * rank as f32 };
            right.into_iter().chain(others.iter().copied()).zip(1u32..).map(candidate).collect()
        });
        let draft = best_first(7, &DepthCandidates(depths.collect()), 100);
        let before = grammar.mask().unwrap();
        check_masks(&mut grammar, model, &draft, TreeLimits { nodes, depth, time: PATIENCE });
        prop_assert_eq!(grammar.mask().unwrap(), before);
    }
}

#[test]
fn without_time_there_is_the_root_and_its_mask() {
    let model = fixture();
    let mut grammar = model.compile(&person());
    let limits = TreeLimits {
        time: Duration::ZERO,
        ..LIMITS
    };
    let constrained = grammar.constrain(&TokenTree::root_only(2), limits).unwrap();
    assert_eq!(constrained.tree.budget(), 0);
    assert_eq!(constrained.masks, [grammar.mask().unwrap()]);
}

/// A source whose states are as many as the texts, near the limit of the library's tables. An answer with the mask of every
/// position, and one with drafts between its tokens, go equally far.
#[test]
fn drafts_do_not_use_up_what_an_answer_may_visit() {
    let Some(model) = smollm() else {
        return;
    };
    let source = GrammarSource::Regex("start(.*a.{18}b.*c.{18}d)&?".to_owned());
    let mut plain = model.compile(&source);
    let mut drafting = plain.clone();
    let mut random = 5u64;
    let mut next = |below: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (random >> 33) as usize % below
    };
    let mut branches = 0;
    for step in 0..50 {
        let mask = plain.mask().unwrap();
        let limits = TreeLimits {
            nodes: 120,
            depth: 24,
            time: PATIENCE,
        };
        let candidate = |next: &mut dyn FnMut(usize) -> usize| Candidate {
            token: next(model.vocab_size) as u32,
            log_prob: -1.0 - next(100) as f32 / 100.0,
        };
        let depths = (0..12).map(|_| (0..10).map(|_| candidate(&mut next)).collect());
        let wild = best_first(17, &DepthCandidates(depths.collect()), 120);
        let constrained = drafting.constrain(&wild, limits).unwrap();
        branches += constrained.tree.budget();
        assert_eq!(constrained.masks[0], mask, "step {step}");
        let open: Vec<u32> = legal(&mask)
            .into_iter()
            .filter(|token| !model.eos.contains(token))
            .collect();
        let token = open[next(open.len())];
        plain.accept(token).unwrap();
        drafting.accept(token).unwrap();
    }
    assert!(branches > 200, "{branches} drafted nodes explored");
}
