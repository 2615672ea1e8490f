//! The head over some rows: one GEMM, then the best tokens of each. Dense logits never leave the device.

use std::sync::Arc;

use half::bf16;
use treespec_engine::{EngineError, HeadRequest, HeadRow, ScoredToken};

use crate::NONE;
use crate::draft_tree::DraftCandidates;
use crate::head_select::{HeadLogits, HeadSelectKernels, HeadTop, HeadTopBuffers, MOST_TOP};
use crate::linear::{Epilogue, LinearKernels, RowScale};
use crate::rows::RowKernels;
use crate::vocabulary::Vocabulary;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, PackedRows, row_bucket};

/// Buffers and kernels of a head pass over up to a number of rows.
pub(crate) struct HeadPass {
    pub(crate) vocabulary: Arc<Vocabulary>,
    select: HeadSelectKernels,
    logits: DeviceBuffer<f32>,
    group_max: DeviceBuffer<f32>,
    group_sum: DeviceBuffer<f32>,
    top: HeadTopBuffers,
    gather: DeviceBuffer<u32>,
    rows: usize,
}

impl HeadPass {
    /// For up to `rows` rows and their up to `most` best tokens.
    pub(crate) fn new(
        device: &Arc<Device>,
        vocabulary: Arc<Vocabulary>,
        rows: usize,
        most: usize,
    ) -> Result<Self, CudaError> {
        let rows = row_bucket(rows);
        let select = HeadSelectKernels::load(device, vocabulary.size)?;
        let groups = select.groups();
        Ok(Self {
            logits: DeviceBuffer::uninit(device, rows * groups * 64)?,
            group_max: DeviceBuffer::uninit(device, rows * groups)?,
            group_sum: DeviceBuffer::uninit(device, rows * groups)?,
            top: HeadTopBuffers::new(device, rows, most.clamp(1, MOST_TOP))?,
            gather: DeviceBuffer::zeroed(device, rows)?,
            vocabulary,
            select,
            rows,
        })
    }

    /// Bytes that [`HeadPass::new`] asks for.
    pub(crate) fn bytes(vocab: usize, rows: usize) -> u64 {
        (row_bucket(rows) * vocab.next_multiple_of(64)) as u64 * 4
    }

    /// The logits of packed rows, `scale` being the rest of the norm in front of the head.
    pub(crate) fn run(
        &self,
        linear: &LinearKernels,
        x: PackedRows,
        scale: Option<RowScale>,
    ) -> Result<(), EngineError> {
        let head = self.vocabulary.head()?;
        let logits = self.logits();
        linear.launch(
            head,
            x,
            scale,
            Epilogue::Head {
                logits: logits.logits,
                ld: logits.stride,
                group_max: logits.group_max,
                group_sum: logits.group_sum,
            },
        )?;
        Ok(())
    }

    /// Where the logits are.
    pub(crate) fn logits(&self) -> HeadLogits {
        let groups = self.select.groups();
        HeadLogits {
            logits: self.logits.ptr(),
            stride: groups * 64,
            group_max: self.group_max.ptr(),
            group_sum: self.group_sum.ptr(),
            group_stride: groups,
        }
    }

    /// Selects the `k` best of the first `rows` rows. Without a normaliser the sums are not read.
    pub(crate) fn select(
        &self,
        rows: usize,
        k: usize,
        normaliser: bool,
        gather: DevicePtr,
    ) -> Result<(), CudaError> {
        let mut head = self.logits();
        if !normaliser {
            head.group_sum = DevicePtr::NULL;
        }
        self.select.select(head, rows, k, gather, self.top.top())
    }

    /// What [`HeadPass::select`] leaves.
    pub(crate) fn top(&self) -> HeadTop {
        self.top.top()
    }

    /// The selected rows as the candidates of drafts: sequence s has rows `s * block_size + 1 ..`, row 0 of a block being
    /// the root's slot.
    pub(crate) fn candidates(
        &self,
        block_size: usize,
        depths: usize,
        count: usize,
    ) -> DraftCandidates {
        let top = self.top.top();
        DraftCandidates {
            top: HeadTop {
                ids: self.top.ids.offset(top.stride),
                logits: self.top.logits.offset(top.stride),
                normaliser: self.top.normaliser.offset(1),
                gathered: DevicePtr::NULL,
                stride: top.stride,
            },
            rows: block_size,
            depths,
            count,
        }
    }

