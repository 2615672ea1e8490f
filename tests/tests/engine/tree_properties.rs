//! Random trees: one forward of a tree is every path alone, and a commit is a fresh prefill, both by bits.

use std::cell::RefCell;
use std::collections::HashSet;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;
use treespec_engine::{Backend, RowShape};
use treespec_tests::DENSE_CASES;
use treespec_tree::TokenTree;

use crate::harness::{Target, bits};

/// Below the smallest vocabulary of the fixtures.
const VOCAB: u32 = 500;
const MAX_NODES: usize = 40;

/// A committed prompt and a tree below its next token.
#[derive(Debug, Clone)]
struct Case {
    model: &'static str,
    prompt: Vec<u32>,
    tree: TokenTree,
    /// Rows of the first chunk of the prompt's prefill.
    first_chunk: usize,
}

fn token() -> impl Strategy<Value = u32> {
    0..VOCAB
}

/// Every node hangs off any earlier one, so chains, stars and everything between come up.
fn tree() -> impl Strategy<Value = TokenTree> {
    let nodes = prop::collection::vec((any::<Index>(), token()), 0..MAX_NODES);
    (token(), nodes).prop_map(|(root, nodes)| {
        let mut tree = TokenTree::root_only(root);
        let mut siblings = HashSet::new();
        for (parent, token) in nodes {
            let parent = parent.index(tree.len());
            if siblings.insert((parent, token)) {
                tree.push(parent, token, 0.0).unwrap();
            }
        }
        tree
    })
}

fn case() -> impl Strategy<Value = Case> {
    let prompt = prop::collection::vec(token(), 1..60);
    (
        prop::sample::select(&DENSE_CASES),
        prompt,
        tree(),
        any::<Index>(),
    )
        .prop_map(|(model, prompt, tree, chunk)| Case {
            model,
            first_chunk: chunk.index(prompt.len()) + 1,
            prompt,
            tree,
        })
}

/// Targets are slow to load and hold no state between cases but free blocks.
struct Targets([Target; DENSE_CASES.len()]);

impl Targets {
    fn load() -> Self {
        Self(DENSE_CASES.map(|case| Target::load(case, None)))
    }

    fn of(&mut self, model: &str) -> &mut Target {
        let at = DENSE_CASES.iter().position(|case| *case == model).unwrap();
        &mut self.0[at]
    }
}

/// Checks `property` on random cases, each with one of the nodes of its tree.
fn check(cases: u32, property: impl Fn(&mut Target, &Case, usize) -> Result<(), TestCaseError>) {
    let targets = RefCell::new(Targets::load());
    let mut runner = TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&(case(), any::<Index>()), |(case, node)| {
            let mut targets = targets.borrow_mut();
            let node = node.index(case.tree.len());
            property(targets.of(case.model), &case, node)
        })
        .unwrap();
}

#[test]
fn the_forward_of_a_tree_gives_each_node_what_its_path_alone_gives() {
    check(24, |target, case, _| {
        let committed = case.prompt.len();
        let mut table = target.table(committed + MAX_NODES);
        target.rows(&table, 0, &case.prompt, RowShape::Chain);
        let together = bits(&target.tree(&table, committed, &case.tree));
        for (node, expected) in together.iter().enumerate() {
            let path: Vec<u32> = case
                .tree
                .path(node)
                .into_iter()
                .map(|at| case.tree.tokens()[at])
                .collect();
            // The committed rows stay; the path overwrites the rows after them.
            let alone = target.rows(&table, committed, &path, RowShape::Chain).head;
            prop_assert_eq!(&bits(&alone)[path.len() - 1], expected, "node {}", node);
        }
        target.pool.release(&mut table);
        Ok(())
    });
}

#[test]
fn the_cache_after_a_commit_is_that_of_a_fresh_prefill() {
    check(40, |target, case, node| {
        let committed = case.prompt.len();
        let path = case.tree.path(node);
        let tokens: Vec<u32> = path.iter().map(|&at| case.tree.tokens()[at]).collect();
        let next: Vec<u32> = (0..5).map(|i| (tokens[0] + 97 * i) % VOCAB).collect();

        let mut table = target.table(committed + MAX_NODES + next.len());
        let (first, rest) = case.prompt.split_at(case.first_chunk);
        target.rows(&table, 0, first, RowShape::Chain);
        if !rest.is_empty() {
            target.rows(&table, first.len(), rest, RowShape::Chain);
        }
        target.tree(&table, committed, &case.tree);
        target.backend.compact(&table, committed, &path).unwrap();
        let end = committed + path.len();
        let after_commit = target.rows(&table, end, &next, RowShape::Chain).head;

        let mut fresh = target.table(end + next.len());
        let whole = [&case.prompt[..], &tokens].concat();
        target.rows(&fresh, 0, &whole, RowShape::Chain);
        let after_prefill = target.rows(&fresh, end, &next, RowShape::Chain).head;
        prop_assert_eq!(bits(&after_commit), bits(&after_prefill));
        target.pool.release(&mut table);
        target.pool.release(&mut fresh);
        Ok(())
    });
}
