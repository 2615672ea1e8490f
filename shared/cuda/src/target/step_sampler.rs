//! The choice of a token at every row of a step for sequences that do not simply take the best one.

use std::sync::Arc;

use treespec_engine::{EngineError, RowChoices};
use treespec_sampling::{Processors, SamplingParams, TokenMask};

use super::{MOST_SEQUENCES, MOST_STEP_ROWS, TargetCore};
use crate::acceptance::TargetChoices;
use crate::head_select::HeadLogits;
use crate::sampling::{SampledRows, Sampler, SamplerRoom};
use crate::step_rows::StepRows;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr};

/// Biased tokens of a sequence.
const MOST_BIASES: usize = 1_024;

/// A sampler with the rules of the sequences of a batch by their place in it.
pub(crate) struct StepSampler {
    sampler: Sampler,
    tokens: DeviceBuffer<u32>,
    logits: DeviceBuffer<f32>,
}

impl StepSampler {
    /// For steps over heads of `vocabulary` rows and sequences of up to `context_length` tokens; all sequences are greedy
    /// until told otherwise.
    pub(super) fn new(
        device: &Arc<Device>,
        vocabulary: usize,
        context_length: usize,
        logits_stride: usize,
    ) -> Result<Self, CudaError> {
        let room = SamplerRoom {
            vocabulary,
            rows: MOST_STEP_ROWS,
            logits_stride,
            sequences: MOST_SEQUENCES,
            biases: MOST_BIASES,
            seen: vocabulary.min(context_length),
        };
        Ok(Self {
            sampler: Sampler::load(device, room)?,
            tokens: DeviceBuffer::zeroed(device, MOST_STEP_ROWS)?,
            logits: DeviceBuffer::zeroed(device, MOST_STEP_ROWS)?,
        })
    }

    /// How the next step chooses for the sequences of a batch, of `stride` rows each. Whatever an earlier step left for
    /// their places and rows is undone.
    pub(super) fn set<'a>(
        &mut self,
        choices: impl Iterator<Item = Option<RowChoices<'a>>>,
        stride: usize,
    ) -> Result<(), CudaError> {
        let best = SamplingParams::default();
        let mut masks: [Option<&TokenMask>; MOST_STEP_ROWS] = [None; MOST_STEP_ROWS];
        let mut sequences = Vec::with_capacity(MOST_SEQUENCES);
        for choices in choices {
            let choices = choices.unwrap_or_else(|| RowChoices::from(Processors::new(&best)));
            let first = sequences.len() * stride;
            for (mask, own) in masks.iter_mut().skip(first).zip(choices.grammar) {
                *mask = Some(own);
            }
            sequences.push((choices.processors, choices.counted_rows));
        }
        self.sampler.set_sequences(&sequences)?;
        for (row, mask) in masks.into_iter().enumerate() {
            self.sampler.set_grammar(row, mask)?;
        }
        self.sampler.upload()
    }

    /// Chooses at every row.
    pub(super) fn choose(
        &self,
        head: HeadLogits,
        rows: &StepRows,
    ) -> Result<TargetChoices, CudaError> {
        let count = rows.sequences * rows.stride;
        let (path_len, path) = rows.paths();
        self.sampler.choose(SampledRows {
            rows: count,
            head,
            batch_row: DevicePtr::NULL,
            batch: count,
            positions: rows.positions(),
            sequences: rows.seq_of_row(),
            tokens: rows.verified().tokens,
            path,
            path_len,
            first_row: rows.first_row(),
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

impl TargetCore {
    /// How the next step chooses for the sequences of a batch, of `stride` rows each. Returns whether one of them does not
    /// simply take the best token: only then there is anything to prepare.
    pub(crate) fn prepare_sampling<'a>(
        &mut self,
        choices: impl Iterator<Item = Option<RowChoices<'a>>> + Clone,
        stride: usize,
    ) -> Result<bool, EngineError> {
        if choices.clone().flatten().all(|choices| choices.is_argmax()) {
            return Ok(false);
        }
        let sampler = match &mut self.sampler {
            Some(sampler) => sampler,
            none => none.insert(StepSampler::new(
                &self.device,
                self.spec.vocab_size,
                self.spec.context_length,
                self.head.logits().stride,
            )?),
        };
        match sampler.set(choices, stride) {
            Ok(()) => Ok(true),
            // A list that does not fit is a matter of the request.
            Err(CudaError::Unsupported(what)) => Err(EngineError::InvalidBatch(what)),
            Err(error) => Err(error.into()),
        }
    }
}
