//! How `bench engine` drafts.

use anyhow::{Result, bail};
use treespec_engine::DraftShape;

use crate::mode::Mode;

/// The draft that the steps of `mode` ask for; `None` for plain decoding.
///
/// # Errors
/// A mode that only a service can resolve.
pub(super) fn draft_shape(mode: Mode) -> Result<Option<DraftShape>> {
    match mode {
        Mode::Ar => Ok(None),
        Mode::Chain => Ok(Some(DraftShape::Chain)),
        Mode::Tree(Some(budget)) => Ok(Some(DraftShape::Tree {
            budget: budget as usize,
        })),
        Mode::Auto | Mode::Tree(None) => {
            bail!("mode {mode} is a service's to choose: use ar, chain or tree:N")
        }
    }
}

/// Nodes below the root that a draft of `shape` can have; none without a draft.
pub(super) fn most_nodes(shape: Option<DraftShape>, block_size: usize) -> usize {
    shape.map_or(0, |shape| shape.most_nodes(block_size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_modes_that_need_no_service_are_taken() {
        assert_eq!(draft_shape(Mode::Ar).unwrap(), None);
        assert_eq!(
            draft_shape(Mode::Tree(Some(15))).unwrap(),
            Some(DraftShape::Tree { budget: 15 })
        );
        for mode in [Mode::Auto, Mode::Tree(None)] {
            let error = draft_shape(mode).unwrap_err().to_string();
            assert!(error.contains("tree:N"), "{error}");
        }
    }

    #[test]
    fn a_chain_has_as_many_nodes_as_the_block_drafts() {
        let tree = DraftShape::Tree { budget: 63 };
        assert_eq!(most_nodes(None, 16), 0);
        assert_eq!(most_nodes(Some(DraftShape::Chain), 16), 15);
        assert_eq!(most_nodes(Some(tree), 16), 63);
    }
}
