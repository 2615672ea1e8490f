use treespec_tree::{Acceptance, TokenTree, TreeError};

use super::tree::check_node;
use crate::{ServiceError, proto::verify::v1 as pb};

/// Packs the verified tree of a step with what was accepted of it.
pub fn step_tree_to_proto(tree: &TokenTree, acceptance: &Acceptance) -> pb::StepTree {
    // A tree has at most 256 nodes, so every index fits.
    let index = |node: usize| i32::try_from(node).unwrap_or(i32::MAX);
    pb::StepTree {
        token_ids: tree.tokens().to_vec(),
        parents: (0..tree.len())
            .map(|node| tree.parent(node).map_or(-1, index))
            .collect(),
        log_probs: tree.log_probs().to_vec(),
        accepted_nodes: acceptance
            .path
            .iter()
            .skip(1)
            .filter_map(|&node| u32::try_from(node).ok())
            .collect(),
        bonus_token_id: acceptance.bonus,
    }
}

/// Reads the verified tree of a step.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] when it is no tree, a token is not in the vocabulary, or the accepted nodes are
/// not a path from the root.
pub fn step_tree_from_proto(
    message: &pb::StepTree,
    vocab_size: usize,
) -> Result<(TokenTree, Acceptance), ServiceError> {
    let tree = read_tree(message, vocab_size)?;
    let mut path = vec![0];
    let mut last = 0;
    for &accepted in &message.accepted_nodes {
        let node = usize::try_from(accepted).unwrap_or(usize::MAX);
        if tree.parent(node) != Some(last) {
            return Err(ServiceError::invalid(
                "tree.accepted_nodes",
                format!("node {accepted} is not a child of node {last}"),
            ));
        }
        path.push(node);
        last = node;
    }
    let bonus = message.bonus_token_id;
    Ok((tree, Acceptance { path, bonus }))
}

fn read_tree(message: &pb::StepTree, vocab_size: usize) -> Result<TokenTree, ServiceError> {
    let invalid = |error: TreeError| ServiceError::invalid("tree.parents", error.to_string());
    // from_parents checks the shape, root and list lengths included, but knows no log-probabilities.
    let shape = TokenTree::from_parents(&message.token_ids, &message.parents).map_err(invalid)?;
    if message.log_probs.len() != shape.len() {
        return Err(ServiceError::invalid(
            "tree.log_probs",
            format!(
                "{} entries for {} nodes",
                message.log_probs.len(),
                shape.len()
            ),
        ));
    }
    let mut tree = TokenTree::root_only(shape.tokens()[0]);
    for (node, (&token, &log_prob)) in shape.tokens().iter().zip(&message.log_probs).enumerate() {
        check_node("tree", node, token, log_prob, vocab_size)?;
        if let Some(parent) = shape.parent(node) {
            tree.push(parent, token, log_prob).map_err(invalid)?;
        }
    }
    Ok(tree)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> (TokenTree, Acceptance) {
        let mut tree = TokenTree::root_only(1);
        tree.push(0, 2, -0.5).unwrap();
        tree.push(0, 3, -0.7).unwrap();
        tree.push(2, 4, -0.9).unwrap();
        let acceptance = Acceptance {
            path: vec![0, 2, 3],
            bonus: 8,
        };
        (tree, acceptance)
    }

    #[test]
    fn a_step_survives_the_wire() {
        let (tree, acceptance) = step();
        let wire = step_tree_to_proto(&tree, &acceptance);
        assert_eq!(wire.parents, [-1, 0, 0, 2]);
        assert_eq!(wire.accepted_nodes, [2, 3]);
        assert_eq!(step_tree_from_proto(&wire, 10), Ok((tree, acceptance)));
    }

    #[test]
    fn broken_steps_are_named() {
        type Edit = fn(&mut pb::StepTree);
        let cases: [(Edit, &str); 6] = [
            (|s| s.accepted_nodes = vec![3], "tree.accepted_nodes"),
            (|s| s.accepted_nodes = vec![0], "tree.accepted_nodes"),
            (|s| s.accepted_nodes = vec![u32::MAX], "tree.accepted_nodes"),
            (|s| s.parents[0] = 0, "tree.parents"),
            (|s| s.log_probs.truncate(1), "tree.log_probs"),
            (|s| *s = pb::StepTree::default(), "tree.parents"),
        ];
        for (edit, field) in cases {
            let (tree, acceptance) = step();
            let mut wire = step_tree_to_proto(&tree, &acceptance);
            edit(&mut wire);
            let text = step_tree_from_proto(&wire, 10).unwrap_err().to_string();
            assert!(text.contains(field), "{text} lacks {field}");
        }
        let (tree, acceptance) = step();
        let wire = step_tree_to_proto(&tree, &acceptance);
        assert!(step_tree_from_proto(&wire, 4).is_err());
    }
}