    /// The k best tokens and the log-normaliser of each row of `hidden`, f32 `[n, width]`, already normalised. `staged`
    /// and `input` are buffers for the f32 and packed rows of one pass.
    pub(crate) fn select_hidden(
        &self,
        linear: &LinearKernels,
        rows: &RowKernels,
        staged: &DeviceBuffer<f32>,
        input: &DeviceBuffer<bf16>,
        hidden: &[f32],
        k: usize,
    ) -> Result<Vec<HeadRow>, EngineError> {
        let width = self.vocabulary.head()?.depth();
        if !hidden.len().is_multiple_of(width) {
            return Err(EngineError::InvalidBatch(format!(
                "{} values are not a whole number of rows of {width}",
                hidden.len()
            )));
        }
        let request = HeadRequest {
            top_k: k.min(self.vocabulary.size),
            normaliser: true,
            ..HeadRequest::ARGMAX
        };
        let mut selected = Vec::with_capacity(hidden.len() / width);
        for chunk in hidden.chunks(self.rows * width) {
            let count = chunk.len() / width;
            staged.write(chunk)?;
            let packed = PackedRows::new(input.ptr(), width, row_bucket(count));
            rows.pack(staged.ptr(), count, width, packed)?;
            self.run(linear, packed, None)?;
            let base = selected.len();
            let rows = self.read_rows(&vec![request; count]);
            selected.extend(rows.map_err(|error| error_from_row(error, base))?);
        }
        Ok(selected)
    }

    /// All logits of a row of the last pass.
    pub(crate) fn row_logits(&self, row: usize) -> Result<Vec<f32>, CudaError> {
        let stride = self.logits().stride;
        self.logits.read_range(row * stride, self.vocabulary.size)
    }

    /// Selects for requests of different sizes and copies the rows to the host: row `i` gets `wanted[i]`.
    pub(crate) fn read_rows(&self, wanted: &[HeadRequest]) -> Result<Vec<HeadRow>, EngineError> {
        let most = wanted.iter().map(|r| r.top_k).max().unwrap_or(0).max(1);
        let normaliser = wanted.iter().any(|r| r.normaliser);
        let gathers = wanted.iter().any(|r| r.gather.is_some());
        let gather = if gathers {
            let tokens: Vec<u32> = wanted.iter().map(|r| r.gather.unwrap_or(NONE)).collect();
            self.gather.write(&tokens)?;
            self.gather.ptr()
        } else {
            DevicePtr::NULL
        };
        let most = most.min(self.vocabulary.size);
        self.select(wanted.len(), most, normaliser, gather)?;
        let stride = self.top.top().stride;
        let ids = self.top.ids.read_range(0, wanted.len() * stride)?;
        let logits = self.top.logits.read_range(0, wanted.len() * stride)?;
        let normalisers = self.top.normaliser.read_range(0, wanted.len())?;
        let gathered = if gathers {
            self.top.gathered.read_range(0, wanted.len())?
        } else {
            vec![f32::NAN; wanted.len()]
        };
        let rows = wanted.iter().enumerate().map(|(row, request)| {
            let tokens = &ids[row * stride..row * stride + request.top_k.min(most)];
            let scores = &logits[row * stride..];
            HeadRow {
                log_normaliser: if request.normaliser {
                    normalisers[row]
                } else {
                    f32::NAN
                },
                top: tokens
                    .iter()
                    .zip(scores)
                    .filter(|(token, _)| **token != NONE)
                    .map(|(&token, &score)| ScoredToken { token, score })
                    .collect(),
                gathered: request.gather.map(|_| gathered[row]),
                chosen: None,
                rank: None,
            }
        });
        let rows: Vec<HeadRow> = rows.collect();
        let broken = |(row, request): (&HeadRow, &HeadRequest)| {
            request.top_k > 0 && row.top.first().is_none_or(|best| !best.score.is_finite())
        };
        match rows.iter().zip(wanted).position(broken) {
            Some(row) => Err(EngineError::NonFiniteLogits { row }),
            None => Ok(rows),
        }
    }
}

/// Rows are counted from the start of a pass; callers count from the start of the call.
pub(crate) fn error_from_row(error: EngineError, base: usize) -> EngineError {
    match error {
        EngineError::NonFiniteLogits { row } => EngineError::NonFiniteLogits { row: row + base },
        error => error,
    }
}
