//! How one row chooses its token and what it says about the choice: what devices share once they have dense logits.

use treespec_sampling::{Choice, Processors, distribution, rank};

use crate::batch::{HeadRequest, RowChoices, SequenceRows};
use crate::head_topk::{HeadRow, ScoredToken, TopK};

/// How a row of a head pass chooses a token.
#[derive(Debug, Clone)]
pub struct RowSampling<'a> {
    /// Without path, which is beside them.
    processors: Processors<'a>,
    path: Vec<u32>,
    /// Absolute position of the token to choose: one behind the row's own.
    position: u32,
}

impl<'a> RowSampling<'a> {
    /// Of the `row`-th of rows that choose by `choices`: the token at absolute position `position`. `path` gives the tokens
    /// that it sees beyond the counted ones, itself last; it is called where they matter.
    pub fn new(
        choices: RowChoices<'a>,
        row: usize,
        position: u32,
        path: impl FnOnce() -> Vec<u32>,
    ) -> Self {
        let processors = Processors {
            grammar: choices.grammar.get(row),
            ..choices.processors
        };
        Self {
            path: match processors.has_penalties() {
                true => path(),
                false => Vec::new(),
            },
            processors,
            position,
        }
    }

    /// Of a row of a sequence; `None` when it takes the best token, or asks for no token at all.
    pub fn of(sequence: &'a SequenceRows<'_>, row: usize) -> Option<Self> {
        let choices = sequence.sampled()?;
        let asks = sequence.head[row].is_some_and(|request| request.top_k > 0);
        asks.then(|| {
            let position = sequence.position(row) as u32 + 1;
            Self::new(choices, row, position, || {
                sequence.path(row, choices.counted_rows)
            })
        })
    }

    /// With path and grammar.
    pub fn processors(&self) -> Processors<'_> {
        Processors {
            path: &self.path,
            ..self.processors
        }
    }

    /// Absolute position of the token to choose.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Chooses the row's token from its logits, which are changed, and describes it as asked. `sample` is
    /// [`treespec_sampling::sample`], compiled as the caller likes. Without a choice nothing is said.
    pub fn decide(
        &self,
        logits: &mut [f32],
        request: &HeadRequest,
        sample: impl FnOnce(&mut [f32], &Processors<'_>, u32) -> Option<Choice>,
        result: &mut HeadRow,
    ) {
        let asked = request.rank || request.processed;
        let unprocessed = asked.then(|| logits.to_vec());
        let choice = sample(logits, &self.processors(), self.position);
        result.chosen = choice.map(|choice| ScoredToken {
            token: choice.token,
            score: choice.logit,
        });
        if let (Some(choice), Some(mut logits)) = (choice, unprocessed) {
            self.describe(&mut logits, choice.token, request, result);
        }
    }

    /// What the request asks about the token that the row chose, from the row's unprocessed logits, which are changed: its
    /// rank, and for a request of the processed distribution everything that [`HeadRequest::processed`] names.
    pub fn describe(
        &self,
        logits: &mut [f32],
        chosen: u32,
        request: &HeadRequest,
        result: &mut HeadRow,
    ) {
        if request.processed {
            distribution(logits, &self.processors(), self.position);
            describe_distribution(logits, chosen, request, result);
        }
        if request.rank {
            result.rank = Some(rank(logits, chosen));
        }
    }
}

/// Top tokens, normaliser and chosen token of a distribution.
fn describe_distribution(logits: &[f32], chosen: u32, request: &HeadRequest, result: &mut HeadRow) {
    let mut top = TopK::new(request.top_k);
    (0u32..)
        .zip(logits)
        .for_each(|(token, &logit)| top.push(token, logit));
    result.top = TopK::merge(request.top_k, [top]);
    result.chosen = Some(ScoredToken {
        token: chosen,
        score: logits[chosen as usize],
    });
    if request.normaliser {
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mass: f64 = logits.iter().map(|&l| f64::from(l - best).exp()).sum();
        result.log_normaliser = best + mass.ln() as f32;
    }
}

#[cfg(test)]
mod tests {
    use treespec_sampling::{SamplingParams, TokenMask, sample};

    use super::*;

    #[test]
    fn processed_rows_describe_what_the_token_is_drawn_from() {
        let params = SamplingParams {
            temperature: 0.5,
            top_k: Some(3),
            seed: Some(5),
            ..SamplingParams::default()
        };
        let logits = [0.0, 1.0, 3.0, 2.5, 2.0, -1.0];
        let request = HeadRequest {
            top_k: 4,
            normaliser: true,
            rank: true,
            processed: true,
            ..HeadRequest::ARGMAX
        };
        for position in 0..50 {
            let choices = RowChoices::from(Processors::new(&params));
            let sampling = RowSampling::new(choices, 0, position, Vec::new);
            let mut row = HeadRow {
                log_normaliser: f32::NAN,
                top: Vec::new(),
                gathered: None,
                chosen: None,
                rank: None,
            };
            sampling.decide(&mut logits.clone(), &request, sample, &mut row);
            let tokens: Vec<u32> = row.top.iter().map(|scored| scored.token).collect();
            assert_eq!(tokens, [2, 3, 4]);
            let probabilities: Vec<f32> =
                (0..3).map(|at| row.log_prob(at).unwrap().exp()).collect();
            let mass = 1.0 + (-1f32).exp() + (-2f32).exp();
            for (at, p) in probabilities.iter().enumerate() {
                assert!(
                    (p - (-(at as f32)).exp() / mass).abs() < 1e-6,
                    "{probabilities:?}"
                );
            }
            let chosen = row.chosen.unwrap();
            let at = tokens
                .iter()
                .position(|&token| token == chosen.token)
                .unwrap();
            assert_eq!(
                (row.rank, chosen.score),
                (Some(1 + at as u32), row.top[at].score)
            );
        }
    }

    #[test]
    fn a_row_has_its_own_mask_and_a_path_where_tokens_count() {
        let mut params = SamplingParams::default();
        let masks = [[1], [2]].map(|tokens| TokenMask::from_tokens(8, tokens));
        for counts in [false, true] {
            params.presence_penalty = f32::from(u8::from(counts));
            let choices = RowChoices {
                processors: Processors::new(&params),
                grammar: &masks,
                counted_rows: 0,
            };
            let sampling = RowSampling::new(choices, 1, 9, || vec![4, 5]);
            let processors = sampling.processors();
            assert_eq!(processors.grammar, Some(&masks[1]));
            assert_eq!(processors.path, if counts { &[4, 5][..] } else { &[] });
        }
    }
}
