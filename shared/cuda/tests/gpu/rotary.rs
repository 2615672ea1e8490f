//! Rotary embeddings and the store of keys and values against f64, and attention that overlaps with them.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::{
    AttentionKernels, AttentionShape, ContextRows, CudaError, Device, DeviceBuffer, DevicePtr,
    Graph, HeadNorms, KvCache, KvShape, NewRow, PackedRows, RotaryKernels, RowArrays, RowBuffers,
    RowKernels, RowLimits, Sight, Visibility,
};
use treespec_engine::{BlockPool, BlockTable};

const NONE: u32 = u32::MAX;
const EPS: f32 = 1e-5;

/// Values, frequencies and norms of a model on both sides.
struct Case {
    device: Arc<Device>,
    shape: AttentionShape,
    frequencies: Vec<f32>,
    query_norm: Vec<f32>,
    key_norm: Vec<f32>,
    random: StdRng,
}

impl Case {
    fn new(
        device: &Arc<Device>,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        seed: u64,
    ) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut norm = || {
            (0..head_dim)
                .map(|_| random.random_range(0.5f32..1.5))
                .collect()
        };
        let (query_norm, key_norm) = (norm(), norm());
        Self {
            device: device.clone(),
            shape: AttentionShape {
                heads,
                kv_heads,
                head_dim,
            },
            frequencies: (0..head_dim / 2)
                .map(|i| 10_000f32.powf(-2.0 * i as f32 / head_dim as f32))
                .collect(),
            query_norm,
            key_norm,
            random,
        }
    }

    fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count)
            .map(|_| self.random.random_range(-2.0f32..2.0))
            .collect()
    }

    /// The definition for one head.
    fn rotated(&self, head: &[f32], norm: Option<&[f32]>, position: u32) -> Vec<f64> {
        let square: f64 = head.iter().map(|x| f64::from(*x).powi(2)).sum();
        let unit = (square / head.len() as f64 + f64::from(EPS)).sqrt().recip();
        let value = |i: usize| {
            let x = f64::from(head[i]);
            norm.map_or(x, |norm| x * unit * f64::from(norm[i]))
        };
        let half = head.len() / 2;
        let mut out = vec![0.0; head.len()];
        for i in 0..half {
            // The angle in f32, as the models compute it.
            let angle = f64::from(position as f32 * self.frequencies[i]);
            let (x, y) = (value(i), value(i + half));
            out[i] = x * angle.cos() - y * angle.sin();
            out[i + half] = y * angle.cos() + x * angle.sin();
        }
        out
    }

    fn cache(&self, layers: usize, blocks: usize) -> KvCache {
        let shape = KvShape {
            layers,
            blocks,
            kv_heads: self.shape.kv_heads,
            head_dim: self.shape.head_dim,
        };
        KvCache::new(&self.device, shape).unwrap()
    }
}

fn near(got: bf16, exact: f64, what: &str) {
    let error = (f64::from(got) - exact).abs();
    assert!(
        error <= 0.005 * exact.abs() + 1e-5,
        "{what}: {got} and should be {exact}"
    );
}

/// Row arrays that hold positions and slots only.
fn rotary_rows(
    bucket: usize,
    positions: &DeviceBuffer<u32>,
    kv_slot: &DeviceBuffer<u32>,
) -> RowArrays {
    let null = DevicePtr::NULL;
    RowArrays {
        bucket,
        tokens: null,
        positions: positions.ptr(),
        kv_slot: kv_slot.ptr(),
        seq_of_row: null,
        vis_begin: null,
        vis_end: null,
        path_len: null,
        paths: null,
        tables: null,
        table_stride: 0,
        committed: null,
        seq_first_row: null,
        seq_rows: null,
        tiles: null,
        tile_count: 0,
        tile_rows: 1,
        longest: 1,
    }
}

