//! Coupled drafting: the drafter ranks its candidates with the noise that the target's choice will be drawn with.
//!
//! The target takes `argmax(logit / T + G)`. A drafter whose distribution were the target's would find that token by the
//! same `G`; as a block's marginals are flatter than the target's conditionals, only a part of the noise is of use: the
//! ranking is `log q / tau + G`, with a tau per depth that was fitted to the pair of models. Which drafts are made never
//! changes a token, only how many of them are accepted.

use treespec_checkpoint::{CouplingProfile, TemperatureFit};
use treespec_sampling::{Coupling, Ranking, gumbel};
use treespec_tree::Candidate;

use crate::HeadRow;

/// Candidates of a depth that are ranked with noise: it seldom lifts one from further down.
pub(crate) const RANKED_CANDIDATES: usize = 64;

/// Least probability of a candidate: one that was never accepted keeps its place behind the others.
const LEAST_PROBABILITY: f32 = 1e-4;

/// The ranking of one draft.
#[derive(Debug, Clone, Copy)]
pub struct CoupledRanking<'a> {
    coupling: Coupling,
    fit: Option<(&'a CouplingProfile, &'a TemperatureFit)>,
    root_position: u32,
}

impl<'a> CoupledRanking<'a> {
    /// Of a draft whose root is at an absolute position, by a drafter with this profile. `None` when candidates are ranked
    /// by q alone.
    pub fn new(
        coupling: Coupling,
        profile: Option<&'a CouplingProfile>,
        root_position: u32,
    ) -> Option<Self> {
        let fit = match (coupling.ranking, profile) {
            (Ranking::Full, _) => None,
            (Ranking::Fitted, Some(profile)) => {
                let fit = profile.fit(coupling.temperature);
                if fit.tau.is_empty() {
                    return None;
                }
                Some((profile, fit))
            }
            (Ranking::Plain, _) | (Ranking::Fitted, None) => return None,
        };
        (coupling.temperature > 0.0).then_some(Self {
            coupling,
            fit,
            root_position,
        })
    }
}

impl CoupledRanking<'_> {
    /// Log-probability of a candidate, from the share of those like it that were the target's token.
    pub fn log_prob(share: f32) -> f32 {
        share.max(LEAST_PROBABILITY).ln()
    }

    /// Candidates for the token `depth + 1` positions behind the root, best first. `row` has its normaliser.
    pub fn candidates(&self, row: &HeadRow, depth: usize) -> Vec<Candidate> {
        let position = self.root_position.saturating_add(depth as u32 + 1);
        let tau = match self.fit {
            None => 1.0,
            Some((_, fit)) => fit.tau.get(depth).copied().unwrap_or(0.0),
        };
        let tau = tau * self.coupling.temperature;
        let ranked = rank_candidates(row, tau, self.coupling.seed, position);
        let acceptance = self.fit.and_then(|(profile, fit)| {
            let acceptance = fit.acceptance.get(depth)?;
            Some((profile, acceptance))
        });
        let log_prob = |rank: usize, gap: f32| match acceptance {
            None => -gap,
            Some((profile, ranks)) => {
                let gaps = &ranks[rank.min(ranks.len() - 1)];
                Self::log_prob(gaps[profile.gap(gap)])
            }
        };
        let mut candidates: Vec<Candidate> = ranked
            .iter()
            .enumerate()
            .map(|(rank, ranked)| Candidate {
                token: ranked.token,
                log_prob: log_prob(rank, ranked.gap),
            })
            .collect();
        // Stable: equally probable candidates stay in the order of their scores.
        candidates.sort_by(|a, b| b.log_prob.total_cmp(&a.log_prob));
        candidates
    }
}

/// A candidate in the order of scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankedCandidate {
    /// Token id.
    pub token: u32,
    /// How far its score is below `ln(sum(exp(score)))` over all candidates, in nats: near 0 for one that stands alone.
    pub gap: f32,
}

