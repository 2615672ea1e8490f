use treespec_tree::{MAX_BUDGET, TokenTree};

use crate::{ServiceError, proto::draft::v1 as pb};

/// Packs the nodes below the root, in pop order.
pub fn tree_to_proto(tree: &TokenTree) -> pb::Tree {
    pb::Tree {
        token_ids: tree.tokens()[1..].to_vec(),
        parents: (1..tree.len())
            .filter_map(|node| tree.parent(node))
            .filter_map(|parent| u32::try_from(parent).ok())
            .collect(),
        log_probs: tree.log_probs()[1..].to_vec(),
    }
}

/// Reads a drafted tree below `root`.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] when the lists differ in length, there are more than [`MAX_BUDGET`] nodes, a
/// token is not in the vocabulary, a parent does not precede its child, siblings share a token, or a log-probability
/// is NaN.
pub fn tree_from_proto(
    root: u32,
    message: &pb::Tree,
    vocab_size: usize,
) -> Result<TokenTree, ServiceError> {
    let nodes = message.token_ids.len();
    if nodes > MAX_BUDGET {
        return Err(ServiceError::invalid(
            "tree.token_ids",
            format!("{nodes} nodes, but a tree has at most {MAX_BUDGET}"),
        ));
    }
    for (field, length) in [
        ("tree.parents", message.parents.len()),
        ("tree.log_probs", message.log_probs.len()),
    ] {
        if length != nodes {
            return Err(ServiceError::invalid(
                field,
                format!("{length} entries for {nodes} nodes"),
            ));
        }
    }
    let mut tree = TokenTree::root_only(root);
    let edges = message.parents.iter().zip(&message.log_probs);
    for (&token, (&parent, &log_prob)) in message.token_ids.iter().zip(edges) {
        check_node("tree", tree.len(), token, log_prob, vocab_size)?;
        let parent = usize::try_from(parent).unwrap_or(usize::MAX);
        tree.push(parent, token, log_prob)
            .map_err(|error| ServiceError::invalid("tree.parents", error.to_string()))?;
    }
    Ok(tree)
}

/// What every node of a tree on the wire must fulfil by itself.
pub(super) fn check_node(
    field: &str,
    node: usize,
    token: u32,
    log_prob: f64,
    vocab_size: usize,
) -> Result<(), ServiceError> {
    if usize::try_from(token).is_ok_and(|token| token >= vocab_size) {
        return Err(ServiceError::invalid(
            format!("{field}.token_ids"),
            format!("node {node} has token {token}, outside the vocabulary of {vocab_size}"),
        ));
    }
    if log_prob.is_nan() {
        return Err(ServiceError::invalid(
            format!("{field}.log_probs"),
            format!("node {node} has NaN"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VOCAB: usize = 100;

    fn sample() -> pb::Tree {
        pb::Tree {
            token_ids: vec![5, 6, 7],
            parents: vec![0, 1, 0],
            log_probs: vec![-0.1, -0.5, -2.0],
        }
    }

    #[test]
    fn a_tree_survives_the_wire() {
        let tree = tree_from_proto(4, &sample(), VOCAB).unwrap();
        assert_eq!(tree.tokens(), [4, 5, 6, 7]);
        assert_eq!(tree.parent(2), Some(1));
        assert_eq!(tree_to_proto(&tree), sample());
        let empty = TokenTree::root_only(9);
        assert_eq!(tree_from_proto(9, &tree_to_proto(&empty), VOCAB), Ok(empty));
    }

    #[test]
    fn broken_trees_are_named() {
        type Edit = fn(&mut pb::Tree);
        let cases: [(Edit, &str); 8] = [
            (
                |t| t.parents.truncate(2),
                "tree.parents: 2 entries for 3 nodes",
            ),
            (
                |t| t.log_probs.push(0.0),
                "tree.log_probs: 4 entries for 3 nodes",
            ),
            (
                |t| t.token_ids[1] = 100,
                "node 2 has token 100, outside the vocabulary of 100",
            ),
            (|t| t.parents[1] = 2, "tree.parents"),
            (|t| t.parents[2] = u32::MAX, "tree.parents"),
            (|t| t.token_ids[2] = 5, "tree.parents"),
            (|t| t.log_probs[0] = f64::NAN, "node 1 has NaN"),
            (|t| t.token_ids = vec![1; 256], "256 nodes"),
        ];
        for (edit, part) in cases {
            let mut message = sample();
            edit(&mut message);
            let error = tree_from_proto(4, &message, VOCAB).unwrap_err();
            assert_eq!(error.code(), tonic::Code::InvalidArgument);
            assert!(error.to_string().contains(part), "{error} lacks {part}");
        }
    }

    proptest! {
        #[test]
        fn no_message_panics(
            token_ids in prop::collection::vec(0u32..120, 0..300),
            parents in prop::collection::vec(0u32..40, 0..300),
        ) {
            let log_probs = vec![0.0; token_ids.len()];
            let message = pb::Tree { token_ids, parents, log_probs };
            if let Ok(tree) = tree_from_proto(0, &message, VOCAB) {
                prop_assert_eq!(tree_to_proto(&tree), message);
            }
        }
    }
}
