//! What the host tells the device before a step, in one copy: where every sequence of the batch stands.

use std::sync::Arc;

use treespec_engine::BlockId;

use crate::NONE;
use crate::draft_tree::BatchState;
use crate::rows::{BlockContexts, RowKernels};
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, PinnedBuffer, SequenceRanking};

/// Where one sequence stands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SequenceInput<'a> {
    /// The decided token that is not in the cache yet.
    pub(crate) root: u32,
    /// Rows in the target's cache, which is the position of the root.
    pub(crate) committed: usize,
    /// Nodes deeper than this are cut.
    pub(crate) max_depth: usize,
    /// The target's blocks.
    pub(crate) table: &'a [BlockId],
    /// Rows in the drafter's cache.
    pub(crate) context_rows: usize,
    /// The drafter's blocks.
    pub(crate) context_table: &'a [BlockId],
    /// How the drafter's candidates are ranked; `None` by their probability alone.
    pub(crate) ranking: Option<SequenceRanking>,
}

/// Host and device copies of the inputs of a step.
pub(crate) struct BatchInputs {
    host: PinnedBuffer<u32>,
    device: DeviceBuffer<u32>,
    /// Blocks of a target's and of a drafter's table.
    strides: [usize; 2],
}

/// Where the arrays of a bucket of sequences lie in the device copy, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Arrays {
    sequences: usize,
    strides: [usize; 2],
}

impl Arrays {
    /// Entries of the per-sequence arrays, a multiple of 4 so that tables are aligned.
    fn entries(self) -> usize {
        self.sequences.next_multiple_of(4)
    }

    fn field(self, index: usize) -> usize {
        index * self.entries()
    }

    /// Four words per sequence.
    fn rankings(self) -> usize {
        self.field(4)
    }

    fn table(self, index: usize) -> usize {
        self.rankings() + 4 * self.sequences + index * self.sequences * self.strides[0]
    }

    fn words(self) -> usize {
        self.table(1) + self.sequences * self.strides[1]
    }
}

/// The bucket of a number of sequences: graphs are captured for these.
pub(crate) fn sequence_bucket(sequences: usize) -> usize {
    sequences.next_power_of_two()
}

impl BatchInputs {
    /// For up to `sequences` sequences with tables of up to `target_blocks` and `context_blocks` blocks.
    pub(crate) fn new(
        device: &Arc<Device>,
        sequences: usize,
        target_blocks: usize,
        context_blocks: usize,
    ) -> Result<Self, CudaError> {
        let capacity = sequence_bucket(sequences);
        let strides =
            [target_blocks, context_blocks].map(|blocks| blocks.max(1).next_multiple_of(4));
        let words = Arrays {
            sequences: capacity,
            strides,
        }
        .words();
        Ok(Self {
            host: PinnedBuffer::new(device, words)?,
            device: DeviceBuffer::zeroed(device, words)?,
            strides,
        })
    }

    /// Blocks of a target's table.
    pub(crate) fn target_blocks(&self) -> usize {
        self.strides[0]
    }

    /// Writes the host copy for the bucket `sequences`. The device may read it until the step's outcome is known.
    pub(crate) fn fill(&mut self, sequences: usize, inputs: &[SequenceInput<'_>]) {
        let arrays = self.arrays(sequences);
        let words = &mut self.host.as_mut_slice()[..arrays.words()];
        words[..arrays.table(0)].fill(NONE);
        for (sequence, input) in inputs.iter().enumerate() {
            let fields = [
                input.root,
                input.committed as u32,
                u32::try_from(input.max_depth).unwrap_or(NONE),
                input.context_rows as u32,
            ];
            for (field, value) in fields.into_iter().enumerate() {
                words[arrays.field(field) + sequence] = value;
            }
            if let Some(SequenceRanking(ranking)) = input.ranking {
                let at = arrays.rankings() + 4 * sequence;
                words[at..at + 4].copy_from_slice(&ranking);
            }
            for (index, table) in [input.table, input.context_table].into_iter().enumerate() {
                let stride = self.strides[index];
                let at = arrays.table(index) + sequence * stride;
                let row = &mut words[at..at + stride];
                debug_assert!(
                    table.len() <= stride,
                    "{} blocks in a table of {stride}",
                    table.len()
                );
                row.fill(NONE);
                for (word, block) in row.iter_mut().zip(table) {
                    *word = block.0;
                }
            }
        }
    }

    /// Launches the copy to the device.
    pub(crate) fn upload(&self, rows: &RowKernels, sequences: usize) -> Result<(), CudaError> {
        let words = self.arrays(sequences).words();
        rows.copy(self.host.device_ptr(), self.device.ptr(), words)
    }

    /// The sequences as tree building and acceptance see them.
    pub(crate) fn state(&self, sequences: usize) -> BatchState {
        let arrays = self.arrays(sequences);
        BatchState {
            roots: self.device.offset(arrays.field(0)),
            committed: self.device.offset(arrays.field(1)),
            max_depths: self.device.offset(arrays.field(2)),
            tables: self.device.offset(arrays.table(0)),
            table_stride: self.strides[0],
        }
    }

    /// The sequences as the drafter's block forward sees them: a block begins where the target's cache ends.
    pub(crate) fn contexts(&self, sequences: usize) -> BlockContexts {
        let arrays = self.arrays(sequences);
        BlockContexts {
            roots: self.device.offset(arrays.field(0)),
            positions: self.device.offset(arrays.field(1)),
            context_rows: self.device.offset(arrays.field(3)),
            tables: self.device.offset(arrays.table(1)),
            table_stride: self.strides[1],
        }
    }

    /// A [`SequenceRanking`] per sequence.
    pub(crate) fn rankings(&self, sequences: usize) -> DevicePtr {
        self.device.offset(self.arrays(sequences).rankings())
    }

    fn arrays(&self, sequences: usize) -> Arrays {
        Arrays {
            sequences,
            strides: self.strides,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_do_not_overlap_and_tables_are_aligned() {
        for sequences in [1, 2, 4, 8] {
            let arrays = Arrays {
                sequences,
                strides: [12, 4],
            };
            assert!(arrays.field(1) >= sequences);
            assert_eq!((arrays.rankings() % 4, arrays.table(0) % 4), (0, 0));
            assert!(arrays.rankings() >= arrays.field(3) + sequences);
            assert_eq!(arrays.table(0), arrays.rankings() + sequences * 4);
            assert_eq!(arrays.table(1), arrays.table(0) + sequences * 12);
            assert_eq!(arrays.words(), arrays.table(1) + sequences * 4);
        }
        assert_eq!([1, 3, 4, 5].map(sequence_bucket), [1, 4, 4, 8]);
    }
}
