//! The head's product, the selection and the tree as CUDA graphs.

use std::{sync::Arc, time::Instant};

use anyhow::{Result, ensure};
use treespec_cuda::{
    BatchState, CudaError, Device, DeviceBuffer, DevicePtr, DraftCandidates, DraftRecords,
    DraftRows, DraftTreeKernels, Epilogue, Event, Graph, HeadLogits, HeadSelectKernels,
    HeadTopBuffers, Layout, LinearKernels, PackedLinear, PackedRows, RowKernels, row_bucket,
};

use super::{Samples, TopkArgs};
use crate::bench::run_log::rotated;

/// Drafts in one graph: what starting a graph costs is spread over them.
const DRAFTS: usize = 20;
/// Logits of a group of the head's epilogue.
const GROUP: usize = 64;
/// Entries of a node's path.
const PATH: usize = 64;
/// Rows in the cache before the tree: they only decide positions and slots.
const COMMITTED: u32 = 512;
/// Standard deviation of the logits: the best tokens of a row differ by about one, as a drafter's do, and trees get deep.
const LOGIT_SPREAD: f32 = 4.0;
/// Rows of a KV block.
const BLOCK: usize = 16;

/// All vocabularies and parts in turn, again and again.
pub(super) fn measure(device: &Arc<Device>, args: &TopkArgs) -> Result<Vec<Samples>> {
    let linear = LinearKernels::load(device)?;
    let trees = DraftTreeKernels::load(device)?;
    let cases = args
        .vocab
        .iter()
        .map(|&vocab| Case::new(device, &linear, &trees, vocab, args))
        .collect::<Result<Vec<_>>>()?;
    let mut samples: Vec<Samples> = cases
        .iter()
        .map(|case| Samples {
            weight_bytes: case.buffers.weight_bytes(),
            ..Default::default()
        })
        .collect();
    for repetition in 0..args.repetitions as usize {
        for (case, samples) in cases.iter().zip(&mut samples) {
            for part in rotated(Part::ALL.len(), repetition) {
                let microseconds = case.device_microseconds(part)?;
                let of_part = match Part::ALL[part] {
                    Part::Gemm => &mut samples.gemm,
                    Part::Select => &mut samples.select,
                    Part::Tree => &mut samples.tree,
                };
                of_part.push(microseconds);
            }
            samples.total.push(case.total_microseconds()?);
        }
    }
    Ok(samples)
}

/// How far a draft goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Gemm,
    Select,
    Tree,
}

impl Part {
    const ALL: [Self; 3] = [Self::Gemm, Self::Select, Self::Tree];
}

/// One vocabulary.
struct Case {
    device: Arc<Device>,
    /// [`DRAFTS`] drafts up to each of [`Part::ALL`].
    graphs: Vec<Graph>,
    /// One whole draft.
    once: Graph,
    buffers: Buffers,
}

impl Case {
    fn new(
        device: &Arc<Device>,
        linear: &LinearKernels,
        trees: &DraftTreeKernels,
        vocab: usize,
        args: &TopkArgs,
    ) -> Result<Self> {
        let select = HeadSelectKernels::load(device, vocab)?;
        let buffers = Buffers::new(device, vocab, args)?;
        let draft = |part| buffers.draft(linear, &select, trees, args, part);
        // Not captured: a kernel's first launch may load it.
        draft(Part::Tree)?;
        device.synchronize()?;
        buffers.check(args.k)?;
        let graphs = Part::ALL
            .iter()
            .map(|&part| Graph::capture(device, || (0..DRAFTS).try_for_each(|_| draft(part))))
            .collect::<Result<Vec<_>, CudaError>>()?;
        let once = Graph::capture(device, || draft(Part::Tree))?;
        Ok(Self {
            device: device.clone(),
            graphs,
            once,
            buffers,
        })
    }

    /// Of one draft up to the part with this index.
    fn device_microseconds(&self, part: usize) -> Result<f64, CudaError> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        let graph = &self.graphs[part];
        // The device is busy with this one until the host has queued the one that is timed.
        graph.launch()?;
        start.record(self.device.stream())?;
        graph.launch()?;
        end.record(self.device.stream())?;
        self.device.synchronize()?;
        let milliseconds = f64::from(Event::elapsed_ms(&start, &end)?);
        Ok(milliseconds * 1e3 / DRAFTS as f64)
    }

    /// Of one draft by the host's clock.
    fn total_microseconds(&self) -> Result<f64> {
        let start = Instant::now();
        self.once.launch()?;
        self.device.synchronize()?;
        let tree = self.buffers.records.tree(0)?;
        let seconds = start.elapsed().as_secs_f64();
        drop(tree);
        Ok(seconds * 1e6)
    }
}

/// Device memory of one vocabulary.
struct Buffers {
    head: PackedLinear,
    hidden: DeviceBuffer<u16>,
    logits: DeviceBuffer<f32>,
    group_max: DeviceBuffer<f32>,
    group_sum: DeviceBuffer<f32>,
    top: HeadTopBuffers,
    roots: DeviceBuffer<u32>,
    committed: DeviceBuffer<u32>,
    table: DeviceBuffer<u32>,
    /// Tokens, positions, slots, path lengths and parents, each of `1 + k` rows.
    rows: DeviceBuffer<u32>,
    paths: DeviceBuffer<u16>,
    seq_rows: DeviceBuffer<u32>,
    records: DraftRecords,
}