/// Candidates of a row by the score `log q / tau + G` for the token at an absolute position, by `log q` with a tau of 0;
/// best first, ties to the lower id. `row` has its normaliser.
pub fn rank_candidates(row: &HeadRow, tau: f32, seed: u64, position: u32) -> Vec<RankedCandidate> {
    let mut scored: Vec<(u32, f32)> = row
        .top
        .iter()
        .map(|candidate| {
            let log_q = candidate.score - row.log_normaliser;
            let score = match tau > 0.0 {
                true => log_q / tau + gumbel(seed, position, candidate.token),
                false => log_q,
            };
            (candidate.token, score)
        })
        .collect();
    scored.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let best = scored.first().map_or(0.0, |first| first.1);
    let mass: f32 = scored.iter().map(|(_, score)| (score - best).exp()).sum();
    let top = best + mass.ln();
    scored
        .into_iter()
        .map(|(token, score)| RankedCandidate {
            token,
            gap: top - score,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use treespec_sampling::ScoredToken;

    fn row() -> HeadRow {
        HeadRow {
            log_normaliser: 1.0,
            top: (0..40)
                .map(|token| ScoredToken {
                    token,
                    score: -0.1 * token as f32,
                })
                .collect(),
            gathered: None,
            chosen: None,
            rank: None,
        }
    }

    fn coupling(ranking: Ranking) -> Coupling {
        Coupling {
            seed: 9,
            temperature: 0.5,
            ranking,
        }
    }

    fn profile(tau: f32) -> CouplingProfile {
        let ranks = vec![vec![0.2, 0.1], vec![0.5, 0.4], vec![0.05, 0.01]];
        CouplingProfile {
            gaps: vec![20.0],
            fits: vec![TemperatureFit {
                temperature: 0.7,
                tau: vec![tau; 2],
                acceptance: vec![ranks; 2],
            }],
        }
    }

    #[test]
    fn full_coupling_finds_what_the_same_distribution_would_choose() {
        let ranking = CoupledRanking::new(coupling(Ranking::Full), None, 10).unwrap();
        for depth in 0..5 {
            let best = (0..40u32)
                .max_by(|&a, &b| {
                    let score = |t: u32| -0.2 * t as f32 + gumbel(9, 11 + depth, t);
                    score(a).total_cmp(&score(b))
                })
                .unwrap();
            let candidates = ranking.candidates(&row(), depth as usize);
            assert_eq!(candidates[0].token, best);
            let mass: f32 = candidates.iter().map(|c| c.log_prob.exp()).sum();
            assert!((mass - 1.0).abs() < 1e-5);
        }
    }

    #[test]
    fn a_fit_without_noise_ranks_by_q_with_the_fitted_probabilities() {
        let profile = profile(0.0);
        let ranking = CoupledRanking::new(coupling(Ranking::Fitted), Some(&profile), 10).unwrap();
        let candidates = ranking.candidates(&row(), 1);
        // By the table the second is the likelier one.
        assert_eq!(candidates[0].token, 1);
        assert_eq!(candidates[1].token, 0);
        assert!((candidates[0].log_prob.exp() - 0.5).abs() < 1e-6);
        assert!((candidates[1].log_prob.exp() - 0.2).abs() < 1e-6);
        let order: Vec<u32> = candidates[2..].iter().map(|c| c.token).collect();
        assert_eq!(order, (2..40).collect::<Vec<u32>>());
        assert!(
            candidates
                .windows(2)
                .all(|pair| pair[0].log_prob >= pair[1].log_prob)
        );
    }

    #[test]
    fn depths_beyond_the_fit_rank_by_q() {
        let profile = profile(1.0);
        let ranking = CoupledRanking::new(coupling(Ranking::Fitted), Some(&profile), 10).unwrap();
        let order: Vec<u32> = ranking
            .candidates(&row(), 2)
            .iter()
            .map(|c| c.token)
            .collect();
        assert_eq!(order, (0..40).collect::<Vec<u32>>());
    }

    #[test]
    fn without_a_profile_or_a_temperature_there_is_nothing_to_couple() {
        for ranking in [Ranking::Plain, Ranking::Fitted] {
            assert!(CoupledRanking::new(coupling(ranking), None, 0).is_none());
        }
        let greedy = Coupling {
            temperature: 0.0,
            ..coupling(Ranking::Full)
        };
        assert!(CoupledRanking::new(greedy, None, 0).is_none());
    }
}
