//! Token choice on the device, with the outcome of `treespec_sampling::sample` for the same logits.

use std::sync::Arc;

use treespec_sampling::{Filters, Penalties, Processors, TokenMask};

use crate::head_select::HeadLogits;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, Function, KernelSource, Launch};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "sampling.cu",
    text: concat!(
        include_str!("kernels/noise.cuh"),
        "\n#line 1 \"sampling.cu\"\n",
        include_str!("kernels/sampling.cu")
    ),
};

/// Blocks of a cluster and threads of a block, as in the kernel file.
const CLUSTER: usize = 8;
const THREADS: usize = 256;

/// Words of a sequence's `Sampling` in the kernel file.
const SEQUENCE_WORDS: usize = 16;
const HAS_ALLOWED: u32 = 1;
const HAS_PENALTIES: u32 = 2;

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
    /// u32: token of a row. Needed with `path`.
    pub tokens: DevicePtr,
    /// u16 `[64]` per row: the nodes from the root to the row, as rows of its sequence. Null: rows have no ancestors
    /// besides the tokens that their sequence has counted.
    pub path: DevicePtr,
    /// u32: entries of the path, the row itself included.
    pub path_len: DevicePtr,
    /// u32 per sequence: its first row.
    pub first_row: DevicePtr,
    /// u32 `[rows]`: the chosen tokens, [`u32::MAX`] where nothing can be chosen.
    pub choices: DevicePtr,
    /// f32 `[rows]`: logits of the chosen tokens before any processor. May be null.
    pub choice_logits: DevicePtr,
}