impl Buffers {
    fn new(device: &Arc<Device>, vocab: usize, args: &TopkArgs) -> Result<Self> {
        let nb = row_bucket(args.rows);
        let (ld, groups) = (vocab.next_multiple_of(GROUP), vocab.div_ceil(GROUP));
        // Uniform values in -1..1 have a variance of 1/3.
        let scale = LOGIT_SPREAD * (3.0 / args.hidden as f32).sqrt();
        let seed = vocab as u64;
        let head = PackedLinear::random(device, vocab, args.hidden, Layout::Head, seed, scale)?;
        let hidden = DeviceBuffer::zeroed(device, PackedRows::len(args.rows, args.hidden))?;
        let values: Vec<f32> = (0..args.rows * args.hidden).map(noise).collect();
        let source = DeviceBuffer::from_slice(device, &values)?;
        let packed = PackedRows::new(hidden.ptr(), args.hidden, nb);
        RowKernels::load(device)?.pack(source.ptr(), args.rows, args.hidden, packed)?;
        // The source is freed at the end of this function.
        device.synchronize()?;
        let tree_rows = 1 + args.k;
        let blocks = (COMMITTED as usize + tree_rows).div_ceil(BLOCK) as u32;
        let table: Vec<u32> = (0..blocks).collect();
        Ok(Self {
            head,
            hidden,
            logits: DeviceBuffer::zeroed(device, nb * ld)?,
            group_max: DeviceBuffer::zeroed(device, nb * groups)?,
            group_sum: DeviceBuffer::zeroed(device, nb * groups)?,
            top: HeadTopBuffers::new(device, nb, args.k)?,
            roots: DeviceBuffer::from_slice(device, &[1])?,
            committed: DeviceBuffer::from_slice(device, &[COMMITTED])?,
            table: DeviceBuffer::from_slice(device, &table)?,
            rows: DeviceBuffer::zeroed(device, 5 * tree_rows)?,
            paths: DeviceBuffer::zeroed(device, PATH * tree_rows)?,
            seq_rows: DeviceBuffer::zeroed(device, 1)?,
            records: DraftRecords::new(device, 1, tree_rows)?,
        })
    }

    /// Of the head, without what its layout pads.
    fn weight_bytes(&self) -> u64 {
        (self.head.rows() * self.head.depth() * size_of::<u16>()) as u64
    }

    /// Puts one draft up to `part` into the stream.
    fn draft(
        &self,
        linear: &LinearKernels,
        select: &HeadSelectKernels,
        trees: &DraftTreeKernels,
        args: &TopkArgs,
        part: Part,
    ) -> Result<(), CudaError> {
        let hidden = PackedRows::new(self.hidden.ptr(), args.hidden, row_bucket(args.rows));
        let vocab = self.head.rows();
        let head = HeadLogits {
            logits: self.logits.ptr(),
            stride: vocab.next_multiple_of(GROUP),
            group_max: self.group_max.ptr(),
            group_sum: self.group_sum.ptr(),
            group_stride: vocab.div_ceil(GROUP),
        };
        let epilogue = Epilogue::Head {
            logits: head.logits,
            ld: head.stride,
            group_max: head.group_max,
            group_sum: head.group_sum,
        };
        linear.launch(&self.head, hidden, None, epilogue)?;
        if part >= Part::Select {
            select.select(head, args.rows, args.k, DevicePtr::NULL, self.top.top())?;
        }
        if part >= Part::Tree {
            let candidates = DraftCandidates {
                top: self.top.top(),
                rows: args.rows,
                depths: args.rows,
                count: args.k,
            };
            let records = self.records.device_ptr();
            trees.tree(
                1,
                args.k,
                candidates,
                self.state(),
                self.draft_rows(),
                records,
            )?;
        }
        Ok(())
    }

    fn state(&self) -> BatchState {
        BatchState {
            roots: self.roots.ptr(),
            committed: self.committed.ptr(),
            max_depths: DevicePtr::NULL,
            tables: self.table.ptr(),
            table_stride: self.table.len(),
        }
    }

    fn draft_rows(&self) -> DraftRows {
        let rows = self.rows.len() / 5;
        DraftRows {
            rows,
            tokens: self.rows.offset(0),
            positions: self.rows.offset(rows),
            kv_slot: self.rows.offset(2 * rows),
            path_len: self.rows.offset(3 * rows),
            parents: self.rows.offset(4 * rows),
            paths: self.paths.ptr(),
            vis_begin: DevicePtr::NULL,
            vis_end: DevicePtr::NULL,
            seq_rows: self.seq_rows.ptr(),
            tiles: DevicePtr::NULL,
            tile_rows: BLOCK,
        }
    }

    /// A draft that is not a full tree would measure something else.
    fn check(&self, k: usize) -> Result<()> {
        let nodes = self.records.tree(0)?.budget();
        ensure!(
            nodes == k,
            "the device built a tree of {nodes} nodes instead of {k}"
        );
        Ok(())
    }
}

/// Values in -1..1 without a pattern that a product could see.
fn noise(index: usize) -> f32 {
    let mut bits = (index as u32).wrapping_add(1).wrapping_mul(0x9e37_79b9);
    bits ^= bits >> 15;
    bits = bits.wrapping_mul(0x85eb_ca6b);
    bits ^= bits >> 13;
    bits as f32 / (u32::MAX as f32 / 2.0) - 1.0
}
