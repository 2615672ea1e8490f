//! Which rows of a batch go through the device together.

use treespec_engine::{EngineError, RowShape, SequenceRows};

use super::MOST_FORWARD_SEQUENCES;

/// Cuts sequences into forwards of up to `most_rows` rows: the index of the sequence and some of its rows. A
/// chain may be cut anywhere, since its later rows find the earlier ones in the cache.
pub(super) fn forward_groups<'a>(
    sequences: &[SequenceRows<'a>],
    most_rows: usize,
) -> Result<Vec<Vec<(usize, SequenceRows<'a>)>>, EngineError> {
    let mut groups = Vec::new();
    let mut group = Vec::new();
    let mut room = most_rows;
    for (index, sequence) in sequences.iter().enumerate() {
        let rows = sequence.tokens.len();
        let is_tree = matches!(sequence.shape, RowShape::Tree { .. });
        if is_tree && rows > most_rows {
            return Err(EngineError::InvalidBatch(format!(
                "a tree of {rows} nodes: the device takes up to {most_rows}"
            )));
        }
        let mut start = 0;
        while start < rows {
            if room == 0 || is_tree && room < rows || group.len() == MOST_FORWARD_SEQUENCES {
                groups.push(std::mem::take(&mut group));
                room = most_rows;
            }
            let end = rows.min(start + room);
            group.push((
                index,
                SequenceRows {
                    committed: sequence.committed + start,
                    tokens: &sequence.tokens[start..end],
                    head: &sequence.head[start..end],
                    // Counted from the first row of the whole sequence.
                    sampling: None,
                    ..sequence.clone()
                },
            ));
            room -= end - start;
            start = end;
        }
    }
    groups.push(group);
    groups.retain(|group| !group.is_empty());
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use treespec_engine::BlockTable;
    use treespec_tree::TokenTree;

    #[test]
    fn chains_are_cut_anywhere_and_trees_nowhere() {
        let table = BlockTable::default();
        let tokens = [1u32; 25];
        let head = vec![None; 25];
        let mut tree = TokenTree::root_only(1);
        tree.push(0, 2, 0.0).unwrap();
        tree.push(0, 3, 0.0).unwrap();
        let ancestors = tree.ancestors();
        let rows = |count: usize, shape| SequenceRows {
            table: &table,
            committed: 4,
            tokens: &tokens[..count],
            shape,
            head: &head[..count],
            sampling: None,
            features: false,
        };
        let batch = [
            rows(25, RowShape::Chain),
            rows(3, RowShape::tree(&tree, &ancestors)),
            rows(2, RowShape::Chain),
        ];
        let groups = forward_groups(&batch, 8).unwrap();
        let sizes: Vec<Vec<(usize, usize, usize)>> = groups
            .iter()
            .map(|group| {
                let size = |(owner, rows): &(usize, SequenceRows<'_>)| {
                    (*owner, rows.committed, rows.tokens.len())
                };
                group.iter().map(size).collect()
            })
            .collect();
        assert_eq!(
            sizes,
            [
                vec![(0, 4, 8)],
                vec![(0, 12, 8)],
                vec![(0, 20, 8)],
                vec![(0, 28, 1), (1, 4, 3), (2, 4, 2)],
            ]
        );
        assert!(forward_groups(&batch, 2).is_err());
    }
}
