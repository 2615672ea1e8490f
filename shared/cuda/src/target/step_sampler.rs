//! The choice of a token at every row of a step for sequences that do not simply take the best one.

use std::sync::Arc;

use treespec_sampling::{Processors, SamplingParams};

use super::{MOST_SEQUENCES, MOST_STEP_ROWS};
use crate::acceptance::TargetChoices;
use crate::head_select::HeadLogits;
use crate::sampling::{SampledRows, Sampler, SamplerRoom};
use crate::step_rows::StepRows;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr};

/// A sampler with the parameters of the sequences of a batch by their place in it.
pub(crate) struct StepSampler {
    sampler: Sampler,
    tokens: DeviceBuffer<u32>,
    logits: DeviceBuffer<f32>,
    params: Vec<SamplingParams>,
}

impl StepSampler {
    /// For steps over heads of `vocabulary` rows; all sequences are greedy until told otherwise.
    pub(super) fn new(
        device: &Arc<Device>,
        vocabulary: usize,
        logits_stride: usize,
    ) -> Result<Self, CudaError> {
        let room = SamplerRoom {
            vocabulary,
            rows: MOST_STEP_ROWS,
            logits_stride,
            sequences: MOST_SEQUENCES,
            biases: 0,
            seen: 0,
        };
        Ok(Self {
            sampler: Sampler::load(device, room)?,
            tokens: DeviceBuffer::zeroed(device, MOST_STEP_ROWS)?,
            logits: DeviceBuffer::zeroed(device, MOST_STEP_ROWS)?,
            params: vec![SamplingParams::default(); MOST_SEQUENCES],
        })
    }

    /// How the next steps choose for the sequences of a batch.
    pub(super) fn set<'a>(
        &mut self,
        params: impl Iterator<Item = Option<&'a SamplingParams>>,
    ) -> Result<(), CudaError> {
        let greedy = SamplingParams::default();
        for (sequence, params) in params.enumerate() {
            let params = params.unwrap_or(&greedy);
            // An upload takes longer than a comparison, and parameters seldom change.
            if self.params[sequence] != *params {
                self.sampler
                    .set_sequence(sequence, &Processors::new(params), 0)?;
                self.params[sequence] = params.clone();
            }
        }
        Ok(())
    }

    /// Chooses at every row.
    pub(super) fn choose(
        &self,
        head: HeadLogits,
        rows: &StepRows,
    ) -> Result<TargetChoices, CudaError> {
        let count = rows.sequences * rows.stride;
        self.sampler.choose(SampledRows {
            rows: count,
            head,
            batch_row: DevicePtr::NULL,
            batch: count,
            positions: rows.positions(),
            sequences: rows.seq_of_row(),
            tokens: DevicePtr::NULL,
            path: DevicePtr::NULL,
            path_len: DevicePtr::NULL,
            first_row: DevicePtr::NULL,
            choices: self.tokens.ptr(),
            choice_logits: self.logits.ptr(),
        })?;
        Ok(TargetChoices {
            tokens: self.tokens.ptr(),
            stride: 1,
            logits: self.logits.ptr(),
            logit_stride: 1,
            normaliser: DevicePtr::NULL,
        })
    }
}
