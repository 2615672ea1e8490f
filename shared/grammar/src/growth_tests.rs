use proptest::prelude::*;
use treespec_tree::{DepthCandidates, best_first};

use super::*;

/// No test is about time.
const PATIENCE: Duration = Duration::from_secs(600);

const VOCABULARY: usize = 16;
const END: u32 = 15;
const UNLIMITED: TreeLimits = TreeLimits {
    nodes: MAX_BUDGET,
    depth: usize::MAX,
    time: PATIENCE,
};

/// Rules as a function from a path to the legal tokens; none is a dead end.
struct Rules<F>(F);

impl<F: Fn(&[u32]) -> (Vec<u32>, Option<u32>)> Continuations for Rules<F> {
    fn after(&mut self, path: &[u32]) -> Option<Continuation> {
        assert!(!path.contains(&END), "asked beyond an end");
        let (legal, likely) = (self.0)(path);
        (!legal.is_empty()).then(|| Continuation {
            mask: mask(&legal),
            likely,
        })
    }

    fn is_end(&self, token: u32) -> bool {
        token == END
    }

    fn after_end(&self) -> TokenMask {
        mask(&[END])
    }
}

fn mask(tokens: &[u32]) -> TokenMask {
    TokenMask::from_tokens(VOCABULARY, tokens.iter().copied())
}

fn depths(raw: &[&[(u32, f32)]]) -> DepthCandidates {
    let candidate = |&(token, log_prob): &(u32, f32)| Candidate { token, log_prob };
    let depth = |ranks: &&[(u32, f32)]| ranks.iter().map(candidate).collect();
    DepthCandidates(raw.iter().map(depth).collect())
}

fn draft(raw: &[&[(u32, f32)]]) -> TokenTree {
    best_first(9, &depths(raw), MAX_BUDGET)
}

fn grown(
    draft: &TokenTree,
    limits: TreeLimits,
    rules: impl Fn(&[u32]) -> (Vec<u32>, Option<u32>),
) -> ConstrainedTree {
    grow(draft, limits, &mut Rules(rules)).unwrap()
}

fn parents(tree: &TokenTree) -> Vec<Option<usize>> {
    (0..tree.len()).map(|node| tree.parent(node)).collect()
}

fn anything(_: &[u32]) -> (Vec<u32>, Option<u32>) {
    ((0..VOCABULARY as u32).collect(), None)
}

#[test]
fn illegal_children_are_pruned_with_all_below_them() {
    let draft = draft(&[&[(1, -0.1), (2, -2.0)], &[(3, -0.1), (4, -2.0)]]);
    let constrained = grown(&draft, UNLIMITED, |path| match path {
        [] => (vec![2, 5], None),
        _ => (vec![4, 6], None),
    });
    assert_eq!(constrained.tree.tokens(), [9, 2, 4]);
    assert_eq!(
        constrained.masks,
        [mask(&[2, 5]), mask(&[4, 6]), mask(&[4, 6])]
    );
}

#[test]
fn an_illegal_first_choice_makes_room_for_other_paths() {
    // The draft itself has no path 2, 3: its budget ended before.
    let draft = best_first(9, &depths(&[&[(1, -0.1), (2, -2.0)], &[(3, -0.1)]]), 3);
    assert_eq!(draft.tokens(), [9, 1, 3, 2]);
    let constrained = grown(&draft, UNLIMITED, |path| match path {
        [] => (vec![2, 5], None),
        _ => (vec![3, 6], None),
    });
    assert_eq!(constrained.tree.tokens(), [9, 2, 3]);
}

#[test]
fn forced_tokens_are_chain_nodes_drafted_or_not() {
    let forced = |path: &[u32]| (vec![path.len() as u32], None);
    let limits = TreeLimits {
        nodes: 20,
        depth: 4,
        time: PATIENCE,
    };
    for draft in [
        TokenTree::root_only(9),
        draft(&[&[(7, -0.1)], &[(1, -3.0)]]),
    ] {
        let constrained = grown(&draft, limits, forced);
        assert_eq!(constrained.tree.tokens(), [9, 0, 1, 2, 3]);
        assert!(constrained.tree.is_chain());
        assert_eq!(constrained.tree.log_probs(), [0.0; 5]);
        assert_eq!(constrained.masks[4], mask(&[4]));
    }
}

#[test]
fn a_draft_goes_on_below_forced_tokens_at_its_own_depth() {
    let draft = draft(&[&[(1, -0.5)], &[(2, -0.5)], &[(3, -0.5)]]);
    let constrained = grown(&draft, UNLIMITED, |path| match path {
        [] => (vec![8], None),
        _ => (vec![2, 3, 4], None),
    });
    assert_eq!(constrained.tree.tokens(), [9, 8, 2, 3]);
    assert_eq!(constrained.tree.log_probs(), [0.0, 0.0, -0.5, -1.0]);
}

#[test]
fn a_likely_token_comes_before_what_is_drafted() {
    let draft = draft(&[&[(1, -0.1), (2, -0.2)]]);
    let constrained = grown(&draft, UNLIMITED, |path| match path {
        [] => (vec![1, 2, 3], Some(3)),
        _ => (vec![1, 2], None),
    });
    assert_eq!(constrained.tree.tokens(), [9, 3, 1, 2]);
    assert_eq!(constrained.tree.log_probs()[1], LIKELY_LOG_PROB);
    // A drafted token that is the likely one is one child.
    let constrained = grown(&draft, UNLIMITED, |path| match path {
        [] => (vec![1, 2, 3], Some(2)),
        _ => (vec![1, 2], None),
    });
    assert_eq!(constrained.tree.tokens(), [9, 2, 1]);
}

