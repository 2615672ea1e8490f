use treespec_engine::BlockPool;
use treespec_tree::TokenTree;

use super::*;

fn limits() -> RowLimits {
    RowLimits {
        rows: 16,
        sequences: 2,
        blocks: 4,
    }
}

/// A writer over plain memory that holds leftovers.
fn writer(words: &mut [u32]) -> RowWriter<'_> {
    RowWriter {
        limits: limits(),
        offsets: Offsets::new(limits()),
        words,
        blocks: 0,
        sequences: 0,
        rows: 0,
        longest: 1,
        paths: false,
    }
}

fn table(tokens: usize) -> BlockTable {
    let mut pool = BlockPool::new(8);
    let (mut gap, mut table) = (BlockTable::default(), BlockTable::default());
    pool.grow(&mut gap, 32).unwrap();
    pool.grow(&mut table, tokens).unwrap();
    table
}

fn row(token: u32, position: usize, slot: usize, sight: Sight<'_>) -> NewRow<'_> {
    NewRow {
        token,
        position,
        slot,
        sight,
    }
}

#[test]
fn a_chain_sees_ranges_and_a_tree_sees_paths() {
    let offsets = Offsets::new(limits());
    let mut words = vec![7; offsets.end];
    let mut writer = writer(&mut words);
    let table = table(40);
    writer.sequence(&table, 20).unwrap();
    for i in 0..3 {
        writer
            .row(&row(5, 20 + i, 20 + i, Sight::Range(0..21 + i)))
            .unwrap();
    }
    writer.sequence(&table, 10).unwrap();
    writer
        .row(&row(6, 12, 13, Sight::Path(&[0, 2, 3])))
        .unwrap();
    let extent = writer.finish(2);
    let expected = RowExtent {
        rows: 4,
        bucket: 8,
        tile_count: 3,
        tile_rows: 2,
        longest: 23,
        paths: true,
    };
    assert_eq!(extent, expected);
    let at = |offset: usize, len: usize| &words[offset..offset + len];
    assert_eq!(at(offsets.tokens, 8), [5, 5, 5, 6, 0, 0, 0, 0]);
    // Slot 20 is the fifth of the table's second block, number 3.
    let slots = [52, 53, 54, 2 * 16 + 13, NONE, NONE, NONE, NONE];
    assert_eq!(at(offsets.kv_slot, 8), slots);
    assert_eq!(at(offsets.vis_end, 8), [21, 22, 23, 0, 0, 0, 0, 0]);
    assert_eq!(at(offsets.path_len, 8), [0, 0, 0, 3, 0, 0, 0, 0]);
    assert_eq!(at(offsets.paths + 3 * PATH_WORDS, 2), [2 << 16, 3]);
    assert_eq!(at(offsets.tiles, 8), [0, 0, 2, 0, 0, 2, 1, 0]);
    let end = [1, 3, 1, 0, NONE, NONE, NONE, NONE];
    assert_eq!(at(offsets.tiles + 8, 8), end);
    assert_eq!(at(offsets.tables, 4), [2, 3, 4, NONE]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut words = vec![0; Offsets::new(limits()).end];
    let mut writer = writer(&mut words);
    let small = table(16);
    writer.sequence(&small, 0).unwrap();
    let bad = [
        row(0, 0, 16, Sight::Range(0..1)),
        row(0, 0, 0, Sight::Range(0..17)),
        row(0, 0, 0, Sight::Path(&[16])),
        row(0, 0, 0, Sight::Path(&[0; 65])),
    ];
    assert!(bad.iter().all(|row| writer.row(row).is_err()));
    for _ in 0..16 {
        writer.row(&row(0, 0, 0, Sight::Range(0..1))).unwrap();
    }
    assert!(writer.row(&row(0, 0, 0, Sight::Range(0..1))).is_err());
    writer.sequence(&small, 0).unwrap();
    assert!(writer.sequence(&small, 0).is_err());
}

#[test]
fn a_tree_that_is_a_chain_needs_no_paths() {
    let chain = TokenTree::from_parents(&[1, 2, 3], &[-1, 0, 1]).unwrap();
    assert!(is_chain(chain.depths()));
    let tree = TokenTree::from_parents(&[1, 2, 3], &[-1, 0, 0]).unwrap();
    assert!(!is_chain(tree.depths()));
}
