//! The choice of tokens from dense logits: `treespec_sampling::sample`, compiled for the processor at hand.

use treespec_sampling::{Choice, Processors, sample};

use super::lanes::Lanes;
use super::pool::ThreadPool;
use super::{Isa, SharedMut, dispatch};
use crate::batch::HeadRequest;
use crate::head_topk::HeadRow;
use crate::row_sampling::RowSampling;

/// The logits of the rows of a sweep that are sampled. They are kept whole, since filters and noise are relative to the
/// best of the vocabulary; threads fill in chunks as they come.
pub(super) struct SampledRows<'a> {
    /// Row of the sweep, and how it chooses.
    rows: Vec<(usize, &'a RowSampling<'a>)>,
    /// `[rows, vocabulary]`
    logits: SharedMut<'a, f32>,
    vocabulary: usize,
}

impl<'a> SampledRows<'a> {
    /// Of a sweep over `sampling.len()` rows; none are sampled when that is empty. `scratch` keeps its memory.
    pub(super) fn new(
        sampling: &'a [Option<RowSampling<'a>>],
        scratch: &'a mut Vec<f32>,
        vocabulary: usize,
    ) -> Self {
        let rows: Vec<(usize, &RowSampling<'a>)> = sampling
            .iter()
            .enumerate()
            .filter_map(|(row, sampling)| sampling.as_ref().map(|sampling| (row, sampling)))
            .collect();
        let size = rows.len() * vocabulary;
        if scratch.len() < size {
            scratch.resize(size, 0.0);
        }
        Self {
            rows,
            logits: SharedMut::new(&mut scratch[..size]),
            vocabulary,
        }
    }

    /// Keeps the logits of tokens `first_token..first_token + width` from `[all rows of the sweep, width]`.
    ///
    /// # Safety
    /// No other thread keeps logits of the same tokens.
    pub(super) unsafe fn keep(&self, logits: &[f32], first_token: usize, width: usize) {
        for (place, (row, _)) in self.rows.iter().enumerate() {
            // SAFETY: rows are apart, and tokens of the same row by the caller's contract.
            let kept = unsafe {
                self.logits
                    .part(place * self.vocabulary + first_token, width)
            };
            kept.copy_from_slice(&logits[row * width..(row + 1) * width]);
        }
    }

    /// Lets the rows choose, once all logits are there: what a row of the sweep decided and was asked goes into its place
    /// of `results`.
    pub(super) fn choose(
        self,
        pool: &mut ThreadPool,
        isa: Isa,
        requests: &[HeadRequest],
        results: &mut [HeadRow],
    ) {
        let shared = SharedMut::new(results);
        pool.for_ranges(self.rows.len(), 1, &|places| {
            for place in places {
                let (row, sampling) = self.rows[place];
                // SAFETY: a place is handed out once, and `keep` is over since `self` was moved here.
                let (logits, result) = unsafe {
                    (
                        self.logits.part(place * self.vocabulary, self.vocabulary),
                        shared.part(row, 1),
                    )
                };
                let sample = |logits: &mut [f32], processors: &Processors<'_>, position: u32| {
                    choose(isa, logits, processors, position)
                };
                sampling.decide(logits, &requests[row], sample, &mut result[0]);
            }
        });
    }
}

