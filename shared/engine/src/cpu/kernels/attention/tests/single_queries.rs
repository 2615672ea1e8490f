//! Tiles of queries against one query at a time, by bits.

use proptest::collection::vec;
use proptest::prelude::*;

use super::super::super::dispatch;
use super::super::super::lanes::Lanes;
use super::*;

/// Slots of a query in position order, and how many lie before them in their first tile of 16.
struct Path {
    slots: Vec<usize>,
    hidden: usize,
}

impl Path {
    fn of(view: &RowView<'_>) -> Self {
        let tail = view.tail.iter().map(|&slot| slot as usize);
        Self {
            slots: view.prefix.clone().chain(tail).collect(),
            hidden: view.prefix.start % LANES,
        }
    }
}

/// Keys and values of one kv head by slot.
struct HeadRows<'a> {
    keys: Vec<&'a [f32]>,
    values: Vec<&'a [f32]>,
}

/// Attention of one query: the order that the kernel promises, without paging and tiles of queries.
fn single_query(isa: Isa, query: &[f32], head: &HeadRows<'_>, path: &Path) -> Vec<f32> {
    dispatch!(isa, single_query_lanes(query: &[f32], head: &HeadRows<'_>, path: &Path) -> Vec<f32>)
}

/// # Safety
/// The processor has the instruction set of `L`.
#[inline(always)]
unsafe fn single_query_lanes<L: Lanes>(
    query: &[f32],
    head: &HeadRows<'_>,
    path: &Path,
) -> Vec<f32> {
    let mut scores = vec![f32::NEG_INFINITY; path.hidden];
    // SAFETY: the caller's contract; every load is of a whole vector.
    unsafe {
        for &slot in &path.slots {
            let mut acc = L::splat(0.0);
            for (q, k) in query.iter().zip(head.keys[slot]) {
                acc = L::splat(*q).mul_add(L::splat(*k), acc);
            }
            scores.push(acc.to_array()[0]);
        }
        let keys = scores.len();
        scores.resize(keys.next_multiple_of(LANES), f32::NEG_INFINITY);
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = L::splat(0.0);
        for (tile, scores) in scores.chunks_exact_mut(LANES).enumerate() {
            let weights = L::load(scores.as_ptr()).add(L::splat(-max)).exp();
            weights.store(scores.as_mut_ptr());
            for (lane, weight) in scores.iter_mut().enumerate() {
                if !(path.hidden..keys).contains(&(tile * LANES + lane)) {
                    *weight = 0.0;
                }
            }
            sum = sum.add(L::load(scores.as_ptr()));
        }
        let scale = L::splat(1.0 / sum.sum());
        let weighted = |d: usize| {
            let mut acc = L::splat(0.0);
            for (weight, &slot) in scores[path.hidden..].iter().zip(&path.slots) {
                acc = L::splat(*weight).mul_add(L::splat(head.values[slot][d]), acc);
            }
            acc.mul(scale).to_array()[0]
        };
        (0..query.len()).map(weighted).collect()
    }
}

/// What the rows of a sequence see besides the rows before them.
#[derive(Debug, Clone)]
enum Rows {
    /// Each row the ones before it.
    Chain,
    /// Each row at most the last so many positions, itself included.
    Window(usize),
    /// Nodes with a parent each, drawn from the rows before.
    Tree(Vec<prop::sample::Index>),
    /// All rows all others, and at most the last so many committed positions less their own offset.
    Block(usize),
}

#[derive(Debug, Clone)]
struct Sequence {
    committed: usize,
    count: usize,
    rows: Rows,
    /// A row that holds infinities and NaN: those that do not see it must not notice.
    poisoned: Option<prop::sample::Index>,
}

impl Sequence {
    fn slots(&self) -> usize {
        self.committed + self.count
    }

    fn poisoned_slot(&self) -> Option<usize> {
        let row = self.poisoned.as_ref()?.index(self.count);
        Some(self.committed + row)
    }

    /// Prefix and tail of every row.
    fn seen(&self) -> Vec<(Range<usize>, Vec<u32>)> {
        let (committed, count) = (self.committed, self.count);
        let row_slots = |rows: Range<usize>| rows.map(|r| (committed + r) as u32).collect();
        let mut tails: Vec<Vec<u32>> = Vec::new();
        for row in 0..count {
            let mut tail = match &self.rows {
                Rows::Chain | Rows::Window(_) => Vec::new(),
                Rows::Block(_) => row_slots(0..count),
                Rows::Tree(_) if row == 0 => Vec::new(),
                Rows::Tree(parents) => tails[parents[row].index(row)].clone(),
            };
            if matches!(self.rows, Rows::Tree(_)) {
                tail.push((committed + row) as u32);
            }
            tails.push(tail);
        }
        let prefix = |row: usize| match self.rows {
            Rows::Chain => 0..committed + row + 1,
            Rows::Window(window) => {
                (committed + row + 1).saturating_sub(window)..committed + row + 1
            }
            Rows::Tree(_) => 0..committed,
            Rows::Block(window) => {
                (committed + row + 1).saturating_sub(window).min(committed)..committed
            }
        };
        (0..count).map(prefix).zip(tails).collect()
    }
}

fn sequences() -> impl Strategy<Value = Vec<Sequence>> {
    let rows = prop_oneof![
        Just(Rows::Chain),
        (1usize..60).prop_map(Rows::Window),
        vec(any::<prop::sample::Index>(), 70).prop_map(Rows::Tree),
        (1usize..60).prop_map(Rows::Block),
    ];
    let count = prop_oneof![1usize..8, 1usize..=70];
    let poisoned = proptest::option::of(any::<prop::sample::Index>());
    let sequence = (0usize..150, count, rows, poisoned);
    let sequence = sequence.prop_map(|(committed, count, rows, poisoned)| Sequence {
        committed,
        count,
        rows,
        poisoned,
    });
    vec(sequence, 1..4)
}

fn shapes() -> impl Strategy<Value = AttentionShape> {
    let head_dim = prop_oneof![1usize..80, Just(64), Just(128)];
    (1usize..4, 1usize..8, head_dim).prop_map(|(kv_heads, group, head_dim)| AttentionShape {
        heads: kv_heads * group,
        kv_heads,
        head_dim,
    })
}

/// Random keys and values of every slot of a sequence, `[keys, values]`.
fn contents(sequence: &Sequence, width: usize, seed: usize) -> Vec<Vec<f32>> {
    let row = |slot: usize| {
        let mut row = noise(2 * width, seed + slot);
        if Some(slot) == sequence.poisoned_slot() {
            row[0] = f32::NAN;
            row[width] = f32::INFINITY;
            row[2 * width - 1] = f32::NAN;
        }
        row
    };
    (0..sequence.slots()).map(row).collect()
}

/// The instruction sets with forms of their own.
fn isas() -> impl Iterator<Item = Isa> {
    [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable]
        .into_iter()
        .filter(|isa| isa.is_available())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn tiles_have_the_bits_of_single_queries(
        shape in shapes(),
        sequences in sequences(),
        threads in 1usize..4,
    ) {
        let (width, query_width) = (shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim);
        let mut blocks = BlockPool::new(3 * 220usize.div_ceil(BLOCK_TOKENS));
        let mut layer = KvLayer::new(shape, blocks.total_blocks());
        // What no row holds must not be seen either.
        layer.keys.fill(f32::NAN);
        layer.values.fill(f32::NAN);
        let (mut tables, mut rows) = (Vec::new(), Vec::new());
        for (i, sequence) in sequences.iter().enumerate() {
            let mut table = BlockTable::default();
            blocks.grow(&mut table, sequence.slots()).unwrap();
            let content = contents(sequence, width, i * 1_000);
            for (slot, row) in content.iter().enumerate() {
                store_rows(&mut layer, row, &[table.locate(slot)]);
            }
            tables.push(table);
            rows.push(content);
        }
        let seen: Vec<_> = sequences.iter().map(Sequence::seen).collect();
        let views: Vec<_> = seen.iter().zip(&tables).flat_map(|(seen, table)| {
            seen.iter().map(move |(prefix, tail)| RowView { table, prefix: prefix.clone(), tail })
        }).collect();
        let of_sequence: Vec<_> =
            seen.iter().enumerate().flat_map(|(i, seen)| seen.iter().map(move |_| i)).collect();
        let queries = noise(views.len() * query_width, 77);
        let mut pool = ThreadPool::new(threads).unwrap();
        for isa in isas() {
            let mut out = vec![f32::NAN; queries.len()];
            attend(&mut pool, isa, &queries, &layer, &views, &mut out);
            for (row, view) in views.iter().enumerate() {
                let (path, sequence) = (Path::of(view), of_sequence[row]);
                let poisoned = sequences[sequence].poisoned_slot();
                if path.slots.iter().any(|slot| Some(*slot) == poisoned) {
                    // The key of its first head is not a number: nor is what it weighs.
                    let first = &out[row * query_width..][..shape.group() * shape.head_dim];
                    prop_assert!(first.iter().all(|x| x.is_nan()), "{isa:?} row {row}");
                    continue;
                }
                let content = &rows[sequence];
                for head in 0..shape.heads {
                    let own = head / shape.group() * shape.head_dim;
                    let part = |from: usize| -> Vec<&[f32]> {
                        content.iter().map(|row| &row[from..from + shape.head_dim]).collect()
                    };
                    let kv = HeadRows { keys: part(own), values: part(width + own) };
                    let place = row * query_width + head * shape.head_dim..;
                    let query = &queries[place.clone()][..shape.head_dim];
                    let expected = single_query(isa, query, &kv, &path);
                    let got = &out[place][..shape.head_dim];
                    prop_assert!(
                        expected.iter().zip(got).all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{isa:?} row {row} head {head}: {expected:?} {got:?}"
                    );
                }
            }
        }
    }
}
