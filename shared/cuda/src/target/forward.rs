//! Forwards of any rows: chunks of prompts, and what no graph was captured for.

use treespec_engine::{
    EngineError, ForwardOutput, HeadRequest, HeadRow, RowBatch, RowSampling, RowShape, SequenceRows,
};
use treespec_sampling::sample;

use super::prefill::{self, Prefill};
use super::{MOST_FORWARD_ROWS, MOST_STEP_ROWS, TargetCore};
use crate::activations::Activations;
use crate::decoder::{FinalRows, Taps};
use crate::features::FeatureProjection;
use crate::head_pass::error_from_row;
use crate::linear::PrefillLinear;
use crate::row_metadata::RowArrays;
use crate::{PackedRows, row_bucket};

/// A row that asks for the head.
struct AskingRow<'a> {
    /// Row of the forward.
    row: u32,
    request: HeadRequest,
    sampling: Option<RowSampling<'a>>,
}

impl TargetCore {
    /// Embeds rows and runs all layers.
    pub(crate) fn forward_rows(
        &self,
        rows: &RowArrays,
        tap: bool,
    ) -> Result<FinalRows, EngineError> {
        let taps = self
            .projection
            .as_ref()
            .filter(|_| tap)
            .map(FeatureProjection::taps);
        self.forward_in(&self.activations, rows, taps, None)
    }

    /// [`TargetCore::forward_rows`] in other buffers; `prefill` multiplies in place of the kernels.
    fn forward_in(
        &self,
        activations: &Activations,
        rows: &RowArrays,
        taps: Option<&Taps>,
        prefill: Option<&PrefillLinear>,
    ) -> Result<FinalRows, EngineError> {
        self.rows.embed(
            rows.tokens,
            self.head.vocabulary.embedding.ptr(),
            self.spec.hidden_size,
            activations.x.ptr(),
            self.decoder.first_norm(),
            activations.input(rows.bucket),
            activations.parts.ptr(),
        )?;
        Ok(self.decoder.forward(
            &self.kernels,
            activations,
            &self.kv,
            |_| *rows,
            taps,
            prefill,
        )?)
    }

    /// The input of the head after a forward of a row bucket.
    pub(crate) fn final_input(&self, bucket: usize) -> PackedRows {
        self.activations.input(bucket)
    }

    /// Rows of one forward.
    pub(super) fn most_forward_rows(&self) -> usize {
        match self.prefill {
            None => MOST_FORWARD_ROWS,
            Some(_) => prefill::MOST_ROWS,
        }
    }