fn choose(
    isa: Isa,
    logits: &mut [f32],
    processors: &Processors<'_>,
    position: u32,
) -> Option<Choice> {
    dispatch!(isa, choose_lanes(logits: &mut [f32], processors: &Processors<'_>, position: u32) -> Option<Choice>)
}

/// The function has no lanes of its own; what it inlines is compiled for their instruction set.
///
/// # Safety
/// The processor has the lanes' instruction set.
#[inline(always)]
unsafe fn choose_lanes<L: Lanes>(
    logits: &mut [f32],
    processors: &Processors<'_>,
    position: u32,
) -> Option<Choice> {
    sample(logits, processors, position)
}

#[cfg(test)]
mod tests {
    use treespec_sampling::{SamplingParams, rank};

    use super::*;
    use crate::Precision;
    use crate::batch::RowChoices;
    use crate::cpu::kernels::{HeadPass, HeadScratch, InputScratch, Packer, select};

    /// Over several chunks, the last of them not whole.
    const VOCABULARY: usize = 3_001;
    const DEPTH: usize = 24;
    /// Over two sweeps.
    const ROWS: usize = 70;

    fn isas() -> Vec<Isa> {
        let distinct = [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];
        distinct
            .into_iter()
            .filter(|isa| isa.is_available())
            .collect()
    }

    fn all_params() -> Vec<SamplingParams> {
        let mut all = Vec::new();
        for temperature in [0.3, 1.0, 1.5] {
            for (top_k, top_p, min_p) in [
                (None, 1.0, 0.0),
                (Some(7), 1.0, 0.0),
                (None, 0.9, 0.0),
                (None, 1.0, 0.1),
                (Some(50), 0.8, 0.02),
            ] {
                all.push(SamplingParams {
                    temperature,
                    top_k,
                    top_p,
                    min_p,
                    seed: Some((all.len() as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)),
                    ..SamplingParams::default()
                });
            }
        }
        all
    }

    fn sampling(params: &SamplingParams, position: u32) -> RowSampling<'_> {
        let choices = RowChoices::from(Processors::new(params));
        RowSampling::new(choices, 0, position, Vec::new)
    }

    fn dense(row: &crate::HeadRow) -> Vec<f32> {
        let mut logits = vec![f32::NAN; VOCABULARY];
        for scored in &row.top {
            logits[scored.token as usize] = scored.score;
        }
        logits
    }

    #[test]
    fn rows_choose_what_sampling_chooses_from_their_dense_logits() {
        let weights: Vec<f32> = (0..VOCABULARY * DEPTH)
            .map(|i| ((i * 7_919) % 211) as f32 / 100.0 - 1.0)
            .collect();
        let weights = treespec_checkpoint::StoredMatrix::from_f32(&weights, DEPTH);
        let head = Packer::new(Precision::F32, Isa::Portable)
            .pack(weights)
            .unwrap();
        let hidden: Vec<f32> = (0..ROWS * DEPTH).map(|i| (i as f32 * 0.37).sin()).collect();
        let params = all_params();
        let request = |top_k: usize| HeadRequest {
            top_k,
            normaliser: true,
            gather: Some(40),
            rank: true,
            processed: false,
        };
        // Every seventh row is not sampled.
        let sampling: Vec<Option<RowSampling<'_>>> = (0..ROWS)
            .map(|row| {
                let params = &params[row % params.len()];
                let position = 1_000 + (row / 3) as u32;
                (row % 7 != 3).then(|| sampling(params, position))
            })
            .collect();
        let (mut input, mut scratch) = (InputScratch::default(), HeadScratch::default());
        for isa in isas() {
            for threads in [1, 3] {
                let pool = &mut ThreadPool::new(threads).unwrap();
                let mut run = |requests: &[HeadRequest], sampling: &[Option<RowSampling<'_>>]| {
                    let pass = HeadPass {
                        hidden: &hidden,
                        requests,
                        sampling,
                        head: &head,
                    };
                    select(pool, isa, &mut input, &mut scratch, pass)
                };
                let all = run(&[request(VOCABULARY); ROWS], &[]);
                let rows = run(&[request(4); ROWS], &sampling);
                assert_eq!(rows.len(), ROWS);
                for (row, (got, all)) in rows.iter().zip(&all).enumerate() {
                    let expected = sampling[row].as_ref().and_then(|sampling| {
                        sample(&mut dense(all), &sampling.processors(), sampling.position())
                    });
                    let expected_rank = expected.map(|choice| rank(&dense(all), choice.token));
                    assert_eq!(got.rank, expected_rank);
                    let got_choice = got.chosen.map(|chosen| (chosen.token, chosen.score));
                    let expected = expected.map(|choice| (choice.token, choice.logit));
                    assert_eq!(got_choice, expected, "{isa:?} {threads} threads, row {row}");
                    assert_eq!(got_choice.is_some(), sampling[row].is_some());
                    // What else was asked for is served as ever.
                    assert_eq!(got.top, all.top[..4]);
                    assert_eq!(got.gathered, all.gathered);
                    assert_eq!(got.log_normaliser.to_bits(), all.log_normaliser.to_bits());
                }
            }
        }
    }

    #[test]
    fn a_row_without_a_number_has_no_choice() {
        let params = &all_params()[5];
        let sampling = [Some(sampling(params, 3))];
        let mut scratch = Vec::new();
        let rows = SampledRows::new(&sampling, &mut scratch, 40);
        // SAFETY: one thread.
        unsafe { rows.keep(&[f32::NAN; 40], 0, 40) };
        let pool = &mut ThreadPool::new(1).unwrap();
        let mut results = [empty_row()];
        rows.choose(pool, Isa::Portable, &[HeadRequest::ARGMAX], &mut results);
        assert_eq!(results[0].chosen, None);
    }

    fn empty_row() -> HeadRow {
        HeadRow {
            log_normaliser: f32::NAN,
            top: Vec::new(),
            gathered: None,
            chosen: None,
            rank: None,
        }
    }
}
