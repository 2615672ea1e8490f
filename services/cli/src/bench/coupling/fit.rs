//! Fitting a profile to recorded answers: how much noise the ranking of each depth takes, and how far ranks can be trusted.

use treespec_checkpoint::{CouplingProfile, TemperatureFit, gap_index};
use treespec_engine::{DraftShape, HeadRow, RankedCandidate, rank_candidates};
use treespec_sampling::{Coupling, Ranking};

use super::{simulation::simulate, traces::Trace};

/// Ratios of the ranking's temperature to the answer's that are tried.
const RATIOS: [f32; 14] = [
    0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.6,
];
/// Borders of the gaps, in nats.
const GAPS: [f32; 19] = [
    0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.25, 1.5, 1.8, 2.2, 2.7, 3.3, 4.0, 5.0, 6.5,
    9.0,
];
/// Ranks with probabilities of their own; the last stands for all behind it.
const RANKS: usize = 10;
/// A token this far down at every depth may still be in a tree.
const REACHABLE_RANK: usize = 8;
/// Places of the ranking that count for a tree, and what a hit within them is worth.
const HITS: [(usize, f64); 4] = [(1, 1.0), (2, 0.6), (4, 0.4), (8, 0.3)];
/// Fewer observations do not change the depth before's ratio.
const LEAST_OBSERVATIONS: usize = 150;
/// Observations that the prior of a cell counts for.
const PRIOR_WEIGHT: f64 = 12.0;
/// A ratio replaces a smaller one when it is so much better, relatively: less is chance.
const LEAST_GAIN: f64 = 0.002;

/// A place of an answer: a block's candidates of one depth, and the token that came.
struct Observation<'a> {
    row: &'a HeadRow,
    seed: u64,
    /// Absolute position of the token.
    position: u32,
    token: u32,
}

/// Shares of the fitted ratios that are tried: what is best for single depths need not be best for whole trees.
const SCALES: [f32; 4] = [1.0, 0.7, 0.4, 0.0];
/// Drafts that a fit is judged by.
const SHAPES: [DraftShape; 5] = [
    DraftShape::Chain,
    DraftShape::Tree { budget: 4 },
    DraftShape::Tree { budget: 8 },
    DraftShape::Tree { budget: 16 },
    DraftShape::Tree { budget: 32 },
];

/// The profile of answers that were drawn at each of the temperatures, ascending.
pub(crate) fn fit(answers: &[(f32, Vec<Trace>)]) -> CouplingProfile {
    CouplingProfile {
        gaps: GAPS.to_vec(),
        fits: answers
            .iter()
            .map(|(temperature, traces)| best_fit(*temperature, traces))
            .collect(),
    }
}

/// The fit with the most tokens per step over all shapes. Without depths, which ranks by q alone, when none is better.
fn best_fit(temperature: f32, traces: &[Trace]) -> TemperatureFit {
    let worth = |fit: &TemperatureFit| -> f64 {
        let profile = CouplingProfile {
            gaps: GAPS.to_vec(),
            fits: vec![fit.clone()],
        };
        let coupling = Coupling {
            seed: 0,
            temperature,
            ranking: Ranking::Fitted,
        };
        let steps = |shape| simulate(traces, shape, coupling, Some(&profile)).tokens_per_step();
        SHAPES.into_iter().map(steps).sum()
    };
    let plain = TemperatureFit {
        temperature,
        tau: Vec::new(),
        acceptance: Vec::new(),
    };
    let mut best = (worth(&plain), plain);
    for scale in SCALES {
        let fit = fit_temperature(temperature, scale, traces);
        let worth = worth(&fit);
        if worth > best.0 {
            best = (worth, fit);
        }
    }
    best.1
}

fn fit_temperature(temperature: f32, scale: f32, traces: &[Trace]) -> TemperatureFit {
    let blocks = traces.iter().flat_map(|trace| &trace.blocks);
    let depths = blocks.map(Vec::len).max().unwrap_or(0);
    // Places whose ancestors could all be in a tree, as (answer, root).
    let mut reachable: Vec<(usize, usize)> = traces
        .iter()
        .enumerate()
        .flat_map(|(answer, trace)| (0..trace.blocks.len()).map(move |root| (answer, root)))
        .collect();
    let mut ratio = 0.0;
    let mut tau = Vec::with_capacity(depths);
    let mut counts = Vec::with_capacity(depths);
    for depth in 0..depths {
        reachable.retain(|&(answer, root)| root + depth + 1 < traces[answer].tokens.len());
        let observations: Vec<Observation<'_>> = reachable
            .iter()
            .map(|&(answer, root)| observe(&traces[answer], root, depth))
            .collect();
        if observations.len() >= LEAST_OBSERVATIONS {
            ratio = best_ratio(&observations, temperature);
        }
        let tau_here = ratio * scale;
        tau.push(tau_here);
        let mut cells = Counts::default();
        let mut keep = Vec::with_capacity(reachable.len());
        for observation in &observations {
            let ranked = observation.ranked(tau_here * temperature);
            cells.add(&ranked, observation.token);
            let rank = observation.rank(&ranked);
            keep.push(rank.is_some_and(|rank| rank < REACHABLE_RANK));
        }
        counts.push(cells);
        let mut keep = keep.into_iter();
        reachable.retain(|_| keep.next().unwrap_or(false));
    }
    TemperatureFit {
        temperature,
        tau,
        acceptance: probabilities(&counts),
    }
}

