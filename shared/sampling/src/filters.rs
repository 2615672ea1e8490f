//! Top-k, top-p and min-p as one limit on how far below the best a token may be.

use std::ops::RangeInclusive;

use crate::SamplingParams;
use crate::arithmetic::{self, ln, mass};
use crate::blocks::{BLOCK, GROUP, kth_largest};

/// Of distances.
const DISTANCES_PER_NAT: f32 = 134_217_728.0;

/// The limit that keeps every token.
pub const KEEP_ALL: u32 = u32::MAX;

/// How far a scaled logit (0 for the best token, negative for others) is below the best, in units of 2^-27.
///
/// Tokens of equal distance are equally probable to the filters, and kept or dropped together. From 32 nats on all are
/// equally far: noise spans 26.1, so none of those can be chosen.
#[inline(always)]
pub fn distance(scaled: f32) -> u32 {
    (-scaled * DISTANCES_PER_NAT).min(FURTHEST as f32) as u32
}

/// Logits on the scale of the choice: relative to the best, so that small temperatures keep their precision and cannot
/// overflow, and divided by the temperature.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) best: f32,
    pub(crate) temperature: f32,
}

/// The smallest distance of those that are all alike to the filters.
const FURTHEST: u32 = 4_294_967_040;
/// In nats, more than all roundings on the way from a logit to its distance.
const ROUNDINGS: f32 = 0.01;

impl Scale {
    /// No logit below this is at `distance` or nearer. Some above it may be further.
    #[inline(always)]
    pub(crate) fn floor(&self, distance: u32) -> f32 {
        if distance >= FURTHEST {
            return f32::NEG_INFINITY;
        }
        self.best - (distance as f32 / DISTANCES_PER_NAT + ROUNDINGS) * self.temperature
    }

    /// No logit above this is at `distance` or further. Some below it may be nearer.
    #[inline(always)]
    fn ceiling(&self, distance: u32) -> f32 {
        self.best - (distance as f32 / DISTANCES_PER_NAT - ROUNDINGS) * self.temperature
    }

    /// [`Scale::apply`] for loops: what can never be chosen is NaN or minus infinity, and has no mass.
    #[inline(always)]
    fn of(&self, logit: f32) -> f32 {
        if logit == self.best {
            0.0
        } else {
            (logit - self.best) / self.temperature
        }
    }

    /// Distance and mass of the tokens at these distances.
    #[inline(always)]
    fn tokens(
        self,
        logits: &[f32],
        distances: RangeInclusive<u32>,
    ) -> impl Iterator<Item = (u32, u64)> {
        let floor = self.floor(*distances.end());
        let ceiling = self.ceiling(*distances.start());
        // A bound that is NaN, at an infinite best, holds nothing back.
        let near = move |logit: f32| !((logit < floor) | (logit > ceiling));
        logits
            .chunks(GROUP)
            .filter(move |group| group.iter().fold(false, |any, &l| any | near(l)))
            .flat_map(move |group| group.iter().filter(move |&&l| near(l)))
            .filter_map(move |&logit| self.apply(logit))
            .map(|scaled| (distance(scaled), mass(scaled)))
            .filter(move |token| distances.contains(&token.0))
    }

    /// `None` for logits that can never be chosen: NaN and minus infinity.
    #[inline(always)]
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
    #[inline(always)]
    pub(crate) fn limit(&self, processed: &[f32], scale: Scale) -> u32 {
        let mut limit = KEEP_ALL;
        if self.top_k > 0
            && let Some(logit) = kth_largest(processed, self.top_k as usize)
            && let Some(scaled) = scale.apply(logit)
        {
            limit = distance(scaled);
        }
        if self.top_p > 0 {
            limit = limit.min(self.nucleus(processed, scale, limit));
        }
        limit.min(self.min_p)
    }

    /// Where the nucleus of the tokens within `limit` ends.
    #[inline(always)]
    fn nucleus(&self, processed: &[f32], scale: Scale, limit: u32) -> u32 {
        // Most of the vocabulary is far away and most nuclei are near: counting out the nearest usually is enough.
        let counted = 8 * RANGES_PER_NAT;
        let masses = Masses::of(processed, scale, limit, counted);
        let target = self.share(masses.total);
        let border = match masses.border(target, counted) {
            Some(border) => border,
            // No closure, which would be compiled without the caller's instruction set.
            None => Masses::of(processed, scale, limit, RANGES)
                .border(target, RANGES)
                .expect("invariant: all tokens have a share of their mass"),
        };
        let first = (border.range as u32) << RANGE_BITS;
        let last = limit.min(first | ((1 << RANGE_BITS) - 1));
        border.end(scale.tokens(processed, first..=last).collect())
    }

    /// The mass that the nucleus of tokens of mass `total` has at least.
    fn share(&self, total: u64) -> u64 {
        // Rounded up: integers below the exact product are those below its ceiling.
        let share = u128::from(total) * u128::from(self.top_p);
        share.div_ceil(1 << 32) as u64
    }
}

