//! Compaction of accepted rows against a copy on the host.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::{AcceptedPaths, CompactionKernels, DeviceBuffer, KvCache, KvShape};
use treespec_engine::{BlockPool, BlockTable};

use super::attention::scene::grow;

/// Blocks of a table.
const STRIDE: usize = 14;

/// Entries of a path.
const PATH: usize = 64;

#[test]
fn accepted_rows_move_to_their_slots() {
    let Some(device) = crate::device() else {
        return;
    };
    let kernels = CompactionKernels::load(&device).unwrap();
    for (seed, (layers, kv_heads, head_dim)) in [(5, 3, 64), (2, 8, 128), (3, 1, 40), (1, 2, 16)]
        .into_iter()
        .enumerate()
    {
        let mut random = StdRng::seed_from_u64(seed as u64);
        for sequences in [1, 3] {
            let shape = KvShape {
                layers,
                blocks: sequences * STRIDE * 2,
                kv_heads,
                head_dim,
            };
            let cache = KvCache::new(&device, shape).unwrap();
            let before: Vec<bf16> = (0..cache.elements().len())
                .map(|_| bf16::from_bits(random.random_range(0..0x7F00)))
                .collect();
            cache.elements().write(&before).unwrap();
            let mut expected = before.clone();
            let mut pool = BlockPool::new(shape.blocks);
            let mut gap = BlockTable::default();
            let mut paths = vec![u32::MAX; sequences * PATH];
            let (mut counts, mut starts, mut tables) = (Vec::new(), Vec::new(), Vec::new());
            for sequence in 0..sequences {
                let mut table = BlockTable::default();
                while table.capacity() < STRIDE * 16 {
                    if random.random_range(0..2) == 0 && gap.capacity() < shape.blocks * 8 {
                        grow(&mut pool, &mut gap);
                    }
                    grow(&mut pool, &mut table);
                }
                let committed = random.random_range(0..40);
                let count = if sequence == 2 {
                    0
                } else {
                    random.random_range(1..=PATH)
                };
                let mut node = 0;
                for index in 0..count {
                    if index > 0 {
                        node += if random.random_range(0..3) == 0 {
                            random.random_range(1..3)
                        } else {
                            1
                        };
                    }
                    paths[sequence * PATH + index] = node as u32;
                    let slot = |row: usize| {
                        let (block, offset) = table.locate(committed + row);
                        block.0 as usize * 16 + offset
                    };
                    for layer in 0..layers {
                        for values in [false, true] {
                            for head in 0..kv_heads {
                                let from = cache.row_offset(layer, values, slot(node), head);
                                let to = cache.row_offset(layer, values, slot(index), head);
                                expected[to..to + shape.width()]
                                    .copy_from_slice(&before[from..from + shape.width()]);
                            }
                        }
                    }
                }
                counts.push(count as u32);
                starts.push(committed as u32);
                tables.extend(table.blocks().iter().map(|block| block.0));
            }
            let [path, counts, committed, tables] = [paths, counts, starts, tables]
                .map(|words| DeviceBuffer::from_slice(&device, &words).unwrap());
            let accepted = AcceptedPaths {
                path: path.ptr(),
                path_stride: PATH,
                counts: counts.ptr(),
                committed: committed.ptr(),
                tables: tables.ptr(),
                table_stride: STRIDE,
                sequences,
            };
            kernels.compact(&cache, accepted).unwrap();
            let got = cache.elements().read().unwrap();
            let wrong = (0..got.len()).find(|&i| got[i].to_bits() != expected[i].to_bits());
            assert_eq!(wrong, None, "first element that differs of {shape:?}");
        }
    }
}

#[test]
fn layers_do_not_overlap() {
    let Some(device) = crate::device() else {
        return;
    };
    let shape = KvShape {
        layers: 3,
        blocks: 4,
        kv_heads: 2,
        head_dim: 40,
    };
    let cache = KvCache::new(&device, shape).unwrap();
    assert_eq!(cache.elements().len() as u64 * 2, shape.bytes());
    for layer in 0..3 {
        let at = cache.layer(layer);
        let start = |values| {
            cache
                .elements()
                .offset(cache.row_offset(layer, values, 0, 0))
        };
        assert_eq!((at.keys, at.values), (start(false), start(true)));
    }
    assert!(
        cache
            .elements()
            .read()
            .unwrap()
            .iter()
            .all(|x| x.to_bits() == 0)
    );
}
