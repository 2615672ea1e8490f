//! Sequences in a cache among garbage, run through the attention kernels and through their definition in f64.

use std::sync::Arc;

use half::bf16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_cuda::{
    AttentionKernels, AttentionPlan, AttentionShape, CudaError, Device, DeviceBuffer, KvCache,
    KvShape, NewRow, PackedRows, RowArrays, RowBuffers, RowKernels, RowLimits, Sight, Visibility,
};
use treespec_engine::{BlockPool, BlockTable};
use treespec_tree::TokenTree;

/// The kernels for one shape.
pub(crate) struct Model {
    pub(crate) device: Arc<Device>,
    pub(crate) shape: AttentionShape,
    pub(crate) kernels: AttentionKernels,
    pub(crate) rows: RowKernels,
}

impl Model {
    pub(crate) fn new(
        device: &Arc<Device>,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Self {
        let shape = AttentionShape {
            heads,
            kv_heads,
            head_dim,
        };
        Self {
            kernels: AttentionKernels::load(device, shape).unwrap(),
            rows: RowKernels::load(device).unwrap(),
            device: device.clone(),
            shape,
        }
    }

    /// Most rows of a tile.
    pub(crate) fn most_tile_rows(&self) -> usize {
        16 / self.shape.group()
    }

    pub(crate) fn query_width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }
}

/// Random numbers of about unit size, exact in bf16.
pub(crate) struct Noise(pub(crate) StdRng);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    pub(crate) fn values(&mut self, count: usize, size: f32) -> Vec<bf16> {
        let mut one = || {
            let sum: f32 = (0..4).map(|_| self.0.random_range(-1.0f32..1.0)).sum();
            bf16::from_f32(sum * size)
        };
        (0..count).map(|_| one()).collect()
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0.random_range(0..limit)
    }

    pub(crate) fn query(&mut self, model: &Model) -> Vec<bf16> {
        let size = 2.0 * std::f32::consts::LOG2_E / (model.shape.head_dim as f32).sqrt();
        self.values(model.query_width(), size)
    }

    pub(crate) fn token(&mut self, model: &Model) -> Token {
        let width = model.shape.kv_heads * model.shape.head_dim;
        Token {
            key: self.values(width, 1.0),
            value: self.values(width, 1.0),
        }
    }

    pub(crate) fn tokens(&mut self, model: &Model, count: usize) -> Vec<Token> {
        (0..count).map(|_| self.token(model)).collect()
    }

    /// Paths of the nodes of a random tree of up to `depth` levels below the root.
    pub(crate) fn tree_paths(&mut self, nodes: usize, depth: u32) -> Vec<Vec<u16>> {
        let mut tree = TokenTree::root_only(0);
        while tree.len() < nodes {
            let parent = match self.below(3) {
                0 => self.below(tree.len()),
                _ => tree.len() - 1,
            };
            if tree.depth(parent) < depth {
                tree.push(parent, tree.len() as u32, 0.0).unwrap();
            }
        }
        let path = |node| tree.path(node).iter().map(|&n| n as u16).collect();
        (0..nodes).map(path).collect()
    }
}

/// Key and value of a position, `[kv_heads * head_dim]`.
#[derive(Clone)]
pub(crate) struct Token {
    pub(crate) key: Vec<bf16>,
    pub(crate) value: Vec<bf16>,
}

/// What a row of a scene sees.
#[derive(Clone)]
pub(crate) enum See {
    Range(std::ops::Range<usize>),
    Path(Vec<u16>),
}

/// A row and what is in its slot.
#[derive(Clone)]
pub(crate) struct Row {
    pub(crate) query: Vec<bf16>,
    pub(crate) token: Token,
    pub(crate) see: See,
}

/// A sequence: what is committed, and the rows behind it.
#[derive(Clone)]
pub(crate) struct Sequence {
    pub(crate) committed: Vec<Token>,
    pub(crate) rows: Vec<Row>,
}

impl Sequence {
    /// Rows that see all before them and themselves.
    pub(crate) fn chain(model: &Model, noise: &mut Noise, committed: usize, rows: usize) -> Self {
        let row = |noise: &mut Noise, i: usize| Row {
            query: noise.query(model),
            token: noise.token(model),
            see: See::Range(0..committed + i + 1),
        };
        Self {
            committed: noise.tokens(model, committed),
            rows: (0..rows).map(|i| row(noise, i)).collect(),
        }
    }

