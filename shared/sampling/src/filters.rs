//! Top-k, top-p and min-p as one limit on how far below the best a token may be.

use crate::SamplingParams;
use crate::arithmetic::{ln, mass};

/// The limit that keeps every token.
pub const KEEP_ALL: u32 = u32::MAX;

/// How far a scaled logit (0 for the best token, negative for others) is below the best, in units of 2^-27.
///
/// Tokens of equal distance are equally probable to the filters, and kept or dropped together. From 32 nats on all are
/// equally far: noise spans 26.1, so none of those can be chosen.
pub fn distance(scaled: f32) -> u32 {
    (-scaled * 134_217_728.0).min(4_294_967_040.0) as u32
}

/// Logits on the scale of the choice: relative to the best, so that small temperatures keep their precision and cannot
/// overflow, and divided by the temperature.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) best: f32,
    pub(crate) temperature: f32,
}

impl Scale {
    /// `None` for logits that can never be chosen: NaN and minus infinity.
    pub(crate) fn apply(&self, logit: f32) -> Option<f32> {
        if logit == self.best {
            // Not `best - best`: that is NaN when a bias made the best infinite.
            return Some(0.0);
        }
        (logit > f32::NEG_INFINITY).then(|| (logit - self.best) / self.temperature)
    }
}

/// The three filters, in the integers that decide borders exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filters {
    /// Tokens to keep; 0 is off.
    pub top_k: u32,
    /// Nucleus mass in units of 2^-32; 0 is off.
    pub top_p: u32,
    /// Largest [`distance`] that min-p keeps; [`KEEP_ALL`] is off.
    pub min_p: u32,
}

impl Filters {
    /// Those of a request.
    pub fn new(params: &SamplingParams) -> Self {
        let top_p = match params.top_p {
            p if p < 1.0 => ((f64::from(p) * 4_294_967_296.0) as u32).max(1),
            _ => 0,
        };
        let min_p = match params.min_p {
            // exp(-32): a smaller share lets even the furthest tokens pass.
            p if p > 1.3e-14 => distance(ln(p)),
            _ => KEEP_ALL,
        };
        Self {
            top_k: params.top_k.unwrap_or(0),
            top_p,
            min_p,
        }
    }

    /// The largest distance that is kept, from the logits after bias, bans and penalties.
    ///
    /// * top-k keeps a token when fewer than k are more probable;
    /// * top-p keeps it when the more probable ones of those have less than the share p of their mass;
    /// * min-p keeps it when its probability is at least the share of the best one's.
    ///
    /// The best token always passes.
    pub(crate) fn limit(&self, processed: &[f32], scale: Scale) -> u32 {
        let scaled = || processed.iter().filter_map(|&logit| scale.apply(logit));
        let mut limit = KEEP_ALL;
        if self.top_k > 0 {
            let mut distances: Vec<u32> = scaled().map(distance).collect();
            let k = self.top_k as usize;
            if k < distances.len() {
                limit = *distances.select_nth_unstable(k - 1).1;
            }
        }
        if self.top_p > 0 {
            let kept = || {
                let masses = scaled().map(|x| (distance(x), mass(x)));
                masses.filter(|&(distance, _)| distance <= limit)
            };
            limit = limit.min(nucleus(kept, self.top_p));
        }
        limit.min(self.min_p)
    }
}

