//! The end of a step on the device: how far the target agrees with the draft, and what that commits.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use crate::draft_tree::BatchState;
use crate::{
    CudaError, Device, DeviceBuffer, DevicePtr, Function, KernelSource, Launch, PinnedBuffer,
};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "acceptance.cu",
    text: include_str!("kernels/acceptance.cu"),
};

/// Threads of a block, as in the kernel file.
const THREADS: usize = 32;

/// Most rows of a sequence, as in the kernel file.
const MOST_ROWS: usize = 256;

/// Entries of an accepted path; a longer walk goes on in the next step.
pub const MOST_PATH: usize = crate::MAX_PATH;

/// Records per sequence, used in turn, as in the kernel file.
const RECORDS: usize = 2;

const RECORD_HEADER: usize = 8;

const RECORD_WORDS: usize = RECORD_HEADER + 4 * MOST_PATH;

/// The target's choice at every row.
#[derive(Debug, Clone, Copy, Default)]
pub struct TargetChoices {
    /// u32 at `row * stride`: the chosen token, `u32::MAX` when the row's logits hold no number.
    pub tokens: DevicePtr,
    /// Entries from row to row.
    pub stride: usize,
    /// f32 at `row * logit_stride`: the row's best logit. Null: not checked and not reported.
    pub logits: DevicePtr,
    /// Entries from row to row.
    pub logit_stride: usize,
    /// f32 per row: log-normaliser. Null: not reported.
    pub normaliser: DevicePtr,
}

/// The rows that were verified, `sequence * rows + node`.
#[derive(Debug, Clone, Copy)]
pub struct VerifiedRows {
    /// Rows per sequence.
    pub rows: usize,
    /// u32 per row.
    pub tokens: DevicePtr,
    /// u32 per row: parent node, `u32::MAX` for roots and rows without a node.
    pub parents: DevicePtr,
}

/// The row of every sequence in plain decoding: row `sequence` is its root. u32 arrays.
#[derive(Debug, Clone, Copy)]
pub struct RootRows {
    /// Token.
    pub tokens: DevicePtr,
    /// Absolute position.
    pub positions: DevicePtr,
    /// Physical slot.
    pub kv_slot: DevicePtr,
    /// First visible slot.
    pub vis_begin: DevicePtr,
    /// End of the visible slots.
    pub vis_end: DevicePtr,
}

/// What steps leave behind for the kernels after them and for the host.
pub struct AcceptanceBuffers {
    /// `[sequences][64]`: accepted nodes, the root first.
    pub paths: DeviceBuffer<u32>,
    /// `[sequences]`: accepted nodes; 0 after a fault and for sequences that take no part.
    pub counts: DeviceBuffer<u32>,
    /// `[sequences]`: committed rows before the step.
    pub committed_before: DeviceBuffer<u32>,
    /// `[sequences]`: steps that the sequence has made.
    steps: DeviceBuffer<u32>,
    records: PinnedBuffer<u32>,
}

impl AcceptanceBuffers {
    /// Room for `sequences` sequences. The first step has number 1.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or when the host has no more memory to pin.
    pub fn new(device: &Arc<Device>, sequences: usize) -> Result<Self, CudaError> {
        Ok(Self {
            paths: DeviceBuffer::zeroed(device, sequences * MOST_PATH)?,
            counts: DeviceBuffer::zeroed(device, sequences)?,
            committed_before: DeviceBuffer::zeroed(device, sequences)?,
            steps: DeviceBuffer::zeroed(device, sequences)?,
            records: PinnedBuffer::new(device, sequences * RECORDS * RECORD_WORDS)?,
        })
    }

    /// The outcome of step `step` of a sequence as soon as the device has written it, while later kernels may still run.
    /// The record is used again two steps later. `step` counts from 1 and wraps.
    ///
    /// # Panics
    /// When there is no such sequence.
    pub fn poll(&self, sequence: usize, step: u32) -> Option<Outcome> {
        let at = (sequence * RECORDS + step as usize % RECORDS) * RECORD_WORDS;
        if self.records.read_volatile(at) != step {
            return None;
        }
        // The device writes the step number last: what is read behind this fence is of that step.
        fence(Ordering::Acquire);
        let record: Vec<u32> = (at..at + RECORD_WORDS)
            .map(|word| self.records.read_volatile(word))
            .collect();
        Some(read_record(&record))
    }
}

/// What a step committed.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Step number of the sequence.
    pub step: u32,
    /// Rows in the cache before it.
    pub committed_before: u32,
    /// What the walk found, or the node whose logits hold no number: then nothing was committed.
    pub walked: Result<Walked, usize>,
}

/// An accepted path.
#[derive(Debug, Clone, PartialEq)]
pub struct Walked {
    /// The accepted nodes, the root first.
    pub path: Vec<usize>,
    /// Their tokens.
    pub tokens: Vec<u32>,
    /// Best logit after every node.
    pub logits: Vec<f32>,
    /// Log-normaliser after every node, NaN when not asked for.
    pub normalisers: Vec<f32>,
    /// The target's token after the path: the next root.
    pub bonus: u32,
}