    /// Nodes of a random tree.
    pub(crate) fn tree(
        model: &Model,
        noise: &mut Noise,
        committed: usize,
        nodes: usize,
        depth: u32,
    ) -> Self {
        let mut sequence = Self::chain(model, noise, committed, nodes);
        let paths = noise.tree_paths(nodes, depth);
        for (row, path) in sequence.rows.iter_mut().zip(paths) {
            row.see = See::Path(path);
        }
        sequence
    }

    fn slots(&self) -> usize {
        self.committed.len() + self.rows.len()
    }

    fn at(&self, slot: usize) -> &Token {
        match slot.checked_sub(self.committed.len()) {
            None => &self.committed[slot],
            Some(row) => &self.rows[row].token,
        }
    }

    /// The tokens that a row sees, in position order.
    fn seen(&self, row: usize) -> Vec<&Token> {
        match &self.rows[row].see {
            See::Range(range) => range.clone().map(|slot| self.at(slot)).collect(),
            See::Path(path) => {
                let nodes = path.iter().map(|&node| &self.rows[usize::from(node)].token);
                self.committed.iter().chain(nodes).collect()
            }
        }
    }

    /// The definition, `[heads * head_dim]`.
    pub(crate) fn exact(&self, shape: AttentionShape, row: usize) -> Vec<f64> {
        let seen = self.seen(row);
        let dim = shape.head_dim;
        let mut out = Vec::with_capacity(shape.heads * dim);
        for (head, query) in self.rows[row].query.chunks(dim).enumerate() {
            let own = head / shape.group() * dim..(head / shape.group() + 1) * dim;
            let scores: Vec<f64> = seen
                .iter()
                .map(|token| dot(query, &token.key[own.clone()]))
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp2()).collect();
            let total: f64 = weights.iter().sum();
            let mut sums = vec![0.0; dim];
            for (weight, token) in weights.iter().zip(&seen) {
                for (sum, value) in sums.iter_mut().zip(&token.value[own.clone()]) {
                    *sum += weight / total * f64::from(*value);
                }
            }
            out.extend(sums);
        }
        out
    }
}

fn dot(a: &[bf16], b: &[bf16]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum()
}

/// Sequences on the device.
pub(crate) struct Scene<'a> {
    model: &'a Model,
    sequences: &'a [Sequence],
    tables: Vec<BlockTable>,
    cache: KvCache,
    buffers: RowBuffers,
}

impl<'a> Scene<'a> {
    /// Puts the sequences into scattered blocks of a cache that is full of numbers of others.
    pub(crate) fn new(model: &'a Model, sequences: &'a [Sequence], noise: &mut Noise) -> Self {
        let most = sequences.iter().map(Sequence::slots).max().unwrap();
        let blocks = 2 * sequences.iter().map(|s| s.slots() / 16 + 1).sum::<usize>() + 8;
        let shape = model.shape;
        let cache = KvCache::new(
            &model.device,
            KvShape {
                layers: 2,
                blocks,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
            },
        )
        .unwrap();
        let mut elements = noise.values(cache.elements().len(), 20.0);
        let width = shape.width();
        for row in elements.chunks_mut(width) {
            row[shape.head_dim..].fill(bf16::ZERO);
        }
        let mut pool = BlockPool::new(blocks);
        let mut gap = BlockTable::default();
        let tables: Vec<BlockTable> = sequences
            .iter()
            .map(|sequence| {
                let mut table = BlockTable::default();
                while table.capacity() < sequence.slots() {
                    if noise.below(2) == 0 && gap.capacity() / 16 < blocks / 2 {
                        grow(&mut pool, &mut gap);
                    }
                    grow(&mut pool, &mut table);
                }
                for slot in 0..sequence.slots() {
                    let (block, offset) = table.locate(slot);
                    let slot_at = block.0 as usize * 16 + offset;
                    let token = sequence.at(slot);
                    for head in 0..shape.kv_heads {
                        let own = head * shape.head_dim..(head + 1) * shape.head_dim;
                        for (values, from) in [(false, &token.key), (true, &token.value)] {
                            let at = cache.row_offset(1, values, slot_at, head);
                            elements[at..at + shape.head_dim].copy_from_slice(&from[own.clone()]);
                        }
                    }
                }
                table
            })
            .collect();
        cache.elements().write(&elements).unwrap();
        let limits = RowLimits {
            rows: sequences.iter().map(|s| s.rows.len()).sum(),
            sequences: sequences.len(),
            blocks: most.div_ceil(16) + noise.below(9),
        };
        Self {
            buffers: RowBuffers::new(&model.device, limits).unwrap(),
            model,
            sequences,
            tables,
            cache,
        }
    }

