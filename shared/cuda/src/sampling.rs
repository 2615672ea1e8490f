//! Token choice on the device, with the outcome of `treespec_sampling::sample` for the same logits.

use std::sync::Arc;

use treespec_sampling::{Processors, TokenMask};

use crate::head_select::HeadLogits;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, Function, KernelSource, Launch};
use grammar_masks::GrammarMasks;
use sequence_state::SequenceStates;

mod grammar_masks;
mod patched_words;
mod seen_tokens;
mod sequence_state;
mod slots;

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "sampling.cu",
    text: concat!(
        include_str!("kernels/noise.cuh"),
        "\n#line 1 \"sampling_cluster.cuh\"\n",
        include_str!("kernels/sampling_cluster.cuh"),
        "\n#line 1 \"sampling.cu\"\n",
        include_str!("kernels/sampling.cu")
    ),
};

/// Blocks of a cluster and threads of a block, as in the kernel file.
const CLUSTER: usize = 8;
const THREADS: usize = 256;

/// Masses are summed in parts that hold for this many tokens per block.
const MOST_TOKENS: usize = CLUSTER << 17;

/// What a [`Sampler`] has room for.
#[derive(Debug, Clone, Copy)]
pub struct SamplerRoom {
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Rows of a launch.
    pub rows: usize,
    /// Values from row to row of the logits: a multiple of 64, at least the vocabulary.
    pub logits_stride: usize,
    /// Sequences.
    pub sequences: usize,
    /// Biased tokens of a sequence.
    pub biases: usize,
    /// Different tokens of a sequence's prompt and output, for penalties.
    pub seen: usize,
}

impl SamplerRoom {
    /// Words of a set of tokens.
    fn mask_words(&self) -> usize {
        self.vocabulary.div_ceil(32)
    }
}

/// Rows to choose tokens for. All arrays are on the device; a null pointer leaves out what says so.
#[derive(Debug, Clone, Copy)]
pub struct SampledRows {
    /// Rows of logits.
    pub rows: usize,
    /// The head's logits. `group_max` may be null, which costs a pass over them; `group_sum` is not read.
    pub head: HeadLogits,
    /// u32 `[rows]`: the row of the batch that a row of logits is. Null: the same. The arrays below are indexed by it.
    pub batch_row: DevicePtr,
    /// Rows of the batch, which `tokens` and `path` describe.
    pub batch: usize,
    /// u32: position of the row's own token; the choice is for the position behind it.
    pub positions: DevicePtr,
    /// u32: sequence of a row, [`u32::MAX`] for none. Null: the row's number.
    pub sequences: DevicePtr,
    /// u32: token of a row. Needed with `first_row`.
    pub tokens: DevicePtr,
    /// u16 `[64]` per row: the nodes from the root to the row, as rows of its sequence. Null: the path of a row are the
    /// rows of its sequence up to it, at most 64.
    pub path: DevicePtr,
    /// u32: entries of the path, the row itself included. Needed with `path`.
    pub path_len: DevicePtr,
    /// u32 per sequence: its first row. Null: rows have no path besides the tokens that their sequence has counted.
    pub first_row: DevicePtr,
    /// u32 `[rows]`: the chosen tokens, [`u32::MAX`] where nothing can be chosen.
    pub choices: DevicePtr,
    /// f32 `[rows]`: logits of the chosen tokens before any processor. May be null.
    pub choice_logits: DevicePtr,
}

/// Chooses tokens: one launch for any mix of greedy, sampled and constrained rows, inside a graph or not. The parameters
/// are read from memory when it runs; they belong to sequences, grammar masks to rows. What is set for them takes effect
/// with [`Sampler::upload`].
pub struct Sampler {
    device: Arc<Device>,
    kernel: Function,
    room: SamplerRoom,
    states: SequenceStates,
    grammar: GrammarMasks,
    processed: DeviceBuffer<f32>,
}

