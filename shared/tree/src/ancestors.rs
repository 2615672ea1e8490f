use crate::{MAX_BUDGET, TokenTree};

const WORD_BITS: usize = u64::BITS as usize;
const WORDS: usize = (MAX_BUDGET + 1) / WORD_BITS;

/// One bit row per node: bit `a` of row `n` is set when `a` is an ancestor of `n` or `n` itself.
///
/// A row is four words, bit `a` at `row[a / 64] >> (a % 64)`: the mask a tree-attention kernel reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AncestorSets {
    rows: Vec<[u64; WORDS]>,
}

impl AncestorSets {
    pub(crate) fn of(tree: &TokenTree) -> Self {
        let mut rows: Vec<[u64; WORDS]> = Vec::with_capacity(tree.len());
        for node in 0..tree.len() {
            // Parents come first, so the parent's row is complete.
            let mut row = tree.parent(node).map_or([0; WORDS], |parent| rows[parent]);
            row[node / WORD_BITS] |= 1 << (node % WORD_BITS);
            rows.push(row);
        }
        Self { rows }
    }

    /// Nodes, the root included; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// True when `node` sees `ancestor`. False for nodes that do not exist.
    pub fn contains(&self, node: usize, ancestor: usize) -> bool {
        self.rows
            .get(node)
            .and_then(|row| row.get(ancestor / WORD_BITS))
            .is_some_and(|word| word >> (ancestor % WORD_BITS) & 1 == 1)
    }

    /// The bit row of `node`.
    ///
    /// # Panics
    /// When `node` does not exist, like a slice index.
    pub fn row(&self, node: usize) -> &[u64] {
        &self.rows[node]
    }

    /// The nodes that `node` sees, the root first and `node` last.
    ///
    /// # Panics
    /// When `node` does not exist, like a slice index.
    pub fn iter(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        // Parents precede children, so ascending bits are the path from the root.
        self.rows[node]
            .iter()
            .enumerate()
            .flat_map(|(index, &word)| SetBits(word).map(move |bit| index * WORD_BITS + bit))
    }
}

/// Indices of the set bits, lowest first.
struct SetBits(u64);

impl Iterator for SetBits {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let bit = self.0.trailing_zeros() as usize;
        self.0 &= self.0 - 1;
        Some(bit)
    }
}