fn observe(trace: &Trace, root: usize, depth: usize) -> Observation<'_> {
    Observation {
        row: &trace.blocks[root][depth],
        seed: trace.seed,
        position: (trace.start + root + depth + 1) as u32,
        token: trace.tokens[root + depth + 1],
    }
}

impl Observation<'_> {
    fn ranked(&self, tau: f32) -> Vec<RankedCandidate> {
        rank_candidates(self.row, tau, self.seed, self.position)
    }

    /// The place of the token that came.
    fn rank(&self, ranked: &[RankedCandidate]) -> Option<usize> {
        ranked.iter().position(|one| one.token == self.token)
    }
}

/// The ratio whose ranking has the tokens that came furthest in front.
fn best_ratio(observations: &[Observation<'_>], temperature: f32) -> f32 {
    let mut best = (0.0, f64::NEG_INFINITY);
    for ratio in RATIOS {
        let worth: f64 = observations
            .iter()
            .map(|observation| {
                let rank = observation.rank(&observation.ranked(ratio * temperature));
                let hits = HITS
                    .iter()
                    .filter(|(places, _)| rank.is_some_and(|rank| rank < *places));
                hits.map(|hit| hit.1).sum::<f64>()
            })
            .sum();
        if worth > best.1 * (1.0 + LEAST_GAIN) || best.1 == f64::NEG_INFINITY {
            best = (ratio, worth);
        }
    }
    best.0
}

/// `[rank][gap]`: candidates seen, and those of them that came.
#[derive(Clone)]
struct Counts([[(f64, f64); GAPS.len() + 1]; RANKS]);

impl Default for Counts {
    fn default() -> Self {
        Self([[(0.0, 0.0); GAPS.len() + 1]; RANKS])
    }
}

impl Counts {
    fn add(&mut self, ranked: &[RankedCandidate], token: u32) {
        for (rank, candidate) in ranked.iter().enumerate() {
            let gap = gap_index(&GAPS, candidate.gap);
            let cell = &mut self.0[rank.min(RANKS - 1)][gap];
            cell.0 += 1.0;
            cell.1 += f64::from(u8::from(candidate.token == token));
        }
    }
}

/// Shares of hits. A cell that was seen seldom leans on the same cell over all depths, and that one on its rank.
fn probabilities(depths: &[Counts]) -> Vec<Vec<Vec<f32>>> {
    let mut pooled = Counts::default();
    for counts in depths {
        for (all, one) in pooled.0.iter_mut().flatten().zip(counts.0.iter().flatten()) {
            all.0 += one.0;
            all.1 += one.1;
        }
    }
    let share = |(seen, hits): (f64, f64), prior: f64| {
        (hits + PRIOR_WEIGHT * prior) / (seen + PRIOR_WEIGHT)
    };
    let of_rank = |rank: usize| {
        let cells = pooled.0[rank].iter();
        let (seen, hits) = cells.fold((0.0, 0.0), |sum, cell| (sum.0 + cell.0, sum.1 + cell.1));
        (hits + 0.5) / (seen + 100.0)
    };
    depths
        .iter()
        .map(|counts| {
            (0..RANKS)
                .map(|rank| {
                    let cells = counts.0[rank].iter().zip(&pooled.0[rank]);
                    let shares = cells.map(|(own, all)| share(*own, share(*all, of_rank(rank))));
                    shares.map(|p| ((p * 1e4).round() / 1e4) as f32).collect()
                })
                .collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use treespec_engine::ScoredToken;
    use treespec_sampling::gumbel;

    use super::*;

    /// Answers of a target whose distribution is a sharpened or the same q, with the noise of the seed.
    fn traces(target_scale: f32) -> Vec<Trace> {
        let row = || HeadRow {
            log_normaliser: 0.0,
            top: (0..32)
                .map(|token| ScoredToken {
                    token,
                    score: -0.35 * token as f32,
                })
                .collect(),
            gathered: None,
            chosen: None,
            rank: None,
        };
        let answer = |seed: u64| {
            let token = |index: u32| {
                let score = |token: u32| {
                    -0.35 * target_scale * token as f32 + gumbel(seed, 10 + index, token)
                };
                let tokens = 0..32u32;
                tokens
                    .max_by(|&a, &b| score(a).total_cmp(&score(b)))
                    .unwrap_or(0)
            };
            Trace {
                seed,
                start: 10,
                tokens: (0..60).map(token).collect(),
                blocks: (0..59).map(|_| vec![row(), row()]).collect(),
            }
        };
        (0..12).map(answer).collect()
    }

    #[test]
    fn a_drafter_with_the_targets_distribution_takes_all_of_the_noise() {
        let profile = fit(&[(1.0, traces(1.0))]);
        let fit = &profile.fits[0];
        assert_eq!(fit.tau.len(), 2);
        assert!(
            fit.tau.iter().all(|tau| (0.9..=1.2).contains(tau)),
            "{:?}",
            fit.tau
        );
        // The first always comes, the others never do.
        assert!(fit.acceptance[0][0].iter().any(|&p| p > 0.9));
        assert!(fit.acceptance[0][5].iter().all(|&p| p < 0.1));
    }

    #[test]
    fn a_flat_drafter_takes_less_than_all() {
        let profile = fit(&[(1.0, traces(2.0))]);
        let tau = profile.fits[0].tau[0];
        assert!((0.3..=0.7).contains(&tau), "{tau}");
    }

    #[test]
    fn without_answers_there_is_nothing_to_say() {
        let profile = fit(&[(1.0, Vec::new())]);
        assert!(profile.fits[0].tau.is_empty() && profile.fits[0].acceptance.is_empty());
    }
}