impl Sampler {
    /// Compiles the kernel; all sequences are greedy until told otherwise.
    ///
    /// Takes `rows * logits_stride * 4` bytes for processed logits besides the lists.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a vocabulary beyond 2^20 tokens, [`CudaError::OutOfMemory`], and as
    /// [`Device::module`].
    pub fn load(device: &Arc<Device>, room: SamplerRoom) -> Result<Self, CudaError> {
        if room.vocabulary == 0 || room.vocabulary > MOST_TOKENS {
            return Err(CudaError::Unsupported(format!(
                "sampling from {} tokens: 1 to {MOST_TOKENS} work",
                room.vocabulary
            )));
        }
        if room.logits_stride < room.vocabulary || !room.logits_stride.is_multiple_of(64) {
            return Err(CudaError::Unsupported(format!(
                "rows of {} logits for {} tokens: a multiple of 64 that holds them is needed",
                room.logits_stride, room.vocabulary
            )));
        }
        let module = device.module(&SOURCE, &[])?;
        Ok(Self {
            device: device.clone(),
            kernel: module.function("sample_rows")?,
            states: SequenceStates::new(device, &module, room)?,
            grammar: GrammarMasks::new(device, room.rows, room.mask_words())?,
            processed: DeviceBuffer::zeroed(device, room.rows * room.logits_stride)?,
            room,
        })
    }

    /// How the rows of the sequences of a batch are sampled. The path and the grammar of the processors are not used: they
    /// belong to rows. The number beside them is how many tokens at the start of the rows' paths their counts have already:
    /// 0 when they end before the root, 1 when they have the root.
    ///
    /// What the device has already is not written again: a sequence that goes on costs a few words, also at another place
    /// of the batch.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] when a list does not fit, or when the device is lost.
    pub fn set_sequences(
        &mut self,
        sequences: &[(Processors<'_>, usize)],
    ) -> Result<(), CudaError> {
        self.states.set(sequences)
    }

    /// The tokens that can come after a row; `None` for any.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a row beyond the room, or when the device is lost.
    pub fn set_grammar(&mut self, row: usize, mask: Option<&TokenMask>) -> Result<(), CudaError> {
        fits("rows", row + 1, self.room.rows)?;
        if let Some(mask) = mask {
            self.grammar.set(row, mask)?;
        }
        self.states.set_grammar_row(row, mask.is_some())
    }

    /// Hands what was set to the launches after this one. It goes behind all work in the stream and waits for none of it
    /// but an earlier upload.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn upload(&mut self) -> Result<(), CudaError> {
        self.grammar.upload()?;
        self.states.upload()
    }

    /// Chooses a token for every row.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] when rows or strides are not those of the room, or when the launch is refused.
    pub fn choose(&self, rows: SampledRows) -> Result<(), CudaError> {
        let room = &self.room;
        fits("rows", rows.rows, room.rows)?;
        if rows.head.stride != room.logits_stride {
            return Err(CudaError::Unsupported(format!(
                "rows of {} logits: the sampler was made for {}",
                rows.head.stride, room.logits_stride
            )));
        }
        let lists = self.states.lists();
        Launch::new(&self.kernel)
            .grid(CLUSTER, rows.rows, 1)
            .block(THREADS)
            .cluster(CLUSTER as u32)
            .arg(rows.head.logits)
            .arg(room.logits_stride as u32)
            .arg(room.vocabulary as u32)
            .arg(rows.head.group_max)
            .arg(rows.head.group_stride as u32)
            .arg(rows.batch_row)
            .arg(rows.positions)
            .arg(rows.sequences)
            .arg(rows.tokens)
            .arg(rows.path)
            .arg(rows.path_len)
            .arg(rows.first_row)
            .arg(rows.batch as u32)
            .arg(room.sequences as u32)
            .arg(lists.slots)
            .arg(lists.sequences)
            .arg(lists.bias_tokens)
            .arg(lists.bias_values)
            .arg(room.biases as u32)
            .arg(lists.seen_tokens)
            .arg(lists.seen_counts)
            .arg(room.seen as u32)
            .arg(lists.allowed)
            .arg(lists.early)
            .arg(room.mask_words() as u32)
            .arg(lists.grammar_rows)
            .arg(self.grammar.ptr())
            .arg(self.processed.ptr())
            .arg(rows.choices)
            .arg(rows.choice_logits)
            .run(&self.device)
    }
}

fn fits(what: &str, count: usize, room: usize) -> Result<(), CudaError> {
    match count <= room {
        true => Ok(()),
        false => Err(CudaError::Unsupported(format!(
            "{count} {what} to sample with: there is room for {room}"
        ))),
    }
}