#[test]
fn nothing_follows_an_end() {
    let draft = draft(&[&[(END, -0.1), (1, -0.2)], &[(2, -0.1)]]);
    let constrained = grown(&draft, UNLIMITED, anything);
    assert_eq!(constrained.tree.tokens(), [9, END, 1, 2]);
    assert_eq!(constrained.tree.parent(3), Some(2));
    assert_eq!(constrained.masks[1], mask(&[END]));
}

#[test]
fn paths_that_lead_nowhere_are_left_out() {
    let draft = draft(&[&[(1, -0.1), (2, -0.2)], &[(3, -0.1)]]);
    let constrained = grown(&draft, UNLIMITED, |path| match path {
        [1] | [2, 3] => (Vec::new(), None),
        _ => anything(path),
    });
    assert_eq!(constrained.tree.tokens(), [9, 2]);
    assert_eq!(constrained.masks.len(), 2);
    let nothing = grow(
        &draft,
        UNLIMITED,
        &mut Rules(|_: &[u32]| (Vec::new(), None)),
    );
    assert_eq!(nothing, None);
}

#[test]
fn log_probs_that_are_none_do_no_harm() {
    let mut draft = TokenTree::root_only(9);
    for (token, log_prob) in [
        (1, f64::INFINITY),
        (2, 3.0),
        (3, f64::NEG_INFINITY),
        (4, -1.0),
    ] {
        draft.push(0, token, log_prob).unwrap();
    }
    draft.push(1, 5, f64::INFINITY).unwrap();
    let constrained = grown(&draft, UNLIMITED, anything);
    assert_eq!(constrained.tree.tokens(), [9, 2, 4]);
    assert_eq!(constrained.tree.log_probs(), [0.0, 0.0, -1.0]);
}

#[test]
fn only_tokens_of_sets_of_one_are_found() {
    for token in [0, 31, 32, 99] {
        let one = TokenMask::from_tokens(100, [token]);
        assert_eq!(only_token(&one), Some(token));
    }
    for several in [vec![], vec![0, 1], vec![0, 32], vec![31, 99]] {
        assert_eq!(only_token(&TokenMask::from_tokens(100, several)), None);
    }
}

/// Candidates whose sums are exact in f32 and differ within a depth.
fn any_depths() -> impl Strategy<Value = DepthCandidates> {
    let rank = (1u32..40).prop_map(|steps| steps as f32 / 16.0);
    let depth = prop::collection::vec(rank, 1..4).prop_map(|steps| {
        let mut log_prob = 0.0;
        let candidate = |(step, token)| {
            log_prob -= step;
            Candidate { token, log_prob }
        };
        steps.into_iter().zip(0..).map(candidate).collect()
    });
    prop::collection::vec(depth, 0..4).prop_map(DepthCandidates)
}

proptest! {
    #[test]
    fn without_rules_it_is_the_drafters_own_search(depths in any_depths(), nodes in 0usize..60) {
        let draft = best_first(9, &depths, MAX_BUDGET);
        let expected = best_first(9, &depths, nodes);
        let limits = TreeLimits { nodes, depth: usize::MAX, time: PATIENCE };
        let constrained = grown(&draft, limits, anything);
        prop_assert_eq!(parents(&constrained.tree), parents(&expected));
        prop_assert_eq!(constrained.tree.tokens(), expected.tokens());
    }

    #[test]
    fn trees_are_legal_limited_and_prefixes_of_larger_ones(
        depths in any_depths(), salt in any::<u32>(), nodes in 0usize..30, depth in 0usize..6,
    ) {
        // Any rules that are a function of the path; some paths force a token or lead nowhere.
        let rules = |path: &[u32]| {
            let hash = path.iter().fold(salt, |hash, &token| hash.wrapping_mul(31).wrapping_add(token + 1));
            let hash = hash.wrapping_mul(0x9E37_79B9);
            let legal: Vec<u32> = match hash >> 30 {
                0 => vec![hash >> 8 & 15],
                _ => (0..16).filter(|token| path.is_empty() || hash >> token & 1 != 0).collect(),
            };
            let likely = (hash & 64 != 0).then(|| legal.first().copied()).flatten();
            (legal, likely)
        };
        let draft = best_first(9, &depths, MAX_BUDGET);
        let limits = TreeLimits { nodes, depth, time: PATIENCE };
        let constrained = grown(&draft, limits, rules);
        let tree = &constrained.tree;
        prop_assert!(tree.budget() <= nodes && tree.max_depth() as usize <= depth);
        prop_assert_eq!(constrained.masks.len(), tree.len());
        for node in 1..tree.len() {
            let parent = tree.parent(node).unwrap();
            prop_assert!(constrained.masks[parent].contains(tree.tokens()[node]));
            prop_assert!(tree.log_probs()[node] <= tree.log_probs()[parent]);
            let path: Vec<u32> = tree.path(node)[1..].iter().map(|&at| tree.tokens()[at]).collect();
            let is_end = path.last() == Some(&END);
            let expected = if is_end { vec![END] } else { rules(&path).0 };
            prop_assert_eq!(&constrained.masks[node], &mask(&expected));
        }
        let more = TreeLimits { nodes: nodes + 7, depth, time: PATIENCE };
        let mut larger = grown(&draft, more, rules).tree;
        larger.truncate(tree.budget());
        if tree.budget() == nodes {
            prop_assert_eq!(&larger, tree);
        }
        prop_assert_eq!(&grown(&draft, limits, rules), &constrained);
    }
}