/// Ranges of distance whose masses are collected, so that only the tokens of one are sorted.
const RANGES: usize = 256;
const RANGE_BITS: u32 = 24;
const RANGES_PER_NAT: usize = 8;

/// Masses by range of distance.
struct Masses {
    ranges: [u64; RANGES],
    total: u64,
}

impl Masses {
    /// Of the tokens within `limit`. Only the `counted` nearest ranges have all of theirs; the total is of all.
    #[inline(always)]
    fn of(logits: &[f32], scale: Scale, limit: u32, counted: usize) -> Self {
        let mut masses = Self {
            ranges: [0; RANGES],
            total: 0,
        };
        if limit < KEEP_ALL {
            for (distance, mass) in scale.tokens(logits, 0..=limit) {
                masses.ranges[(distance >> RANGE_BITS) as usize] += mass;
                masses.total += mass;
            }
            return masses;
        }
        // Everything that is the same for all tokens goes over a block at a time, in vectors.
        let floor = scale.floor(((counted << RANGE_BITS) - 1) as u32);
        for logits in logits.chunks(BLOCK) {
            let mut of_block = [0; BLOCK];
            for (mass, &logit) in of_block.iter_mut().zip(logits) {
                *mass = arithmetic::mass(scale.of(logit));
            }
            masses.total += of_block.iter().sum::<u64>();
            for (logits, of_group) in logits.chunks(GROUP).zip(of_block.chunks(GROUP)) {
                if logits.iter().fold(true, |far, &l| far & (l < floor)) {
                    continue;
                }
                for (&logit, mass) in logits.iter().zip(of_group) {
                    // The distance in whole ranges: scaling by a power of two rounds nothing.
                    let range = (scale.of(logit) * -(RANGES_PER_NAT as f32)).min(255.0);
                    masses.ranges[range as usize & (RANGES - 1)] += mass;
                }
            }
        }
        masses
    }

    /// Where the mass of the nearer tokens reaches `target`; `None` when that is not in the `counted` nearest ranges.
    fn border(&self, target: u64, counted: usize) -> Option<Border> {
        let mut before = 0;
        for (range, mass) in self.ranges[..counted].iter().enumerate() {
            if before + mass >= target {
                let mass = target - before;
                return Some(Border { range, mass });
            }
            before += mass;
        }
        None
    }
}

/// The range that a nucleus ends in.
struct Border {
    range: usize,
    /// What the nucleus lacks without the tokens of this range.
    mass: u64,
}

impl Border {
    /// The largest distance whose nearer tokens have less than the mass, from distances and masses of the range's tokens.
    fn end(&self, mut tokens: Vec<(u32, u64)>) -> u32 {
        tokens.sort_unstable();
        let mut limit = 0;
        let mut before = 0;
        for run in tokens.chunk_by(|a, b| a.0 == b.0) {
            if before >= self.mass {
                break;
            }
            limit = run[0].0;
            before += run.iter().map(|token| token.1).sum::<u64>();
        }
        limit
    }
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
        let tokens = [(0, 4u64), (5, 2), (9, 1), (9, 1)];
        let half = 1 << 31;
        let end = |top_p: u32| {
            let filters = Filters {
                top_p,
                ..filters(None, 1.0, 0.0)
            };
            let mut masses = Masses {
                ranges: [0; RANGES],
                total: 8,
            };
            masses.ranges[0] = masses.total;
            let border = masses.border(filters.share(masses.total), 1);
            border.unwrap().end(tokens.to_vec())
        };
        assert_eq!(end(half), 0);
        assert_eq!(end(half + 1), 5);
        assert_eq!(end(half + half / 2), 5);
        assert_eq!(end(half + half / 2 + 1), 9);
        assert_eq!(end(u32::MAX), 9);
    }

    /// A range that holds tokens beyond what was counted must not end a nucleus.
    #[test]
    fn a_border_is_looked_for_in_ranges_that_are_whole() {
        let masses = Masses {
            ranges: [1; RANGES],
            total: 256,
        };
        assert!(masses.border(64, 63).is_none());
        assert_eq!(masses.border(64, 64).unwrap().range, 63);
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

    /// Thousands of tokens that hardly matter alone, beyond the ranges that are counted first.
    #[test]
    fn a_nucleus_may_end_far_away() {
        let far = 5_000;
        let logits: Vec<f32> = std::iter::once(0.0)
            .chain((0..far).map(|token| -9.0 - token as f32 / 1_000.0))
            .collect();
        let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        for top_p in [0.9f32, 0.95, 0.999] {
            let mut mass = 0.0;
            let enough = |&x: &f32| {
                mass += f64::from(x).exp();
                mass >= f64::from(top_p) * total
            };
            let expected = logits.iter().position(enough).unwrap() + 1;
            assert!(expected > 1, "{top_p}");
            let kept = kept(filters(None, top_p, 0.0), &logits, 1.0);
            assert!(kept.len().abs_diff(expected) <= 1, "{top_p}");
            assert!(kept.iter().copied().eq(0..kept.len()), "{top_p}");
        }
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