#[test]
fn rotates_stores_and_leaves_the_rest_alone() {
    let Some(device) = crate::device() else {
        return;
    };
    for (seed, (heads, kv_heads, head_dim)) in [(9, 3, 64), (8, 2, 128), (4, 2, 16), (3, 1, 40)]
        .into_iter()
        .enumerate()
    {
        for norm in [false, true] {
            let mut case = Case::new(&device, heads, kv_heads, head_dim, seed as u64);
            let kernels = RotaryKernels::load(&device, case.shape).unwrap();
            let (rows, blocks, width) = (24, 7, case.shape.width());
            let qkv_width = (heads + 2 * kv_heads) * head_dim;
            let qkv = case.values(rows * qkv_width);
            let positions: Vec<u32> = (0..rows)
                .map(|row| (row * row * 57) as u32 % 40_960)
                .collect();
            let slots: Vec<u32> = (0..rows)
                .map(|row| {
                    if row % 5 == 4 {
                        NONE
                    } else {
                        (row * 31 % (blocks * 16)) as u32
                    }
                })
                .collect();
            let queries = vec![bf16::NAN; rows * heads * width];
            let queries = DeviceBuffer::from_slice(&device, &queries).unwrap();
            let cache = case.cache(2, blocks);
            let [qkv_at, frequencies, query, key] =
                [&qkv, &case.frequencies, &case.query_norm, &case.key_norm]
                    .map(|values| DeviceBuffer::from_slice(&device, values).unwrap());
            let [positions_at, slots_at] = [&positions, &slots]
                .map(|values| DeviceBuffer::from_slice(&device, values).unwrap());
            let norms = norm.then_some(HeadNorms {
                query: query.ptr(),
                key: key.ptr(),
                eps: EPS,
            });
            let arrays = rotary_rows(rows, &positions_at, &slots_at);
            kernels
                .rotate(
                    qkv_at.ptr(),
                    &arrays,
                    norms,
                    frequencies.ptr(),
                    queries.ptr(),
                    cache.layer(1),
                )
                .unwrap();
            let queries = queries.read().unwrap();
            let elements = cache.elements().read().unwrap();
            let scale = std::f64::consts::LOG2_E / (head_dim as f64).sqrt();
            let mut expected = vec![None; elements.len()];
            for row in 0..rows {
                let own = &qkv[row * qkv_width..(row + 1) * qkv_width];
                let head = |index: usize| &own[index * head_dim..(index + 1) * head_dim];
                for index in 0..heads {
                    let exact = case.rotated(
                        head(index),
                        norm.then_some(&case.query_norm),
                        positions[row],
                    );
                    let got = &queries[(row * heads + index) * width..][..width];
                    for (k, value) in got.iter().enumerate() {
                        let exact = exact.get(k).map_or(0.0, |x| x * scale);
                        near(*value, exact, &format!("query {row} {index} {k}"));
                    }
                }
                if slots[row] == NONE {
                    continue;
                }
                for index in 0..kv_heads {
                    let key = case.rotated(
                        head(heads + index),
                        norm.then_some(&case.key_norm),
                        positions[row],
                    );
                    let at = cache.row_offset(1, false, slots[row] as usize, index);
                    for (k, x) in key.into_iter().enumerate() {
                        expected[at + k] = Some(x);
                    }
                    let at = cache.row_offset(1, true, slots[row] as usize, index);
                    for (k, x) in head(heads + kv_heads + index).iter().enumerate() {
                        expected[at + k] = Some(f64::from(*x));
                    }
                }
            }
            for (at, (got, exact)) in elements.iter().zip(&expected).enumerate() {
                near(*got, exact.unwrap_or(0.0), &format!("cache element {at}"));
            }
        }
    }
}

