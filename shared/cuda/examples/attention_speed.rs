//! Times attention inside CUDA graphs for every way to share the work, on random trees and chains.
//!
//! `attention_speed [--top N]` prints, per shape, rows and context, the plan that is chosen and the fastest ones.

use std::error::Error;
use std::sync::Arc;

use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::{
    AttentionKernels, AttentionPlan, AttentionShape, CudaError, Device, DeviceBuffer, Event, Graph,
    KvCache, KvShape, PackedRows, RowArrays, RowBuffers, RowKernels, RowLimits, Visibility,
    row_bucket,
};
use treespec_engine::{BlockPool, BlockTable, RowBatch, RowShape, SequenceRows};
use treespec_tree::TokenTree;

/// Launches per graph.
const LAUNCHES: usize = 30;

struct Bench {
    device: Arc<Device>,
    kernels: AttentionKernels,
    shape: AttentionShape,
    cache: KvCache,
    queries: DeviceBuffer<bf16>,
    out: DeviceBuffer<bf16>,
}

/// A tree like those of a drafter: most nodes extend the best path.
fn tree(random: &mut StdRng, nodes: usize) -> TokenTree {
    let mut tree = TokenTree::root_only(0);
    while tree.len() < nodes {
        let parent = if random.random_range(0..2) == 0 {
            tree.len() - 1
        } else {
            random.random_range(0..tree.len())
        };
        if tree.depths()[parent] < 15 {
            let _ = tree.push(parent, random.random_range(0..40_000), 0.0);
        }
    }
    tree
}

impl Bench {
    fn time(&self, plan: Option<AttentionPlan>, rows: &RowArrays) -> Result<f64, Box<dyn Error>> {
        let out = PackedRows::new(
            self.out.ptr(),
            self.shape.heads * self.shape.head_dim,
            rows.bucket,
        );
        let layers = self.cache.shape().layers;
        let launches = || -> Result<(), CudaError> {
            for launch in 0..LAUNCHES {
                let layer = self.cache.layer(launch % layers);
                let queries = self.queries.ptr();
                match plan {
                    Some(plan) => {
                        self.kernels.attend_as(
                            plan,
                            queries,
                            layer,
                            rows,
                            Visibility::Rows,
                            out,
                        )?;
                    }
                    None => self
                        .kernels
                        .attend(queries, layer, rows, Visibility::Rows, out)?,
                }
            }
            Ok(())
        };
        let graph = Graph::capture(&self.device, launches)?;
        let mut times = Vec::new();
        for _ in 0..6 {
            let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
            start.record(self.device.stream())?;
            graph.launch()?;
            end.record(self.device.stream())?;
            end.synchronize()?;
            times.push(f64::from(Event::elapsed_ms(&start, &end)?) * 1e3 / LAUNCHES as f64);
        }
        times.remove(0);
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open(0)?;
    let rows_kernels = RowKernels::load(&device)?;
    let mut random = StdRng::seed_from_u64(1);
    let shapes = [("smollm2", 9, 3, 64), ("qwen3-8b", 32, 8, 128)];
    for (name, heads, kv_heads, head_dim) in shapes {
        let shape = AttentionShape {
            heads,
            kv_heads,
            head_dim,
        };
        let mut random_values = |count: usize| -> Vec<bf16> {
            let values: Vec<bf16> = (0..4_099)
                .map(|_| bf16::from_f32(random.random_range(-1.0f32..1.0)))
                .collect();
            values.into_iter().cycle().take(count).collect()
        };
        let kv = KvShape {
            layers: 10,
            blocks: 160,
            kv_heads,
            head_dim,
        };
        let cache = KvCache::new(&device, kv)?;
        let elements = random_values(cache.elements().len());
        cache.elements().write(&elements)?;
        let queries = random_values(256 * heads * head_dim);
        let bench = Bench {
            kernels: AttentionKernels::load(&device, shape)?,
            queries: DeviceBuffer::from_slice(&device, &queries)?,
            out: DeviceBuffer::zeroed(&device, PackedRows::len(256, heads * head_dim))?,
            device: device.clone(),
            cache,
            shape,
        };
        for context in [256usize, 512, 2_000] {
            for nodes in [1usize, 16, 32, 64] {
                for chain in [true, false] {
                    if nodes == 1 && !chain {
                        continue;
                    }
                    let mut pool = BlockPool::new(160);
                    let mut table = BlockTable::default();
                    pool.grow(&mut table, context + nodes)?;
                    let draft = tree(&mut StdRng::seed_from_u64(7), nodes);
                    let ancestors = draft.ancestors();
                    let head = vec![None; nodes];
                    let sequence = SequenceRows {
                        table: &table,
                        committed: context,
                        tokens: draft.tokens(),
                        shape: if chain {
                            RowShape::Chain
                        } else {
                            RowShape::tree(&draft, &ancestors)
                        },
                        head: &head,
                        sampling: None,
                        features: false,
                    };
                    let batch = RowBatch {
                        sequences: vec![sequence],
                    };
                    let mut timed = Vec::new();
                    let mut chosen = String::new();
                    let default = bench.kernels.tile_rows(1, nodes, 1_024, !chain);
                    for tile_rows in 1..=16 / shape.group() {
                        let limits = RowLimits {
                            rows: row_bucket(nodes),
                            sequences: 1,
                            blocks: 160,
                        };
                        let mut buffers = RowBuffers::new(&device, limits)?;
                        let extent = buffers.fill(&batch, tile_rows)?;
                        buffers.upload(&rows_kernels, extent.paths)?;
                        let mut rows = buffers.arrays(extent);
                        device.synchronize()?;
                        if tile_rows == default {
                            rows.longest = 1_024;
                            let us = bench.time(None, &rows)?;
                            chosen = format!("chosen {us:6.2} us with tiles of {tile_rows} rows");
                        }
                        for plan in AttentionPlan::candidates() {
                            if let Ok(us) = bench.time(Some(plan), &rows) {
                                timed.push((us, tile_rows, plan));
                            }
                        }
                    }
                    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
                    let kind = if chain { "chain" } else { "tree" };
                    println!("{name} context {context} {kind} of {nodes}: {chosen}; fastest:");
                    for (us, tile_rows, plan) in timed.iter().take(4) {
                        println!("    {us:6.2} us, tiles of {tile_rows} rows, {plan:?}");
                    }
                }
            }
        }
    }
    Ok(())
}
