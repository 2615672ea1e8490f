//! Fitting a profile to recorded answers: how much noise the ranking of each depth takes, and how far ranks can be trusted.

use treespec_checkpoint::{CouplingProfile, TemperatureFit};
use treespec_engine::HeadRow;
use treespec_sampling::gumbel;

use super::traces::Trace;

/// Ratios of the ranking's temperature to the answer's that are tried.
const RATIOS: [f32; 14] = [
    0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.6,
];
/// Borders of the gaps, in the units of the scores.
const GAPS: [f32; 9] = [0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 7.0];
/// Ranks with probabilities of their own; the last stands for all behind it.
const RANKS: usize = 14;
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
    noise: Vec<f32>,
    token: u32,
}

/// The profile of answers that were drawn at each of the temperatures, ascending.
pub(crate) fn fit(answers: &[(f32, Vec<Trace>)]) -> CouplingProfile {
    CouplingProfile {
        gaps: GAPS.to_vec(),
        fits: answers
            .iter()
            .map(|(temperature, traces)| fit_temperature(*temperature, traces))
            .collect(),
    }
}

fn fit_temperature(temperature: f32, traces: &[Trace]) -> TemperatureFit {
    let blocks = traces.iter().flat_map(|trace| &trace.blocks);
    let depths = blocks.map(Vec::len).max().unwrap_or(0);
    // Places whose ancestors could all be in a tree, as (answer, root).
    let mut reachable: Vec<(usize, usize)> = traces
        .iter()
        .enumerate()
        .flat_map(|(answer, trace)| (0..trace.blocks.len()).map(move |root| (answer, root)))
        .collect();
    let mut tau = Vec::with_capacity(depths);
    let mut counts = Vec::with_capacity(depths);
    for depth in 0..depths {
        reachable.retain(|&(answer, root)| root + depth + 1 < traces[answer].tokens.len());
        let observations: Vec<Observation<'_>> = reachable
            .iter()
            .map(|&(answer, root)| observe(&traces[answer], root, depth))
            .collect();
        let before = tau.last().copied().unwrap_or(0.0);
        let ratio = match observations.len() {
            0..LEAST_OBSERVATIONS => before,
            _ => best_ratio(&observations, temperature),
        };
        tau.push(ratio);
        let scored = observations
            .iter()
            .map(|observation| observation.scored(ratio * temperature));
        let mut cells = Counts::default();
        let mut keep = Vec::with_capacity(reachable.len());
        for (scored, observation) in scored.zip(&observations) {
            cells.add(&scored, observation.token);
            let rank = scored.iter().position(|one| one.0 == observation.token);
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
    let row = &trace.blocks[root][depth];
    let position = (trace.start + root + depth + 1) as u32;
    Observation {
        noise: row
            .top
            .iter()
            .map(|candidate| gumbel(trace.seed, position, candidate.token))
            .collect(),
        row,
        token: trace.tokens[root + depth + 1],
    }
}

impl Observation<'_> {
    /// Candidates with their scores, best first, ties to the lower id, as the ranking does it.
    fn scored(&self, tau: f32) -> Vec<(u32, f32)> {
        let candidates = self.row.top.iter().zip(&self.noise);
        let mut scored: Vec<(u32, f32)> = candidates
            .map(|(candidate, noise)| {
                let log_q = candidate.score - self.row.log_normaliser;
                let score = if tau > 0.0 {
                    log_q / tau + noise
                } else {
                    log_q
                };
                (candidate.token, score)
            })
            .collect();
        scored.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        scored
    }
}

/// The ratio whose ranking has the tokens that came furthest in front.
fn best_ratio(observations: &[Observation<'_>], temperature: f32) -> f32 {
    let mut best = (0.0, f64::NEG_INFINITY);
    for ratio in RATIOS {
        let worth: f64 = observations
            .iter()
            .map(|observation| {
                let scored = observation.scored(ratio * temperature);
                let rank = scored.iter().position(|one| one.0 == observation.token);
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
    fn add(&mut self, scored: &[(u32, f32)], token: u32) {
        let second = scored
            .get(1)
            .map_or(f32::INFINITY, |second| scored[0].1 - second.1);
        for (rank, &(candidate, score)) in scored.iter().enumerate() {
            let gap = if rank == 0 {
                second
            } else {
                scored[0].1 - score
            };
            let gap = GAPS.partition_point(|&border| border <= gap);
            let cell = &mut self.0[rank.min(RANKS - 1)][gap];
            cell.0 += 1.0;
            cell.1 += f64::from(u8::from(candidate == token));
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
        assert!(profile.fits[0].tau.is_empty());
    }
}