#[test]
fn a_value_that_is_no_number_stays_with_those_who_see_it() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut case = Case::new(&device, 2, 2, 64, 5);
    let kernels = RotaryKernels::load(&device, case.shape).unwrap();
    let mut qkv = case.values(8 * 6 * 64);
    // The value of row 3's second head.
    qkv[3 * 6 * 64 + 5 * 64 + 40] = f32::INFINITY;
    let cache = case.cache(1, 1);
    let positions = DeviceBuffer::from_slice(&device, &[1u32; 8]).unwrap();
    let slots = DeviceBuffer::from_slice(&device, &[0u32, 1, 2, 3, 4, 5, 6, 7]).unwrap();
    let qkv = DeviceBuffer::from_slice(&device, &qkv).unwrap();
    let frequencies = DeviceBuffer::from_slice(&device, &case.frequencies).unwrap();
    let queries = DeviceBuffer::<bf16>::zeroed(&device, 8 * 2 * 64).unwrap();
    let arrays = rotary_rows(8, &positions, &slots);
    kernels
        .rotate(
            qkv.ptr(),
            &arrays,
            None,
            frequencies.ptr(),
            queries.ptr(),
            cache.layer(0),
        )
        .unwrap();
    let elements = cache.elements().read().unwrap();
    for slot in 0..8 {
        for head in 0..2 {
            let row = |values| &elements[cache.row_offset(0, values, slot, head)..][..64];
            assert!(
                row(true).iter().all(|x| x.is_finite()),
                "value {slot} {head}"
            );
            let broken = (slot, head) == (3, 1);
            assert!(
                row(false).iter().all(|x| x.is_nan() == broken),
                "key {slot} {head}"
            );
        }
    }
}

#[test]
fn context_rows_reach_every_layer() {
    let Some(device) = crate::device() else {
        return;
    };
    for norm in [false, true] {
        let (kv_heads, head_dim, layers, rows, blocks) = (3, 64, 4, 11, 5);
        let mut case = Case::new(&device, 9, kv_heads, head_dim, 17);
        let kernels = RotaryKernels::load(&device, case.shape).unwrap();
        let kv = case.values(rows * layers * 2 * kv_heads * head_dim);
        let key_norms: Vec<f32> = (0..layers * head_dim)
            .map(|i| 0.5 + (i % 17) as f32 / 17.0)
            .collect();
        let positions: Vec<u32> = (0..rows as u32).map(|row| 1_000 + row).collect();
        let slots: Vec<u32> = (0..rows as u32)
            .map(|row| if row == 6 { NONE } else { 79 - 7 * row })
            .collect();
        let cache = case.cache(layers, blocks);
        let [kv_at, frequencies, norms] = [&kv, &case.frequencies, &key_norms]
            .map(|values| DeviceBuffer::from_slice(&device, values).unwrap());
        let [positions_at, slots_at] =
            [&positions, &slots].map(|values| DeviceBuffer::from_slice(&device, values).unwrap());
        let context = ContextRows {
            kv: kv_at.ptr(),
            positions: positions_at.ptr(),
            kv_slot: slots_at.ptr(),
            rows,
        };
        let norms = if norm { norms.ptr() } else { DevicePtr::NULL };
        kernels
            .context(context, norms, EPS, frequencies.ptr(), &cache)
            .unwrap();
        let elements = cache.elements().read().unwrap();
        let mut expected = vec![None; elements.len()];
        for row in (0..rows).filter(|&row| slots[row] != NONE) {
            for layer in 0..layers {
                let own = &kv[(row * layers + layer) * 2 * kv_heads * head_dim..];
                for head in 0..kv_heads {
                    let weights = &key_norms[layer * head_dim..(layer + 1) * head_dim];
                    let key = &own[head * head_dim..(head + 1) * head_dim];
                    let key = case.rotated(key, norm_of(norms, weights), positions[row]);
                    let at = cache.row_offset(layer, false, slots[row] as usize, head);
                    for (k, x) in key.into_iter().enumerate() {
                        expected[at + k] = Some(x);
                    }
                    let at = cache.row_offset(layer, true, slots[row] as usize, head);
                    for k in 0..head_dim {
                        expected[at + k] = Some(f64::from(own[(kv_heads + head) * head_dim + k]));
                    }
                }
            }
        }
        for (at, (got, exact)) in elements.iter().zip(&expected).enumerate() {
            near(*got, exact.unwrap_or(0.0), &format!("cache element {at}"));
        }
    }
}

fn norm_of(norms: DevicePtr, weights: &[f32]) -> Option<&[f32]> {
    (norms != DevicePtr::NULL).then_some(weights)
}

