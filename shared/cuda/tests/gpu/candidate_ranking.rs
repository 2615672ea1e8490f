//! Candidates ranked on the device against the ranking of treespec-engine.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use treespec_checkpoint::{CouplingProfile, TemperatureFit};
use treespec_cuda::{CandidateRanking, DeviceBuffer, DraftCandidates, HeadTopBuffers};
use treespec_engine::{CoupledRanking, HeadRow, ScoredToken};
use treespec_sampling::{Coupling, Ranking};

const NONE: u32 = u32::MAX;

fn random_profile(random: &mut StdRng, depths: usize) -> CouplingProfile {
    let gaps: Vec<f32> = (0..random.random_range(0..8))
        .map(|gap| 0.2 + 0.7 * gap as f32)
        .collect();
    let ranks = random.random_range(1..20);
    let mut fit = |temperature: f32| TemperatureFit {
        temperature,
        tau: (0..depths)
            .map(|depth| match depth % 3 {
                2 => 0.0,
                _ => random.random_range(0.1..2.0),
            })
            .collect(),
        acceptance: (0..depths)
            .map(|_| {
                let cells = |_| {
                    // Coarse: many candidates are equally probable.
                    let cell = |_| random.random_range(0..6) as f32 / 5.0;
                    (0..=gaps.len()).map(cell).collect()
                };
                (0..ranks).map(cells).collect()
            })
            .collect(),
    };
    let fits = vec![fit(0.3), fit(0.8), fit(1.5)];
    CouplingProfile { gaps, fits }
}

/// What the head leaves for one depth: fewer candidates than asked for now and then, some equally probable.
fn random_row(random: &mut StdRng, count: usize) -> HeadRow {
    let real = match random.random_range(0..5) {
        0 => random.random_range(1..=count),
        _ => count,
    };
    let spread = [0.0f32, 0.1, 2.0][random.random_range(0..3)];
    let mut scores: Vec<f32> = (0..real)
        .map(|_| 7.0 - spread * random.random_range(0..40) as f32 / 8.0)
        .collect();
    scores.sort_by(|a, b| b.total_cmp(a));
    let step = random.random_range(1..50);
    let top = (0u32..).zip(scores).map(|(at, score)| ScoredToken {
        token: at * step + 3,
        score,
    });
    HeadRow {
        log_normaliser: random.random_range(7.5..12.0),
        top: top.collect(),
        gathered: None,
        chosen: None,
        rank: None,
    }
}

#[test]
fn candidates_are_ranked_as_the_engine_ranks_them() {
    let Some(device) = crate::device() else {
        return;
    };
    let mut random = StdRng::seed_from_u64(6);
    let (sequences, depths, head_rows, stride) = (5, 7, 8, 256);
    for count in [1usize, 2, 31, 64, 65, 200, 256] {
        for fitted_depths in [0, 1, 5, 40] {
            let profile = (fitted_depths > 0).then(|| random_profile(&mut random, fitted_depths));
            let kernel = CandidateRanking::load(&device, profile.as_ref(), depths).unwrap();
            assert_eq!(kernel.profile(), profile.as_ref());
            let couplings: Vec<Option<Coupling>> = (0..sequences)
                .map(|sequence| {
                    let ranking = match sequence {
                        0 => return None,
                        1 | 2 => Ranking::Full,
                        _ => Ranking::Fitted,
                    };
                    Some(Coupling {
                        seed: random.random(),
                        temperature: random.random_range(0.2..2.0),
                        ranking,
                    })
                })
                .collect();
            let committed: Vec<u32> = (0..sequences as u32).map(|s| 1_000 * s + 17).collect();
            let rows: Vec<HeadRow> = (0..sequences * head_rows)
                .map(|_| random_row(&mut random, count))
                .collect();

            let top = HeadTopBuffers::new(&device, rows.len(), stride).unwrap();
            let mut ids = vec![NONE; rows.len() * stride];
            let mut logits = vec![f32::NEG_INFINITY; rows.len() * stride];
            for (at, row) in rows.iter().enumerate() {
                for (rank, scored) in row.top.iter().enumerate() {
                    ids[at * stride + rank] = scored.token;
                    logits[at * stride + rank] = scored.score;
                }
            }
            let normalisers: Vec<f32> = rows.iter().map(|row| row.log_normaliser).collect();
            top.ids.write(&ids).unwrap();
            top.logits.write(&logits).unwrap();
            top.normaliser.write(&normalisers).unwrap();
            let rankings: Vec<u32> = couplings
                .iter()
                .flat_map(|&coupling| kernel.of(coupling).map_or([NONE; 4], |ranking| ranking.0))
                .collect();
            let rankings = DeviceBuffer::from_slice(&device, &rankings).unwrap();
            let roots = DeviceBuffer::from_slice(&device, &committed).unwrap();
            let candidates = DraftCandidates {
                top: top.top(),
                rows: head_rows,
                depths,
                count,
            };
            let kept = random.random_range(1..=count);
            kernel
                .rank(sequences, candidates, kept, roots.ptr(), rankings.ptr())
                .unwrap();
            let (ids, log_probs) = (top.ids.read().unwrap(), top.logits.read().unwrap());
            let normalisers = top.normaliser.read().unwrap();

            for sequence in 0..sequences {
                let ranking = couplings[sequence].and_then(|coupling| {
                    CoupledRanking::new(coupling, profile.as_ref(), committed[sequence])
                });
                for depth in 0..depths {
                    let row = sequence * head_rows + depth;
                    let own = &rows[row];
                    let expected: Vec<(u32, f32)> = match &ranking {
                        Some(ranking) => ranking
                            .candidates(own, depth)
                            .iter()
                            .map(|candidate| (candidate.token, candidate.log_prob))
                            .collect(),
                        None => own
                            .top
                            .iter()
                            .map(|scored| (scored.token, scored.score - own.log_normaliser))
                            .collect(),
                    };
                    let what = format!(
                        "{count} candidates, {kept} kept, depth {depth}, {:?}",
                        couplings[sequence]
                    );
                    assert_eq!(normalisers[row], 0.0, "{what}");
                    for rank in 0..kept {
                        let at = row * stride + rank;
                        match expected.get(rank) {
                            Some(&(token, log_prob)) => {
                                assert_eq!(ids[at], token, "{what}, rank {rank}");
                                let near = (log_probs[at] - log_prob).abs() <= 1e-4;
                                assert!(near, "{what}, rank {rank}: {} {log_prob}", log_probs[at]);
                            }
                            None => assert_eq!(log_probs[at], f32::NEG_INFINITY, "{what}"),
                        }
                    }
                }
                // The rows of no depth are as they were.
                let spare = sequence * head_rows + depths;
                assert_eq!(normalisers[spare], rows[spare].log_normaliser);
            }
        }
    }
}