/// The largest distance whose nearer tokens have less than the share `top_p` (units of 2^-32) of the mass.
///
/// The mass is first collected by 256 ranges of distance, so that only one range is sorted.
fn nucleus<I: Iterator<Item = (u32, u64)>>(tokens: impl Fn() -> I, top_p: u32) -> u32 {
    let range = |distance: u32| (distance >> 24) as usize;
    let mut ranges = [0u64; 256];
    tokens().for_each(|(distance, mass)| ranges[range(distance)] += mass);
    let total: u64 = ranges.iter().sum();
    // Rounded up: integers below the exact product are those below its ceiling.
    let share = u128::from(total) * u128::from(top_p);
    let target = share.div_ceil(1 << 32) as u64;
    let mut before = 0;
    let mut border = 0;
    for (index, mass) in ranges.iter().enumerate() {
        if before + mass >= target {
            border = index;
            break;
        }
        before += mass;
    }
    let mut inside: Vec<(u32, u64)> = tokens().filter(|t| range(t.0) == border).collect();
    inside.sort_unstable();
    let mut limit = 0;
    for run in inside.chunk_by(|a, b| a.0 == b.0) {
        if before >= target {
            break;
        }
        limit = run[0].0;
        before += run.iter().map(|token| token.1).sum::<u64>();
    }
    limit
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filters(top_k: Option<u32>, top_p: f32, min_p: f32) -> Filters {
        Filters::new(&SamplingParams {
            top_k,
            top_p,
            min_p,
            ..SamplingParams::default()
        })
    }

    fn kept(filters: Filters, logits: &[f32], temperature: f32) -> Vec<usize> {
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = Scale { best, temperature };
        let limit = filters.limit(logits, scale);
        let passes = |&i: &usize| scale.apply(logits[i]).is_some_and(|x| distance(x) <= limit);
        (0..logits.len()).filter(passes).collect()
    }

    #[test]
    fn neutral_values_switch_a_filter_off() {
        let off = filters(None, 1.0, 0.0);
        assert_eq!((off.top_k, off.top_p, off.min_p), (0, 0, KEEP_ALL));
        assert_eq!(kept(off, &[0.0, -500.0, 3.0], 1.0), [0, 1, 2]);
        assert_eq!(filters(None, f32::MIN_POSITIVE, 0.0).top_p, 1);
    }

    #[test]
    fn top_k_keeps_ties_with_the_kth() {
        let logits = [1.0, 5.0, 3.0, 3.0, 2.0];
        assert_eq!(kept(filters(Some(1), 1.0, 0.0), &logits, 1.0), [1]);
        assert_eq!(kept(filters(Some(2), 1.0, 0.0), &logits, 1.0), [1, 2, 3]);
        assert_eq!(kept(filters(Some(3), 1.0, 0.0), &logits, 1.0), [1, 2, 3]);
        assert_eq!(kept(filters(Some(4), 1.0, 0.0), &logits, 1.0), [1, 2, 3, 4]);
        assert_eq!(
            kept(filters(Some(9), 1.0, 0.0), &logits, 1.0),
            [0, 1, 2, 3, 4]
        );
    }

    #[test]
    fn a_nucleus_is_the_smallest_set_with_the_mass() {
        // Four equal tokens are kept or dropped together, whatever share of them would do.
        assert_eq!(kept(filters(None, 0.5, 0.0), &[2.0; 4], 1.0), [0, 1, 2, 3]);
        // Masses 4 : 2 : 1 : 1, to rounding.
        let logits = [4f32.ln(), 2f32.ln(), 0.0, 0.0];
        assert_eq!(kept(filters(None, 0.49, 0.0), &logits, 1.0), [0]);
        assert_eq!(kept(filters(None, 0.51, 0.0), &logits, 1.0), [0, 1]);
        assert_eq!(kept(filters(None, 0.74, 0.0), &logits, 1.0), [0, 1]);
        assert_eq!(kept(filters(None, 0.76, 0.0), &logits, 1.0), [0, 1, 2, 3]);
        assert_eq!(kept(filters(None, 1e-30, 0.0), &logits, 1.0), [0]);
    }

    #[test]
    fn a_share_that_is_met_exactly_ends_the_nucleus() {
        let tokens = || [(0, 4u64), (5, 2), (9, 1), (9, 1)].into_iter();
        let half = 1 << 31;
        assert_eq!(nucleus(tokens, half), 0);
        assert_eq!(nucleus(tokens, half + 1), 5);
        assert_eq!(nucleus(tokens, half + half / 2), 5);
        assert_eq!(nucleus(tokens, half + half / 2 + 1), 9);
        assert_eq!(nucleus(tokens, u32::MAX), 9);
    }

    #[test]
    fn the_nucleus_is_of_what_top_k_kept_and_of_the_temperature() {
        let logits = [4f32.ln(), 2f32.ln(), 0.0, -0.001];
        // Of all, 4/8 is under 0.6; of the two best, 4/6 is over it.
        assert_eq!(kept(filters(None, 0.6, 0.0), &logits, 1.0), [0, 1]);
        assert_eq!(kept(filters(Some(2), 0.6, 0.0), &logits, 1.0), [0]);
        // At temperature 1/2 masses are 16 : 4 : 1 : 1.
        assert_eq!(kept(filters(None, 0.6, 0.0), &logits, 0.5), [0]);
    }

    #[test]
    fn min_p_is_a_share_of_the_best() {
        let logits = [10f32.ln(), 2f32.ln(), 0.0];
        assert_eq!(kept(filters(None, 1.0, 0.19), &logits, 1.0), [0, 1]);
        assert_eq!(kept(filters(None, 1.0, 0.21), &logits, 1.0), [0]);
        assert_eq!(kept(filters(None, 1.0, 0.09), &logits, 1.0), [0, 1, 2]);
    }

    #[test]
    fn what_cannot_be_chosen_has_no_mass() {
        let logits = [f32::NAN, 0.0, f32::NEG_INFINITY, 0.0, -40.0];
        assert_eq!(kept(filters(Some(3), 0.999, 0.0), &logits, 1.0), [1, 3]);
    }

    proptest! {
        /// The definition, token by token.
        #[test]
        fn filters_do_what_they_say(
            eighths in prop::collection::vec(-160i32..0, 1..300), temperature in 0.2f32..3.0,
            k in prop::option::of(1u32..40), top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..0.9],
        ) {
            let logits: Vec<f32> = eighths.iter().map(|&e| e as f32 / 8.0).collect();
            let filters = filters(k, top_p, min_p);
            let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let scale = Scale { best, temperature };
            let x: Vec<f32> = logits.iter().map(|&l| scale.apply(l).unwrap()).collect();
            let far: Vec<u32> = x.iter().map(|&x| distance(x)).collect();
            let nearer = |i: usize| -> Vec<usize> { (0..x.len()).filter(|&j| far[j] < far[i]).collect() };
            let mut keep: Vec<bool> = (0..x.len())
                .map(|i| filters.top_k == 0 || nearer(i).len() < filters.top_k as usize)
                .collect();
            if filters.top_p > 0 {
                let total: u128 = (0..x.len()).filter(|&i| keep[i]).map(|i| u128::from(mass(x[i]))).sum();
                for (i, keep) in keep.iter_mut().enumerate() {
                    let before: u128 = nearer(i).into_iter().map(|j| u128::from(mass(x[j]))).sum();
                    *keep &= before << 32 < total * u128::from(filters.top_p);
                }
            }
            for i in 0..x.len() {
                keep[i] &= min_p == 0.0 || f64::from(x[i]) >= f64::from(min_p).ln() - 1e-6;
            }
            let expected: Vec<usize> = (0..x.len()).filter(|&i| keep[i]).collect();
            prop_assert!(expected.iter().any(|&i| x[i] == 0.0));
            prop_assert_eq!(kept(filters, &logits, temperature), expected);
        }
    }
}
