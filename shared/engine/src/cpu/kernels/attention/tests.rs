use super::*;
use crate::kv_cache::BlockPool;

mod single_queries;

fn noise(n: usize, seed: usize) -> Vec<f32> {
    (0..n)
        .map(|i| (((i + seed * 31) * 2_654_435_761) % 2_000) as f32 / 1_000.0 - 1.0)
        .collect()
}

/// A cache whose slot `s` holds the keys and values of `rows[s]`.
fn cache(shape: AttentionShape, rows: &[Vec<f32>], scatter: bool) -> (KvLayer, BlockTable) {
    let mut pool = BlockPool::new(64);
    let (mut table, mut gap) = (BlockTable::default(), BlockTable::default());
    for tokens in (BLOCK_TOKENS..=rows.len().next_multiple_of(BLOCK_TOKENS)).step_by(BLOCK_TOKENS) {
        pool.grow(&mut table, tokens).unwrap();
        if scatter {
            let next = gap.capacity() + 1;
            pool.grow(&mut gap, next).unwrap();
        }
    }
    let mut layer = KvLayer::new(shape, 64);
    for (slot, row) in rows.iter().enumerate() {
        store_rows(&mut layer, row, &[table.locate(slot)]);
    }
    (layer, table)
}

fn run(
    isa: Isa,
    shape: AttentionShape,
    query: &[f32],
    layer: &KvLayer,
    view: RowView<'_>,
) -> Vec<f32> {
    let mut out = vec![0.0; shape.heads * shape.head_dim];
    attend(
        &mut ThreadPool::new(2).unwrap(),
        isa,
        query,
        layer,
        &[view],
        &mut out,
    );
    out
}

#[test]
fn equals_the_definition() {
    for (heads, kv_heads, head_dim) in [(4, 2, 16), (3, 1, 40), (9, 3, 64), (2, 2, 128)] {
        let shape = AttentionShape {
            heads,
            kv_heads,
            head_dim,
        };
        let width = kv_heads * head_dim;
        let rows: Vec<_> = (0..75).map(|s| noise(2 * width, s)).collect();
        let (layer, table) = cache(shape, &rows, true);
        let query = noise(heads * head_dim, 99);
        let tail = [50, 53, 70];
        let seen: Vec<usize> = (3..50).chain([50, 53, 70]).collect();
        for isa in [Isa::Portable, Isa::detect()] {
            let view = RowView {
                table: &table,
                prefix: 3..50,
                tail: &tail,
            };
            let out = run(isa, shape, &query, &layer, view);
            for head in 0..heads {
                let kv = head / (heads / kv_heads) * head_dim;
                let q = &query[head * head_dim..][..head_dim];
                let score = |s: usize| -> f64 {
                    q.iter()
                        .zip(&rows[s][kv..])
                        .map(|(a, b)| f64::from(a * b))
                        .sum()
                };
                let total: f64 = seen.iter().map(|&s| score(s).exp()).sum();
                for d in 0..head_dim {
                    let exact: f64 = seen
                        .iter()
                        .map(|&s| score(s).exp() / total * f64::from(rows[s][width + kv + d]))
                        .sum();
                    let got = f64::from(out[head * head_dim + d]);
                    assert!(
                        (exact - got).abs() < 1e-4,
                        "{isa:?} {shape:?} {head} {d}: {exact} {got}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_path_has_the_same_bits_wherever_its_rows_lie() {
    let shape = AttentionShape {
        heads: 6,
        kv_heads: 2,
        head_dim: 64,
    };
    let rows: Vec<_> = (0..60).map(|s| noise(2 * 128, s)).collect();
    let query = noise(6 * 64, 7);
    for (isa, committed) in [
        (Isa::detect(), 33),
        (Isa::detect(), 32),
        (Isa::Portable, 47),
    ] {
        // The path's last rows 33.. moved to other slots of a larger tree.
        let (plain, plain_table) = cache(shape, &rows[..committed + 4], false);
        let expected = run(
            isa,
            shape,
            &query,
            &plain,
            RowView {
                table: &plain_table,
                prefix: 0..committed + 4,
                tail: &[],
            },
        );
        let mut scattered = rows[..committed].to_vec();
        let tail: Vec<u32> = (0..4).map(|i| (committed + 1 + i * 3) as u32).collect();
        for slot in committed..committed + 12 {
            let own = tail.iter().position(|&t| t as usize == slot);
            scattered.push(own.map_or_else(
                || noise(2 * 128, 1_000 + slot),
                |i| rows[committed + i].clone(),
            ));
        }
        let (tree, tree_table) = cache(shape, &scattered, true);
        let got = run(
            isa,
            shape,
            &query,
            &tree,
            RowView {
                table: &tree_table,
                prefix: 0..committed,
                tail: &tail,
            },
        );
        assert!(
            expected
                .iter()
                .zip(&got)
                .all(|(a, b)| a.to_bits() == b.to_bits()),
            "{isa:?}"
        );
    }
}

#[test]
fn moved_rows_attend_alike() {
    let shape = AttentionShape {
        heads: 2,
        kv_heads: 1,
        head_dim: 40,
    };
    let rows: Vec<_> = (0..20).map(|s| noise(80, s)).collect();
    let query = noise(80, 3);
    let (mut layer, table) = cache(shape, &rows, false);
    let before = run(
        Isa::detect(),
        shape,
        &query,
        &layer,
        RowView {
            table: &table,
            prefix: 0..10,
            tail: &[19],
        },
    );
    layer.move_row(table.locate(19), table.locate(10));
    let after = run(
        Isa::detect(),
        shape,
        &query,
        &layer,
        RowView {
            table: &table,
            prefix: 0..11,
            tail: &[],
        },
    );
    assert_eq!(before, after);
}