/// Decodes `steps` rows, each with new rows in host memory, as one graph or with a wait behind every kernel.
fn decode(overlap: bool) -> Option<Vec<u16>> {
    let device = crate::device()?;
    let mut case = Case::new(&device, 9, 3, 64, 23);
    let (shape, layers, steps) = (case.shape, 12, 40);
    let rotary = RotaryKernels::load(&device, shape).unwrap();
    let attention = AttentionKernels::load(&device, shape).unwrap();
    let copies = RowKernels::load(&device).unwrap();
    let cache = case.cache(layers, 32);
    let frequencies = DeviceBuffer::from_slice(&device, &case.frequencies).unwrap();
    let mut pool = BlockPool::new(32);
    let mut table = BlockTable::default();
    pool.grow(&mut table, 400).unwrap();
    let limits = RowLimits {
        rows: 8,
        sequences: 1,
        blocks: 25,
    };
    let mut buffers = RowBuffers::new(&device, limits).unwrap();
    let depth = 9 * 64;
    let qkv = DeviceBuffer::<f32>::zeroed(&device, layers * 8 * 15 * 64).unwrap();
    let queries = DeviceBuffer::<bf16>::zeroed(&device, 8 * depth).unwrap();
    let packed = DeviceBuffer::<bf16>::zeroed(&device, layers * PackedRows::len(8, depth)).unwrap();
    let mut graph: Option<Graph> = None;
    let mut all = Vec::new();
    let mut committed = 100;
    for step in 0..steps {
        let new = 1 + step % 8;
        let mut writer = buffers.writer();
        writer.sequence(&table, committed).unwrap();
        for row in 0..new {
            let (position, slot) = (committed + row, committed + row);
            let sight = Sight::Range(0..slot + 1);
            writer
                .row(&NewRow {
                    token: 0,
                    position,
                    slot,
                    sight,
                })
                .unwrap();
        }
        let mut extent = writer.finish(5);
        extent.tile_count = 2;
        extent.longest = 400;
        let rows = buffers.arrays(extent);
        qkv.write(&case.values(qkv.len())).unwrap();
        let launches = || -> Result<(), CudaError> {
            let pause = || {
                if overlap {
                    Ok(())
                } else {
                    device.synchronize()
                }
            };
            buffers.upload(&copies, false)?;
            pause()?;
            for layer in 0..layers {
                let values = qkv.offset(layer * 8 * 15 * 64);
                let at = cache.layer(layer);
                let out = packed.offset(layer * PackedRows::len(8, depth));
                let out = PackedRows::new(out, depth, 8);
                // Stands for the linear layer in front of the rotation: a kernel that lets others start early.
                copies.copy(values, values, 8 * 15 * 64)?;
                pause()?;
                rotary.rotate(values, &rows, None, frequencies.ptr(), queries.ptr(), at)?;
                pause()?;
                attention.attend(queries.ptr(), at, &rows, Visibility::Rows, out)?;
                pause()?;
            }
            Ok(())
        };
        if overlap {
            if graph.is_none() {
                graph = Some(Graph::capture(&device, launches).unwrap());
            }
            graph.as_ref().unwrap().launch().unwrap();
        } else {
            launches().unwrap();
        }
        let out = packed.read().unwrap();
        for layer in 0..layers {
            let base = layer * PackedRows::len(8, depth);
            let rows = PackedRows::new(DevicePtr::NULL, depth, 8);
            let place = |row, k| base + super::attention::scene::packed_place(row, k, rows);
            all.extend((0..new * depth).map(|i| out[place(i / depth, i % depth)].to_bits()));
        }
        // Sometimes all rows stay, sometimes only the first.
        committed += if step % 3 == 0 { new } else { 1 };
    }
    Some(all)
}

#[test]
fn overlapping_kernels_see_the_new_keys() {
    let Some(one_by_one) = decode(false) else {
        return;
    };
    let overlapped = decode(true).unwrap();
    assert_eq!(one_by_one.len(), overlapped.len());
    let wrong = (0..overlapped.len()).find(|&i| one_by_one[i] != overlapped[i]);
    assert_eq!(wrong, None, "first element that differs");
}
