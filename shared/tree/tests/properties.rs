//! Properties that hold for every tree.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::{BTreeSet, HashMap};

use proptest::collection::vec;
use proptest::prelude::*;
use treespec_tree::{
    Candidate, DepthCandidates, MAX_BUDGET, TokenTree, TreeError, best_first, chain, walk,
};

/// Any tree of up to `max_nodes` nodes: each node picks an earlier parent; repeated siblings are left out.
fn trees(max_nodes: usize) -> impl Strategy<Value = TokenTree> {
    vec((any::<prop::sample::Index>(), 0u32..40), 0..max_nodes).prop_map(|nodes| {
        let mut tree = TokenTree::root_only(7);
        for (parent, token) in nodes {
            let parent = parent.index(tree.len());
            match tree.push(parent, token, 0.0) {
                Ok(_) | Err(TreeError::DuplicateSibling { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        tree
    })
}

/// Distributions like a drafter's: sorted, below zero, with ties every now and then.
fn depths(max_depth: usize, max_rank: usize) -> impl Strategy<Value = DepthCandidates> {
    let log_prob = (1u32..60).prop_map(|eighths| -(eighths as f32) / 8.0);
    vec(vec(log_prob, 0..=max_rank), 0..=max_depth).prop_map(|depths| {
        DepthCandidates(
            depths
                .into_iter()
                .map(|mut log_probs| {
                    log_probs.sort_by(|a, b| b.total_cmp(a));
                    (0u32..)
                        .zip(log_probs)
                        .map(|(token, log_prob)| Candidate { token, log_prob })
                        .collect()
                })
                .collect(),
        )
    })
}

/// Greatest sum of path probabilities of a prefix-closed tree with at most `budget` nodes: every choice is tried.
fn brute_force(depths: &DepthCandidates, budget: usize) -> f64 {
    fn extend(depths: &DepthCandidates, open: &[(usize, usize, f64)], budget: usize) -> f64 {
        let mut best = 0.0f64;
        if budget == 0 {
            return best;
        }
        // Nodes before `chosen` are left out for good, so no set is tried twice.
        for (chosen, &(depth, rank, above)) in open.iter().enumerate() {
            let log_prob = above + f64::from(depths.0[depth][rank].log_prob);
            let mut next = open[chosen + 1..].to_vec();
            next.extend(children(depths, depth + 1, log_prob));
            best = best.max(log_prob.exp() + extend(depths, &next, budget - 1));
        }
        best
    }
    fn children(
        depths: &DepthCandidates,
        depth: usize,
        above: f64,
    ) -> impl Iterator<Item = (usize, usize, f64)> {
        let ranks = depths.0.get(depth).map_or(0, Vec::len);
        (0..ranks).map(move |rank| (depth, rank, above))
    }
    extend(
        depths,
        &children(depths, 0, 0.0).collect::<Vec<_>>(),
        budget,
    )
}

fn probability_mass(tree: &TokenTree) -> f64 {
    tree.log_probs()[1..]
        .iter()
        .map(|log_prob| log_prob.exp())
        .sum()
}

/// Reference builder: all paths within the depths, sorted by the documented order.
fn sorted_paths(depths: &DepthCandidates, budget: usize) -> Vec<Vec<u32>> {
    let mut paths: Vec<(f64, Vec<u32>)> = Vec::new();
    let mut level = vec![(0.0, Vec::new())];
    for candidates in &depths.0 {
        level = level
            .iter()
            .flat_map(|(above, ranks): &(f64, Vec<u32>)| {
                (0u32..).zip(candidates).map(move |(rank, candidate)| {
                    let mut ranks = ranks.clone();
                    ranks.push(rank);
                    (above + f64::from(candidate.log_prob), ranks)
                })
            })
            .collect();
        paths.extend(level.iter().cloned());
    }
    paths.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    paths.truncate(budget);
    paths.into_iter().map(|(_, ranks)| ranks).collect()
}

fn token_path(tree: &TokenTree, node: usize) -> Vec<u32> {
    tree.path(node)[1..]
        .iter()
        .map(|&node| tree.tokens()[node])
        .collect()
}

fn assert_is_tree(tree: &TokenTree) {
    assert_eq!(tree.depth(0), 0);
    let mut seen = BTreeSet::new();
    for node in 1..tree.len() {
        let parent = tree.parent(node).unwrap();
        assert!(parent < node);
        assert_eq!(tree.depth(node), tree.depth(parent) + 1);
        assert!(seen.insert((parent, tree.tokens()[node])));
        assert_eq!(tree.child(parent, tree.tokens()[node]), Some(node));
    }
}

proptest! {
    // A failure prints its input: nothing is to be written next to the sources.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ancestor_sets_are_the_paths(tree in trees(MAX_BUDGET + 1)) {
        let sets = tree.ancestors();
        for node in 0..tree.len() {
            let path = tree.path(node);
            prop_assert_eq!(sets.iter(node).collect::<Vec<_>>(), path.clone());
            for other in 0..tree.len() {
                prop_assert_eq!(sets.contains(node, other), path.contains(&other));
            }
            let bits: u32 = sets.row(node).iter().map(|word| word.count_ones()).sum();
            prop_assert_eq!(bits, tree.depth(node) + 1);
        }
        prop_assert!(!sets.contains(tree.len(), 0));
        prop_assert!(!sets.contains(0, 1 << 20));
    }

    #[test]
    fn arrays_round_trip(tree in trees(60)) {
        let parents: Vec<i32> = (0..tree.len())
            .map(|node| tree.parent(node).map_or(-1, |parent| parent as i32))
            .collect();
        prop_assert_eq!(TokenTree::from_parents(tree.tokens(), &parents), Ok(tree.clone()));
    }

    #[test]
    fn best_first_is_the_brute_force_optimum(depths in depths(3, 3), budget in 0usize..6) {
        let tree = best_first(1, &depths, budget);
        prop_assert!((probability_mass(&tree) - brute_force(&depths, budget)).abs() < 1e-9);
    }

    /// Eighths add up exactly, so equal sums tie and the rank path decides.
    #[test]
    fn best_first_pops_in_the_documented_order(depths in depths(4, 4), budget in 0usize..40) {
        let tree = best_first(1, &depths, budget);
        assert_is_tree(&tree);
        let built: Vec<_> = (1..tree.len()).map(|node| token_path(&tree, node)).collect();
        let reachable = depths.0.iter().position(Vec::is_empty).unwrap_or(depths.0.len());
        let reachable = DepthCandidates(depths.0[..reachable].to_vec());
        prop_assert_eq!(built, sorted_paths(&reachable, budget));
    }

    #[test]
    fn a_smaller_budget_is_a_prefix(depths in depths(15, 40), small in 0usize..300, large in 0usize..300) {
        let (small, large) = (small.min(large), small.max(large));
        let mut tree = best_first(1, &depths, large);
        prop_assert!(tree.budget() <= MAX_BUDGET);
        tree.truncate(small);
        prop_assert_eq!(tree, best_first(1, &depths, small));
    }

    #[test]
    fn truncating_depth_keeps_the_shallow_nodes(tree in trees(80), max_depth in 0u32..12) {
        let mut cut = tree.clone();
        cut.truncate_depth(max_depth);
        assert_is_tree(&cut);
        let shallow: Vec<_> = (0..tree.len())
            .filter(|&node| tree.depth(node) <= max_depth)
            .map(|node| token_path(&tree, node))
            .collect();
        let kept: Vec<_> = (0..cut.len()).map(|node| token_path(&cut, node)).collect();
        prop_assert_eq!(kept, shallow);
        prop_assert!(cut.max_depth() <= max_depth);
    }

    #[test]
    fn the_walk_matches_a_walk_over_maps(tree in trees(120), choices in vec(0u32..40, 256)) {
        let mut children: HashMap<usize, HashMap<u32, usize>> = HashMap::new();
        for node in 1..tree.len() {
            let siblings = children.entry(tree.parent(node).unwrap()).or_default();
            siblings.insert(tree.tokens()[node], node);
        }
        let mut path = vec![0];
        let mut at = 0;
        while let Some(&next) = children.get(&at).and_then(|below| below.get(&choices[at])) {
            path.push(next);
            at = next;
        }
        let acceptance = walk(&tree, |node| choices[node]);
        prop_assert_eq!(acceptance.accepted(), path.len() - 1);
        prop_assert_eq!(acceptance.path, path);
        prop_assert_eq!(acceptance.bonus, choices[at]);
    }

    #[test]
    fn a_chain_is_the_first_candidate_of_each_depth(depths in depths(20, 5)) {
        let tree = chain(1, &depths);
        prop_assert!(tree.is_chain());
        let expected = depths.0.iter().take_while(|ranks| !ranks.is_empty()).count();
        prop_assert_eq!(tree.budget(), expected);
        prop_assert!(tree.tokens()[1..].iter().all(|&token| token == 0));
    }

    /// Whatever a broken drafter sends, including bit patterns that are no numbers.
    #[test]
    fn arbitrary_candidates_never_panic(
        raw in vec(vec((0u32..6, any::<u32>()), 0..12), 0..300),
        budget in 0usize..2_000,
    ) {
        let depths = DepthCandidates(
            raw.into_iter()
                .map(|ranks| {
                    ranks
                        .into_iter()
                        .map(|(token, bits)| Candidate { token, log_prob: f32::from_bits(bits) })
                        .collect()
                })
                .collect(),
        );
        assert_is_tree(&best_first(1, &depths, budget));
        assert_is_tree(&chain(1, &depths));
        prop_assert!(chain(1, &depths).budget() <= MAX_BUDGET);
    }
}