fn read_record(record: &[u32]) -> Outcome {
    let count = (record[1] as usize).min(MOST_PATH);
    let column = |index: usize| {
        let begin = RECORD_HEADER + index * MOST_PATH;
        &record[begin..begin + count]
    };
    let floats = |index: usize| column(index).iter().map(|&v| f32::from_bits(v)).collect();
    let walked = match record[3] {
        u32::MAX => Ok(Walked {
            path: column(0).iter().map(|&node| node as usize).collect(),
            tokens: column(1).to_vec(),
            logits: floats(2),
            normalisers: floats(3),
            bonus: record[2],
        }),
        node => Err(node as usize),
    };
    Outcome {
        step: record[0],
        committed_before: record[4],
        walked,
    }
}

/// The kernels of `acceptance.cu`.
pub struct AcceptanceKernels {
    device: Arc<Device>,
    accept: Function,
    advance: Function,
}

impl AcceptanceKernels {
    /// Compiles them.
    ///
    /// # Errors
    /// As [`Device::module`].
    pub fn load(device: &Arc<Device>) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE, &[])?;
        Ok(Self {
            accept: module.function("accept_tree")?,
            advance: module.function("advance_root")?,
            device: device.clone(),
        })
    }

    /// Walks the drafts of `sequences` sequences ([`treespec_tree::walk`]): writes the accepted paths, then adds them to
    /// `state.committed` and makes the target's next tokens `state.roots`.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] with more rows per sequence than a tree can have, or when the launch is refused.
    pub fn accept(
        &self,
        sequences: usize,
        choices: TargetChoices,
        rows: VerifiedRows,
        state: BatchState,
        out: &AcceptanceBuffers,
    ) -> Result<(), CudaError> {
        if !(1..=MOST_ROWS).contains(&rows.rows) {
            return Err(CudaError::Unsupported(format!(
                "{} rows per sequence: 1 to {MOST_ROWS} work",
                rows.rows
            )));
        }
        Launch::new(&self.accept)
            .grid(sequences, 1, 1)
            .block(THREADS)
            .arg(choices.tokens)
            .arg(choices.stride as u32)
            .arg(choices.logits)
            .arg(choices.logit_stride as u32)
            .arg(choices.normaliser)
            .arg(rows.tokens)
            .arg(rows.parents)
            .arg(rows.rows as u32)
            .arg(out.paths.ptr())
            .arg(out.counts.ptr())
            .arg(state.committed)
            .arg(out.committed_before.ptr())
            .arg(state.roots)
            .arg(out.steps.ptr())
            .arg(out.records.device_ptr())
            .run(&self.device)
    }

    /// Plain decoding: with `choices` it commits the root of every sequence and takes the target's choice as the next
    /// one. In any case it describes the row of the root for the next pass.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn advance(
        &self,
        sequences: usize,
        choices: Option<TargetChoices>,
        state: BatchState,
        rows: RootRows,
        out: &AcceptanceBuffers,
    ) -> Result<(), CudaError> {
        let choices = choices.unwrap_or_default();
        Launch::new(&self.advance)
            .grid(sequences, 1, 1)
            .block(THREADS)
            .arg(choices.tokens)
            .arg(choices.stride as u32)
            .arg(choices.logits)
            .arg(choices.logit_stride as u32)
            .arg(choices.normaliser)
            .arg(out.paths.ptr())
            .arg(out.counts.ptr())
            .arg(state.committed)
            .arg(out.committed_before.ptr())
            .arg(state.roots)
            .arg(out.steps.ptr())
            .arg(out.records.device_ptr())
            .arg(state.tables)
            .arg(state.table_stride as u32)
            .arg(rows.tokens)
            .arg(rows.positions)
            .arg(rows.kv_slot)
            .arg(rows.vis_begin)
            .arg(rows.vis_end)
            .run(&self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(words: &[(usize, u32)]) -> Vec<u32> {
        let mut record = vec![0; RECORD_WORDS];
        for &(at, value) in words {
            record[at] = value;
        }
        record
    }

    #[test]
    fn an_outcome_is_read_back() {
        let logit = 2.5f32.to_bits();
        let outcome = read_record(&record(&[
            (0, 3),
            (1, 2),
            (2, 77),
            (3, u32::MAX),
            (4, 40),
            (RECORD_HEADER + 1, 5),
            (RECORD_HEADER + MOST_PATH, 10),
            (RECORD_HEADER + MOST_PATH + 1, 11),
            (RECORD_HEADER + 2 * MOST_PATH, logit),
            (RECORD_HEADER + 2 * MOST_PATH + 1, logit),
        ]));
        let walked = outcome.walked.unwrap();
        assert_eq!((outcome.step, outcome.committed_before), (3, 40));
        assert_eq!(walked.path, [0, 5]);
        assert_eq!(walked.tokens, [10, 11]);
        assert_eq!(walked.logits, [2.5, 2.5]);
        assert_eq!(walked.bonus, 77);
    }

    #[test]
    fn a_fault_names_its_node() {
        let outcome = read_record(&record(&[(0, 1), (2, u32::MAX), (3, 4)]));
        assert_eq!(outcome.walked, Err(4));
    }
}