    fn describe(&mut self, tile_rows: usize, more_tiles: usize) -> RowArrays {
        let mut writer = self.buffers.writer();
        for (sequence, table) in self.sequences.iter().zip(&self.tables) {
            let committed = sequence.committed.len();
            writer.sequence(table, committed).unwrap();
            for (index, row) in sequence.rows.iter().enumerate() {
                writer
                    .row(&NewRow {
                        token: 0,
                        position: 0,
                        slot: committed + index,
                        sight: match &row.see {
                            See::Range(range) => Sight::Range(range.clone()),
                            See::Path(path) => Sight::Path(path),
                        },
                    })
                    .unwrap();
            }
        }
        let mut extent = writer.finish(tile_rows);
        extent.tile_count += more_tiles;
        self.buffers.upload(&self.model.rows, extent.paths).unwrap();
        self.buffers.arrays(extent)
    }

    /// Bits of all rows, `[heads * head_dim]` each. `None` when the plan needs more shared memory than there is.
    pub(crate) fn run(
        &mut self,
        plan: Option<AttentionPlan>,
        tile_rows: usize,
    ) -> Option<Vec<Vec<u16>>> {
        let rows = self.describe(tile_rows, tile_rows % 3);
        let model = self.model;
        let (shape, depth) = (model.shape, model.query_width());
        let width = shape.width();
        // Rows that are not there hold NaN, and so does the output before it is written.
        let mut queries = vec![bf16::NAN; rows.bucket * shape.heads * width];
        let all_rows = self.sequences.iter().flat_map(|s| &s.rows);
        for (row, to) in all_rows.zip(queries.chunks_mut(shape.heads * width)) {
            for (head, to) in row.query.chunks(shape.head_dim).zip(to.chunks_mut(width)) {
                to.fill(bf16::ZERO);
                to[..shape.head_dim].copy_from_slice(head);
            }
        }
        let queries = DeviceBuffer::from_slice(&model.device, &queries).unwrap();
        let poison = vec![bf16::NAN; PackedRows::len(rows.bucket, depth)];
        let packed = DeviceBuffer::from_slice(&model.device, &poison).unwrap();
        let out = PackedRows::new(packed.ptr(), depth, rows.bucket);
        let layer = self.cache.layer(1);
        // Where no row has a path, both ways to say what rows see.
        let ranges = self
            .sequences
            .iter()
            .flat_map(|s| &s.rows)
            .all(|row| matches!(row.see, See::Range(_)));
        let visibility = if ranges && tile_rows % 2 == 1 {
            let (begin, end) = (rows.vis_begin, rows.vis_end);
            Visibility::Ranges { begin, end }
        } else {
            Visibility::Rows
        };
        let kernels = &model.kernels;
        let outcome = match plan {
            Some(plan) => kernels.attend_as(plan, queries.ptr(), layer, &rows, visibility, out),
            None => kernels.attend(queries.ptr(), layer, &rows, visibility, out),
        };
        match outcome {
            Err(CudaError::Unsupported(_)) => return None,
            other => other.unwrap(),
        }
        let packed = packed.read().unwrap();
        let count = self.sequences.iter().map(|s| s.rows.len()).sum();
        let bits = |row: usize, k: usize| packed[packed_place(row, k, out)].to_bits();
        for row in 0..count {
            for k in depth..out.k32 as usize * 32 {
                assert_eq!(bits(row, k), 0, "padding of row {row} at {k}");
            }
        }
        Some(
            (0..count)
                .map(|row| (0..depth).map(|k| bits(row, k)).collect())
                .collect(),
        )
    }
}

/// One block more.
pub(crate) fn grow(pool: &mut BlockPool, table: &mut BlockTable) {
    let tokens = table.capacity() + 1;
    pool.grow(table, tokens).unwrap();
}

/// Index of an element of packed rows.
pub(crate) fn packed_place(row: usize, k: usize, rows: PackedRows) -> usize {
    let (k32, tiles) = (rows.k32 as usize, rows.tiles() as usize);
    let lane = row % 8 * 4 + k % 32 / 8;
    ((row / 64 * k32 + k / 32) * tiles + row % 64 / 8) * 256 + lane * 8 + k % 8
}