/// Chooses tokens: one launch for any mix of greedy, sampled and constrained rows, inside a graph or not. The parameters
/// are read from memory when it runs; they belong to sequences, grammar masks to rows.
pub struct Sampler {
    device: Arc<Device>,
    kernel: Function,
    room: SamplerRoom,
    sequences: DeviceBuffer<u32>,
    bias_tokens: DeviceBuffer<u32>,
    bias_values: DeviceBuffer<f32>,
    seen_tokens: DeviceBuffer<u32>,
    seen_counts: DeviceBuffer<u32>,
    allowed: DeviceBuffer<u32>,
    grammar_rows: DeviceBuffer<u32>,
    grammar: DeviceBuffer<u32>,
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
        let words = room.vocabulary.div_ceil(32);
        Ok(Self {
            device: device.clone(),
            kernel: device.module(&SOURCE, &[])?.function("sample_rows")?,
            room,
            sequences: DeviceBuffer::zeroed(device, room.sequences * SEQUENCE_WORDS)?,
            bias_tokens: DeviceBuffer::zeroed(device, room.sequences * room.biases)?,
            bias_values: DeviceBuffer::zeroed(device, room.sequences * room.biases)?,
            seen_tokens: DeviceBuffer::zeroed(device, room.sequences * room.seen)?,
            seen_counts: DeviceBuffer::zeroed(device, room.sequences * room.seen)?,
            allowed: DeviceBuffer::zeroed(device, room.sequences * words)?,
            grammar_rows: DeviceBuffer::zeroed(device, room.rows)?,
            grammar: DeviceBuffer::zeroed(device, room.rows * words)?,
            processed: DeviceBuffer::zeroed(device, room.rows * room.logits_stride)?,
        })
    }

    /// How the rows of a sequence are sampled from the next launch on. The path and the grammar of `processors` are not
    /// used: they belong to rows. `counted_path` is how many tokens at the start of the rows' paths `processors.counts`
    /// has already: 0 when it ends before the root, 1 when it has the root.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] when a list does not fit, or when the device is lost.
    pub fn set_sequence(
        &self,
        sequence: usize,
        processors: &Processors<'_>,
        counted_path: usize,
    ) -> Result<(), CudaError> {
        let room = &self.room;
        fits("sequences", sequence + 1, room.sequences)?;
        let biases = processors.bias.entries();
        fits("biased tokens", biases.len(), room.biases)?;
        let words = sequence_words(processors, counted_path);
        if words[11] & HAS_PENALTIES != 0 {
            let entries = processors.counts.entries();
            fits("different tokens", entries.len(), room.seen)?;
            let tokens: Vec<u32> = entries.iter().map(|entry| entry.token).collect();
            let counts: Vec<u32> = entries.iter().map(|entry| entry.generated).collect();
            write_list(&self.seen_tokens, sequence * room.seen, &tokens)?;
            write_list(&self.seen_counts, sequence * room.seen, &counts)?;
        }
        let tokens: Vec<u32> = biases.iter().map(|bias| bias.0).collect();
        let values: Vec<f32> = biases.iter().map(|bias| bias.1).collect();
        write_list(&self.bias_tokens, sequence * room.biases, &tokens)?;
        write_list(&self.bias_values, sequence * room.biases, &values)?;
        if words[11] & HAS_ALLOWED != 0 {
            let mask = allowed_mask(processors, room.vocabulary);
            let stride = room.vocabulary.div_ceil(32);
            write_list(&self.allowed, sequence * stride, &mask)?;
        }
        self.sequences.write_at(sequence * SEQUENCE_WORDS, &words)
    }

    /// The tokens that can come after a row, from the next launch on; `None` for any.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a row beyond the room, or when the device is lost.
    pub fn set_grammar(&self, row: usize, mask: Option<&TokenMask>) -> Result<(), CudaError> {
        fits("rows", row + 1, self.room.rows)?;
        if let Some(mask) = mask {
            let stride = self.room.vocabulary.div_ceil(32);
            self.grammar
                .write_at(row * stride, &words_of(mask, stride))?;
        }
        self.grammar_rows
            .write_at(row, &[u32::from(mask.is_some())])
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
            .arg(self.sequences.ptr())
            .arg(self.bias_tokens.ptr())
            .arg(self.bias_values.ptr())
            .arg(room.biases as u32)
            .arg(self.seen_tokens.ptr())
            .arg(self.seen_counts.ptr())
            .arg(room.seen as u32)
            .arg(self.allowed.ptr())
            .arg(room.vocabulary.div_ceil(32) as u32)
            .arg(self.grammar_rows.ptr())
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

fn write_list<T: crate::DeviceValue>(
    buffer: &DeviceBuffer<T>,
    index: usize,
    values: &[T],
) -> Result<(), CudaError> {
    match values {
        // The memory at the index may be that of the next sequence, or none at all.
        [] => Ok(()),
        values => buffer.write_at(index, values),
    }
}

/// The kernel's `Sampling`.
fn sequence_words(processors: &Processors<'_>, counted_path: usize) -> [u32; SEQUENCE_WORDS] {
    let params = processors.params;
    let filters = Filters::new(params);
    let penalties = Penalties::new(params);
    let seed = params.seed.unwrap_or(0);
    let constrained = processors.allowed.is_some() || !processors.banned.is_empty();
    let mut flags = 0;
    if constrained {
        flags |= HAS_ALLOWED;
    }
    if !penalties.is_neutral() {
        flags |= HAS_PENALTIES;
    }
    [
        seed as u32,
        (seed >> 32) as u32,
        // -0 is greedy too.
        (params.temperature + 0.0).to_bits(),
        filters.top_k,
        filters.top_p,
        filters.min_p,
        penalties.repetition.to_bits(),
        penalties.presence.to_bits(),
        penalties.frequency.to_bits(),
        processors.bias.entries().len() as u32,
        processors.counts.entries().len() as u32,
        flags,
        counted_path as u32,
        0,
        0,
        0,
    ]
}

/// Words of the allowed ids less the banned ones, for a whole vocabulary.
fn allowed_mask(processors: &Processors<'_>, vocabulary: usize) -> Vec<u32> {
    let words = vocabulary.div_ceil(32);
    let mut mask = match processors.allowed {
        Some(allowed) => TokenMask::from_words(words_of(allowed, words)),
        None => TokenMask::all(vocabulary),
    };
    for &token in processors.banned {
        mask.remove(token);
    }
    mask.words().to_vec()
}

/// Exactly `count` words: a mask holds no token beyond its own.
fn words_of(mask: &TokenMask, count: usize) -> Vec<u32> {
    let mut words = mask.words().to_vec();
    words.resize(count, 0);
    words
}

#[cfg(test)]
mod tests {
    use treespec_sampling::{KEEP_ALL, LogitBias, SamplingParams};

    use super::*;

    #[test]
    fn memory_of_zeros_is_a_greedy_sequence() {
        let params = SamplingParams::default();
        let words = sequence_words(&Processors::new(&params), 0);
        let one = 1f32.to_bits();
        assert_eq!(
            words,
            [0, 0, 0, 0, 0, KEEP_ALL, one, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
    }

    #[test]
    fn words_hold_the_parameters() {
        let params = SamplingParams {
            temperature: 0.5,
            top_k: Some(40),
            top_p: 0.5,
            seed: Some(0x1234_5678_9ABC_DEF0),
            presence_penalty: 1.0,
            ..SamplingParams::default()
        };
        let bias = LogitBias::new([(3, 1.0)]).unwrap();
        let processors = Processors {
            bias: &bias,
            banned: &[5],
            ..Processors::new(&params)
        };
        let words = sequence_words(&processors, 1);
        assert_eq!(words[..2], [0x9ABC_DEF0, 0x1234_5678]);
        assert_eq!(words[2], 0.5f32.to_bits());
        assert_eq!(words[3..5], [40, 1 << 31]);
        assert_eq!(words[9..13], [1, 0, HAS_ALLOWED | HAS_PENALTIES, 1]);
    }

    #[test]
    fn bans_are_taken_out_of_what_is_allowed() {
        let params = SamplingParams::default();
        let allowed = TokenMask::from_tokens(40, [1, 5, 39]);
        let mut processors = Processors {
            banned: &[5, 1000],
            ..Processors::new(&params)
        };
        assert_eq!(allowed_mask(&processors, 70), [!(1 << 5), u32::MAX, 0x3F]);
        processors.allowed = Some(&allowed);
        assert_eq!(allowed_mask(&processors, 70), [1 << 1, 1 << 7, 0]);
    }
}