    /// One forward of up to [`TargetCore::most_forward_rows`] rows: parts of the sequences of `batch`, each with the index
    /// of its sequence.
    pub(super) fn forward_group(
        &mut self,
        batch: &[SequenceRows<'_>],
        parts: &[(usize, SequenceRows<'_>)],
    ) -> Result<Vec<ForwardOutput>, EngineError> {
        let rows = RowBatch {
            sequences: parts.iter().map(|(_, rows)| rows.clone()).collect(),
        };
        let group = &rows.sequences;
        let count = group.iter().map(|s| s.tokens.len()).max().unwrap_or(1);
        let longest = group.iter().map(|s| s.committed + s.tokens.len()).max();
        let trees = group
            .iter()
            .any(|s| matches!(s.shape, RowShape::Tree { .. }));
        let tile_rows =
            self.kernels
                .attention
                .tile_rows(group.len(), count, longest.unwrap_or(1), trees);
        let ragged = match &mut self.prefill {
            None => &mut self.ragged,
            Some(prefill) => &mut prefill.ragged,
        };
        let extent = ragged.fill(&rows, tile_rows)?;
        ragged.upload(&self.rows, extent.paths)?;
        let rows = ragged.arrays(extent);
        let wants_features = group.iter().any(|s| s.features);
        let own_taps = self.projection.as_ref().map(FeatureProjection::taps);
        let (activations, taps, linear) = match &self.prefill {
            None => (&self.activations, own_taps, None),
            Some(prefill) => {
                let linear = Some(&prefill.linear).filter(|_| Prefill::takes(group));
                let taps = prefill.taps.as_ref().map(|(_, taps)| taps);
                (&prefill.activations, taps, linear)
            }
        };
        let taps = taps.filter(|_| wants_features);
        let last = self.forward_in(activations, &rows, taps, linear)?;
        let features = match (&self.projection, taps) {
            (Some(projection), Some(taps)) => {
                let count = group.iter().map(|s| s.tokens.len()).sum::<usize>();
                let linear = &self.kernels.linear;
                projection.read_tapped(linear, &self.rows, taps, rows.bucket, count)?
            }
            _ => Vec::new(),
        };
        let input = activations.input(rows.bucket);
        let asking = asking_rows(batch, parts);
        let mut heads = self.heads(input, last, &asking)?.into_iter();
        let width = self.spec.feature_size.unwrap_or(0);
        let mut start = 0;
        let outputs = group.iter().map(|sequence| {
            let wanted = sequence.head.iter().flatten().count();
            let end = start + sequence.tokens.len();
            let output = ForwardOutput {
                head: heads.by_ref().take(wanted).collect(),
                features: if sequence.features {
                    features[start * width..end * width].to_vec()
                } else {
                    Vec::new()
                },
            };
            start = end;
            output
        });
        let outputs = outputs.collect();
        self.device.stream().synchronize()?;
        Ok(outputs)
    }

    /// The head over the rows that ask for it.
    fn heads(
        &self,
        rows: PackedRows,
        last: FinalRows,
        asking: &[AskingRow<'_>],
    ) -> Result<Vec<HeadRow>, EngineError> {
        let mut heads = Vec::with_capacity(asking.len());
        for chunk in asking.chunks(MOST_STEP_ROWS) {
            let bucket = row_bucket(chunk.len());
            let mut sources: Vec<u32> = chunk.iter().map(|asking| asking.row).collect();
            sources.resize(bucket, u32::MAX);
            self.head_rows.write(&sources)?;
            let input = PackedRows::new(self.head_input.ptr(), self.spec.hidden_size, bucket);
            let parts = (last.scale.parts, self.head_parts.ptr(), last.scale.count);
            self.rows
                .gather(self.head_rows.ptr(), rows, input, Some(parts))?;
            let scale = crate::RowScale {
                parts: self.head_parts.ptr(),
                ..last.scale
            };
            self.head.run(&self.kernels.linear, input, Some(scale))?;
            let base = heads.len();
            let rows = self.read_chosen(chunk);
            heads.extend(rows.map_err(|error| error_from_row(error, base))?);
        }
        Ok(heads)
    }

    /// What the rows of a head pass want. Where they sample the host chooses: it does so once per prompt.
    fn read_chosen(&self, asking: &[AskingRow<'_>]) -> Result<Vec<HeadRow>, EngineError> {
        let wanted: Vec<HeadRequest> = asking.iter().map(|asking| asking.request).collect();
        let mut rows = self.head.read_rows(&wanted)?;
        for (row, (asking, result)) in asking.iter().zip(&mut rows).enumerate() {
            let Some(sampling) = &asking.sampling else {
                continue;
            };
            let mut logits = self.head.row_logits(row)?;
            sampling.decide(&mut logits, &asking.request, sample, result);
            if result.chosen.is_none() {
                return Err(EngineError::NonFiniteLogits { row });
            }
        }
        Ok(rows)
    }
}

/// The rows of a forward that ask for the head. How they choose is a matter of their whole sequence: of a chain that was
/// cut, the earlier rows belong to the path and the masks are counted from its first row.
fn asking_rows<'a>(
    batch: &'a [SequenceRows<'_>],
    parts: &[(usize, SequenceRows<'_>)],
) -> Vec<AskingRow<'a>> {
    let mut asking = Vec::new();
    let mut first = 0;
    for (owner, part) in parts {
        let whole = &batch[*owner];
        let start = part.committed - whole.committed;
        for (row, request) in part.head.iter().enumerate() {
            asking.extend(request.map(|request| AskingRow {
                row: first + row as u32,
                request,
                sampling: RowSampling::of(whole, start + row),
            }));
        }
        first += part.tokens.len() as u32;
    }
    asking
}
