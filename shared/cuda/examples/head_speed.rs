//! Time of the small kernels between the head and the next pass, on the device at hand: selection, draft, acceptance.
//!
//! `cargo run --release -p treespec-cuda --example head_speed`. Each figure is the median over replays of a graph of equal
//! launches, per launch; inputs stay in the cache, as they do behind the head's matrix product.

use std::process::ExitCode;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::{
    AcceptanceBuffers, AcceptanceKernels, BatchState, CudaError, Device, DeviceBuffer, DevicePtr,
    DraftCandidates, DraftRecords, DraftRows, DraftTreeKernels, Event, Graph, HeadLogits,
    HeadSelectKernels, HeadTopBuffers, RootRows, TargetChoices, VerifiedRows,
};

const LAUNCHES: usize = 200;
const REPLAYS: usize = 21;
const DEPTHS: usize = 15;
const TABLE: usize = 256;
const NONE: u32 = u32::MAX;

fn main() -> ExitCode {
    let measured = Device::open(0).and_then(|device| {
        println!(
            "{}, µs per launch (median, fastest, slowest)",
            device.name()
        );
        head(&device)?;
        drafts(&device)?;
        endings(&device)
    });
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the time of one of the launches that `launch` makes.
fn time(
    device: &Arc<Device>,
    what: &str,
    launch: impl Fn() -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let graph = Graph::capture(device, || (0..LAUNCHES).try_for_each(|_| launch()))?;
    graph.launch()?;
    device.synchronize()?;
    let (start, end) = (Event::new(device)?, Event::new(device)?);
    let mut times = Vec::with_capacity(REPLAYS);
    for _ in 0..REPLAYS {
        start.record(device.stream())?;
        graph.launch()?;
        end.record(device.stream())?;
        device.synchronize()?;
        times.push(1e3 * Event::elapsed_ms(&start, &end)? / LAUNCHES as f32);
    }
    times.sort_by(f32::total_cmp);
    let (fastest, slowest) = (times[0], times[REPLAYS - 1]);
    println!(
        "{what:<58} {:>7.2} {fastest:>7.2} {slowest:>7.2}",
        times[REPLAYS / 2]
    );
    Ok(())
}

fn head(device: &Arc<Device>) -> Result<(), CudaError> {
    for vocab in [49_152usize, 151_936, 248_320] {
        let kernels = HeadSelectKernels::load(device, vocab)?;
        let (stride, groups) = (vocab.next_multiple_of(64), kernels.groups());
        for (rows, ks) in [(DEPTHS, &[1usize, 16, 64, 256][..]), (64, &[1])] {
            let mut random = StdRng::seed_from_u64(1);
            let logits: Vec<f32> = (0..rows * stride)
                .map(|_| (0..4).map(|_| random.random_range(-4.0f32..4.0)).sum())
                .collect();
            let maxima: Vec<f32> = (0..rows * groups)
                .map(|at| {
                    let begin = at / groups * stride + at % groups * 64;
                    let end = (begin + 64).min(at / groups * stride + vocab);
                    logits[begin..end].iter().copied().fold(f32::MIN, f32::max)
                })
                .collect();
            let logits = DeviceBuffer::from_slice(device, &logits)?;
            let group_max = DeviceBuffer::from_slice(device, &maxima)?;
            let group_sum = DeviceBuffer::from_slice(device, &vec![2.5f32; rows * groups])?;
            for &k in ks {
                let out = HeadTopBuffers::new(device, rows, k)?;
                for (sums, name) in [(group_sum.ptr(), "with"), (DevicePtr::NULL, "without")] {
                    let head = HeadLogits {
                        logits: logits.ptr(),
                        stride,
                        group_max: group_max.ptr(),
                        group_sum: sums,
                        group_stride: groups,
                    };
                    let what = format!("select V {vocab}, {rows} rows, k {k}, {name} normaliser");
                    time(device, &what, || {
                        kernels.select(head, rows, k, DevicePtr::NULL, out.top())
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// Sequences with a root, some committed rows and a block table.
struct Sequences {
    roots: DeviceBuffer<u32>,
    committed: DeviceBuffer<u32>,
    tables: DeviceBuffer<u32>,
}

impl Sequences {
    fn new(device: &Arc<Device>, sequences: usize) -> Result<Self, CudaError> {
        let tables: Vec<u32> = (0..(sequences * TABLE) as u32).collect();
        Ok(Self {
            roots: DeviceBuffer::from_slice(device, &vec![1; sequences])?,
            committed: DeviceBuffer::from_slice(device, &vec![1_000; sequences])?,
            tables: DeviceBuffer::from_slice(device, &tables)?,
        })
    }

    fn state(&self) -> BatchState {
        BatchState {
            roots: self.roots.ptr(),
            committed: self.committed.ptr(),
            max_depths: DevicePtr::NULL,
            tables: self.tables.ptr(),
            table_stride: TABLE,
        }
    }
}

/// Row arrays of a pass.
struct Rows {
    words: [DeviceBuffer<u32>; 9],
    paths: DeviceBuffer<u16>,
}

impl Rows {
    fn new(device: &Arc<Device>, sequences: usize, rows: usize) -> Result<Self, CudaError> {
        let words = (0..9)
            .map(|_| DeviceBuffer::zeroed(device, sequences * rows * 4))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            words: words
                .try_into()
                .unwrap_or_else(|_| unreachable!("nine were made")),
            paths: DeviceBuffer::zeroed(device, sequences * rows * 64)?,
        })
    }

    fn draft_rows(&self, rows: usize) -> DraftRows {
        let [
            tokens,
            positions,
            kv_slot,
            path_len,
            vis_begin,
            vis_end,
            parents,
            seq_rows,
            tiles,
        ] = self.words.each_ref().map(DeviceBuffer::ptr);
        DraftRows {
            rows,
            tokens,
            positions,
            kv_slot,
            path_len,
            paths: self.paths.ptr(),
            vis_begin,
            vis_end,
            parents,
            seq_rows,
            tiles,
            tile_rows: 4,
        }
    }
}

/// Candidates whose best has probability `best` and whose others fall geometrically, with some noise.
fn candidates(
    device: &Arc<Device>,
    sequences: usize,
    count: usize,
    best: f32,
) -> Result<HeadTopBuffers, CudaError> {
    let mut random = StdRng::seed_from_u64(2);
    let rows = sequences * DEPTHS;
    let out = HeadTopBuffers::new(device, rows, count)?;
    let logits: Vec<f32> = (0..rows)
        .flat_map(|_| {
            let mut row: Vec<f32> = (0..count)
                .map(|rank| {
                    best.ln() + rank as f32 * (1.0 - best).ln() + random.random_range(-0.2..0.2)
                })
                .collect();
            row.sort_by(|a, b| b.total_cmp(a));
            row
        })
        .collect();
    out.ids
        .write(&(0..(rows * count) as u32).collect::<Vec<_>>())?;
    out.logits.write(&logits)?;
    Ok(out)
}

fn drafts(device: &Arc<Device>) -> Result<(), CudaError> {
    let kernels = DraftTreeKernels::load(device)?;
    for sequences in [1, 8, 32] {
        let state = Sequences::new(device, sequences)?;
        for (budget, best) in [
            (16, 0.6),
            (31, 0.6),
            (63, 0.6),
            (63, 0.1),
            (63, 0.9),
            (127, 0.6),
            (255, 0.6),
        ] {
            let top = candidates(device, sequences, budget, best)?;
            let rows = Rows::new(device, sequences, budget + 1)?;
            let records = DraftRecords::new(device, sequences, budget + 1)?;
            let candidates = DraftCandidates {
                top: top.top(),
                rows: DEPTHS,
                depths: DEPTHS,
                count: budget,
            };
            let out = rows.draft_rows(budget + 1);
            let what = format!("tree of {budget}, best {best}, {sequences} sequences");
            time(device, &what, || {
                kernels.tree(
                    sequences,
                    budget,
                    candidates,
                    state.state(),
                    out,
                    records.device_ptr(),
                )
            })?;
            if budget == 63 {
                time(device, &format!("{what}, no record"), || {
                    kernels.tree(
                        sequences,
                        budget,
                        candidates,
                        state.state(),
                        out,
                        DevicePtr::NULL,
                    )
                })?;
            }
        }
        let top = candidates(device, sequences, 1, 0.6)?;
        let rows = Rows::new(device, sequences, DEPTHS + 1)?;
        let records = DraftRecords::new(device, sequences, DEPTHS + 1)?;
        let candidates = DraftCandidates {
            top: top.top(),
            rows: DEPTHS,
            depths: DEPTHS,
            count: 1,
        };
        time(
            device,
            &format!("chain of {DEPTHS}, {sequences} sequences"),
            || {
                kernels.chain(
                    sequences,
                    candidates,
                    state.state(),
                    rows.draft_rows(DEPTHS + 1),
                    records.device_ptr(),
                )
            },
        )?;
    }
    Ok(())
}

/// Acceptance of chains of which half is accepted, and plain decoding.
fn endings(device: &Arc<Device>) -> Result<(), CudaError> {
    let kernels = AcceptanceKernels::load(device)?;
    for (sequences, rows) in [(1, 16), (1, 64), (1, 256), (32, 16), (32, 64)] {
        let state = Sequences::new(device, sequences)?;
        let out = AcceptanceBuffers::new(device, sequences)?;
        let all = sequences * rows;
        let chain_length = rows.min(DEPTHS + 1) as u32;
        let tokens: Vec<u32> = (0..all).map(|at| (at % rows) as u32).collect();
        let parents: Vec<u32> = tokens
            .iter()
            .map(|&node| if node == 0 { NONE } else { node - 1 })
            .collect();
        let choices: Vec<u32> = tokens
            .iter()
            .map(|&node| {
                if node < chain_length / 2 {
                    node + 1
                } else {
                    1_000
                }
            })
            .collect();
        let tokens = DeviceBuffer::from_slice(device, &tokens)?;
        let parents = DeviceBuffer::from_slice(device, &parents)?;
        let choices = DeviceBuffer::from_slice(device, &choices)?;
        let logits = DeviceBuffer::from_slice(device, &vec![1.0f32; all])?;
        let choices = TargetChoices {
            tokens: choices.ptr(),
            stride: 1,
            logits: logits.ptr(),
            logit_stride: 1,
            normaliser: DevicePtr::NULL,
        };
        let verified = VerifiedRows {
            rows,
            tokens: tokens.ptr(),
            parents: parents.ptr(),
        };
        time(
            device,
            &format!("accept of {rows} rows, {sequences} sequences"),
            || kernels.accept(sequences, choices, verified, state.state(), &out),
        )?;
        let next = Rows::new(device, sequences, 1)?;
        let next = next.draft_rows(1);
        let next = RootRows {
            tokens: next.tokens,
            positions: next.positions,
            kv_slot: next.kv_slot,
            vis_begin: next.vis_begin,
            vis_end: next.vis_end,
        };
        time(device, &format!("advance of {sequences} sequences"), || {
            kernels.advance(sequences, Some(choices), state.state(), next, &out)
        })?;
    }
    Ok(())
}
