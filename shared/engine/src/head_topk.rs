//! The result of a head pass, and the selection of the k best logits without sorting the vocabulary.

use std::cmp::Ordering;

pub use treespec_sampling::ScoredToken;

/// Higher logit first; among equals the lower token id.
pub(crate) fn best_first(a: &ScoredToken, b: &ScoredToken) -> Ordering {
    b.score
        .total_cmp(&a.score)
        .then_with(|| a.token.cmp(&b.token))
}

/// What one row of a head pass yields. Logits are unprocessed unless [`crate::HeadRequest::processed`] was set. No dense logits leave the backend.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadRow {
    /// `ln(sum(exp(logit)))` over the whole vocabulary; NaN when it was not asked for.
    pub log_normaliser: f32,
    /// The k best, scored by logit, highest first, ties to the lower token id.
    pub top: Vec<ScoredToken>,
    /// Logit of the token that the request named.
    pub gathered: Option<f32>,
    /// The token for the position behind the row's, scored by logit, where the row is sampled.
    pub chosen: Option<ScoredToken>,
    /// Rank of the chosen token, 1 for the best, where it was asked for and the row is sampled.
    pub rank: Option<u32>,
}

impl HeadRow {
    /// Natural log-probability of the `rank`-th best token. Needs the normaliser.
    pub fn log_prob(&self, rank: usize) -> Option<f32> {
        self.top.get(rank).map(|s| s.score - self.log_normaliser)
    }
}

/// Keeps the k best of a stream of logits by a rising threshold: a logit at or below the k-th best so far costs
/// one comparison. Tokens must arrive in ascending id order, which makes ties fall to the lower id.
#[derive(Debug, Clone)]
pub(crate) struct TopK {
    k: usize,
    threshold: f32,
    kept: Vec<ScoredToken>,
    capacity: usize,
}

impl TopK {
    pub(crate) fn new(k: usize) -> Self {
        // Cutting back to k costs O(capacity), so room for as many again makes an insertion O(1) amortised.
        let capacity = k + k.max(32);
        Self {
            k,
            threshold: f32::NEG_INFINITY,
            kept: Vec::with_capacity(if k == 0 { 0 } else { capacity }),
            capacity,
        }
    }

    /// Logits at or below this can be skipped without a call to [`TopK::push`].
    #[inline]
    pub(crate) fn threshold(&self) -> f32 {
        self.threshold
    }

    #[inline]
    pub(crate) fn push(&mut self, token: u32, logit: f32) {
        // False for NaN, which therefore never gets in.
        let better = logit > self.threshold;
        if self.k == 0 || !better {
            return;
        }
        let entry = ScoredToken {
            token,
            score: logit,
        };
        if self.k == 1 {
            // The argmax of plain decoding: no buffer, the threshold is the best itself.
            self.kept.clear();
            self.kept.push(entry);
            self.threshold = logit;
            return;
        }
        self.kept.push(entry);
        if self.kept.len() >= self.capacity {
            self.cut();
        }
    }

    fn cut(&mut self) {
        if self.kept.len() > self.k {
            self.kept.select_nth_unstable_by(self.k - 1, best_first);
            self.kept.truncate(self.k);
        }
        if self.kept.len() == self.k {
            self.threshold = self
                .kept
                .iter()
                .map(|s| s.score)
                .fold(f32::INFINITY, f32::min);
        }
    }

    /// The k best of several collectors, best first. The order of the collectors does not matter.
    pub(crate) fn merge(k: usize, parts: impl IntoIterator<Item = TopK>) -> Vec<ScoredToken> {
        let mut all: Vec<ScoredToken> = parts.into_iter().flat_map(|p| p.kept).collect();
        if k > 0 && all.len() > k {
            all.select_nth_unstable_by(k - 1, best_first);
            all.truncate(k);
        }
        all.sort_unstable_by(best_first);
        all
    }
}

/// Combines `(max, sum(exp(logit - max)))` of consecutive vocabulary chunks, in the order given.
///
/// The chunks are absolute ranges of the vocabulary, so the result does not depend on how many threads made them.
pub(crate) fn log_normaliser(chunks: &[(f32, f32)]) -> f32 {
    let max = chunks.iter().map(|c| c.0).fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return max;
    }
    let sum: f64 = chunks
        .iter()
        .map(|&(m, s)| f64::from(s) * f64::from(m - max).exp())
        .sum();
    max + sum.ln() as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn equals_a_full_sort(logits in prop::collection::vec(-4i8..4, 1..400), k in 1usize..80, split in 0usize..400) {
            let scored: Vec<ScoredToken> = logits
                .iter()
                .enumerate()
                .map(|(i, &l)| ScoredToken { token: i as u32, score: f32::from(l) / 2.0 })
                .collect();
            let split = split.min(scored.len());
            let parts = [&scored[..split], &scored[split..]].map(|half| {
                let mut top = TopK::new(k);
                half.iter().for_each(|s| top.push(s.token, s.score));
                top
            });
            let mut expected = scored.clone();
            expected.sort_by(best_first);
            expected.truncate(k);
            prop_assert_eq!(TopK::merge(k, parts), expected);
        }

        #[test]
        fn normaliser_does_not_overflow(shift in -1000.0f32..1000.0) {
            let chunk = |values: &[f32]| {
                let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                (max, values.iter().map(|v| (v - max).exp()).sum::<f32>())
            };
            let got = log_normaliser(&[chunk(&[shift, shift + 1.0]), chunk(&[shift - 2.0])]);
            let expected = shift + (1.0f32 + 1f32.exp() + (-2f32).exp()).ln();
            prop_assert!((got - expected).abs() < 1e-3);
        }
    }

    #[test]
    fn nan_never_wins() {
        let mut top = TopK::new(2);
        top.push(0, f32::NAN);
        top.push(1, -3.0);
        assert_eq!(
            TopK::merge(2, [top]),
            vec![ScoredToken {
                token: 1,
                score: -3.0
            }]
        );
    }
}
