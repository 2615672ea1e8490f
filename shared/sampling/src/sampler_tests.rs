use proptest::prelude::*;

use super::*;
use crate::noise::gumbel;

fn params(edit: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams {
        temperature: 1.0,
        seed: Some(11),
        ..SamplingParams::default()
    };
    edit(&mut params);
    params
}

fn token(logits: &[f32], processors: &Processors<'_>, position: u32) -> Option<u32> {
    sample(&mut logits.to_vec(), processors, position).map(|choice| choice.token)
}

/// Tokens that are ever chosen.
fn support(logits: &[f32], processors: &Processors<'_>) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..3000)
        .filter_map(|position| token(logits, processors, position))
        .collect();
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

/// Pearson's statistic of `draws` choices against probabilities.
fn chi_square(logits: &[f32], processors: &Processors<'_>, probabilities: &[f64]) -> f64 {
    let draws = 20_000;
    let mut counts = vec![0.0; logits.len()];
    for position in 0..draws {
        let chosen = token(logits, processors, position).unwrap();
        counts[chosen as usize] += 1.0;
    }
    let expected = probabilities.iter().map(|p| p * f64::from(draws));
    counts
        .iter()
        .zip(expected)
        .map(|(count, expected)| match expected {
            0.0 => count * f64::INFINITY.min(1e9),
            expected => (count - expected).powi(2) / expected,
        })
        .sum()
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let powers: Vec<f64> = logits
        .iter()
        .map(|&l| (f64::from(l) / temperature).exp())
        .collect();
    let total: f64 = powers.iter().sum();
    powers.iter().map(|p| p / total).collect()
}

const LOGITS: [f32; 8] = [0.3, -1.0, 2.0, 1.1, -0.4, 1.9, 0.0, -3.0];
/// Seven degrees of freedom exceed this once in 10^4.
const CHI_SQUARE_7: f64 = 27.9;

#[test]
fn choices_follow_the_softmax() {
    for temperature in [0.5f32, 1.0, 2.0] {
        for seed in [0, 1, u64::MAX] {
            let params = params(|p| {
                p.temperature = temperature;
                p.seed = Some(seed);
            });
            let expected = softmax(&LOGITS, f64::from(temperature));
            let statistic = chi_square(&LOGITS, &Processors::new(&params), &expected);
            assert!(
                statistic < CHI_SQUARE_7,
                "{temperature} {seed}: {statistic}"
            );
        }
    }
}

#[test]
fn choices_follow_the_softmax_of_what_the_filters_leave() {
    let params = params(|p| p.top_k = Some(4));
    let mut kept = LOGITS.map(|_| f32::NEG_INFINITY);
    for token in [0, 2, 3, 5] {
        kept[token] = LOGITS[token];
    }
    let statistic = chi_square(&LOGITS, &Processors::new(&params), &softmax(&kept, 1.0));
    assert!(statistic < CHI_SQUARE_7, "{statistic}");
}

#[test]
fn two_positions_are_independent() {
    // Joint frequencies of neighbouring positions against products, 4 x 4 cells.
    let logits = [0.0f32; 4];
    let params = params(|_| {});
    let processors = Processors::new(&params);
    let mut cells = [0.0f64; 16];
    let mut last = 0;
    for position in 0..32_000 {
        let next = token(&logits, &processors, position).unwrap();
        cells[(last * 4 + next) as usize] += 1.0;
        last = next;
    }
    let statistic: f64 = cells.iter().map(|c| (c - 2000.0).powi(2) / 2000.0).sum();
    // Fifteen degrees of freedom exceed this once in 10^4.
    assert!(statistic < 44.3, "{statistic}");
}

#[test]
fn zero_temperature_takes_the_best_whatever_the_filters() {
    let params = params(|p| {
        p.temperature = 0.0;
        p.top_k = Some(1);
        p.top_p = 0.1;
        p.min_p = 0.9;
    });
    let processors = Processors::new(&params);
    assert_eq!(support(&LOGITS, &processors), [2]);
    assert_eq!(token(&[1.0, 3.0, 3.0], &processors, 0), Some(1));
    assert_eq!(token(&[-0.0, 0.0], &processors, 0), Some(0));
}

#[test]
fn a_temperature_near_zero_is_nearly_greedy() {
    for temperature in [f32::from_bits(1), f32::MIN_POSITIVE, 1e-20, 1e-5] {
        let params = params(|p| p.temperature = temperature);
        assert_eq!(
            support(&LOGITS, &Processors::new(&params)),
            [2],
            "{temperature}"
        );
    }
}

#[test]
fn a_huge_temperature_is_uniform() {
    let params = params(|p| p.temperature = f32::MAX);
    let statistic = chi_square(&LOGITS, &Processors::new(&params), &[0.125; 8]);
    assert!(statistic < CHI_SQUARE_7, "{statistic}");
}

#[test]
fn ties_of_the_perturbed_score_go_to_the_lower_id() {
    // At this distance from the best the noise is rounded away, and the grammar forbids the best.
    let logits = [1e30f32, 1.0, 1.0, 1.0];
    let grammar = TokenMask::from_tokens(4, [1, 2, 3]);
    let params = params(|_| {});
    let processors = Processors {
        grammar: Some(&grammar),
        ..Processors::new(&params)
    };
    assert_eq!(support(&logits, &processors), [1]);
}

#[test]
fn impossible_logits_are_never_chosen() {
    let params = params(|p| p.temperature = 5.0);
    let processors = Processors::new(&params);
    let logits = [f32::NAN, 0.0, f32::NEG_INFINITY, 0.5, -f32::NAN];
    assert_eq!(support(&logits, &processors), [1, 3]);
    assert_eq!(token(&[f32::NAN, f32::NEG_INFINITY], &processors, 0), None);
    assert_eq!(token(&[], &processors, 0), None);
    let infinite = [0.0, f32::INFINITY, 7.0, f32::INFINITY];
    assert_eq!(support(&infinite, &processors), [1, 3]);
}

#[test]
fn bias_comes_before_bans_and_penalties() {
    let params = params(|p| {
        p.temperature = 0.0;
        p.repetition_penalty = 2.0;
    });
    let bias = LogitBias::new([(0, 3.0), (1, 100.0), (9, 1.0)]).unwrap();
    let mut counts = TokenCounts::from_prompt(&[0]);
    counts.push(3);
    let mut logits = [1.0, 1.0, 1.5, -2.0];
    let processors = Processors {
        bias: &bias,
        banned: &[1, 77],
        counts: &counts,
        ..Processors::new(&params)
    };
    let choice = sample(&mut logits, &processors, 0).unwrap();
    // (1 + 3) / 2 wins; penalty before bias would give 3.5, and the ban holds against any bias.
    assert_eq!(logits, [2.0, f32::NEG_INFINITY, 1.5, -4.0]);
    assert_eq!(
        (choice.token, choice.logit, choice.processed),
        (0, 1.0, 2.0)
    );
}

#[test]
fn only_allowed_ids_are_possible() {
    let params = params(|p| p.temperature = 10.0);
    let allowed = TokenMask::from_tokens(8, [1, 4, 6]);
    let processors = Processors {
        allowed: Some(&allowed),
        banned: &[4],
        ..Processors::new(&params)
    };
    assert_eq!(support(&LOGITS, &processors), [1, 6]);
}

#[test]
fn ancestors_count_like_output() {
    let params = params(|p| {
        p.temperature = 0.0;
        p.frequency_penalty = 0.75;
        p.presence_penalty = 0.5;
    });
    let logits = [3.0, 2.5, 0.0];
    let mut counts = TokenCounts::from_prompt(&[0, 0, 0]);
    let plain = Processors {
        counts: &counts,
        ..Processors::new(&params)
    };
    assert_eq!(token(&logits, &plain, 0), Some(0));
    let node = Processors {
        path: &[0],
        ..plain
    };
    assert_eq!(token(&logits, &node, 0), Some(1));
    let deeper = Processors {
        path: &[0, 1, 1],
        ..plain
    };
    assert_eq!(token(&logits, &deeper, 0), Some(0));
    for path in [&[0u32][..], &[0, 1], &[0, 1, 1], &[2, 0, 1]] {
        let node = Processors { path, ..plain };
        let mut by_path = logits;
        sample(&mut by_path, &node, 0);
        let mut committed = counts.clone();
        path.iter().for_each(|&token| committed.push(token));
        let mut by_counts = logits;
        let later = Processors {
            counts: &committed,
            ..Processors::new(&params)
        };
        sample(&mut by_counts, &later, 0);
        assert_eq!(by_path, by_counts);
    }
    counts.push(0);
}

#[test]
fn temperature_comes_before_the_filters_and_top_k_before_top_p() {
    let logits = [4f32.ln(), 2f32.ln(), 0.0, -0.001];
    let at = |temperature: f32, top_k: Option<u32>| {
        let params = params(|p| {
            p.temperature = temperature;
            p.top_k = top_k;
            p.top_p = 0.6;
        });
        support(&logits, &Processors::new(&params))
    };
    assert_eq!(at(1.0, None), [0, 1]);
    assert_eq!(at(0.5, None), [0]);
    assert_eq!(at(1.0, Some(2)), [0]);
}

#[test]
fn the_grammar_comes_last_and_is_never_starved() {
    let grammar = TokenMask::from_tokens(8, [0, 4, 5]);
    let with = |edit: fn(&mut SamplingParams)| {
        let params = params(edit);
        let processors = Processors {
            grammar: Some(&grammar),
            ..Processors::new(&params)
        };
        support(&LOGITS, &processors)
    };
    assert_eq!(with(|_| {}), [0, 4, 5]);
    // The two best are 2 and 5: only 5 is left.
    assert_eq!(with(|p| p.top_k = Some(2)), [5]);
    // The best is 2: nothing is left, so the best of what is allowed is taken.
    assert_eq!(with(|p| p.top_k = Some(1)), [5]);
    assert_eq!(with(|p| p.temperature = 0.0), [5]);
    assert_eq!(with(|p| p.temperature = f32::from_bits(1)), [5]);
    let nothing = TokenMask::default();
    let params = params(|_| {});
    let processors = Processors {
        grammar: Some(&nothing),
        ..Processors::new(&params)
    };
    assert_eq!(token(&LOGITS, &processors, 0), None);
}

/// The definition without any bound, for parameters without edits.
fn unpruned(logits: &[f32], params: &SamplingParams, position: u32) -> Option<u32> {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = Scale {
        best,
        temperature: params.temperature,
    };
    let limit = Filters::new(params).limit(logits, scale);
    let mut winner = None;
    for (token, &logit) in (0u32..).zip(logits) {
        let Some(scaled) = scale.apply(logit).filter(|&x| distance(x) <= limit) else {
            continue;
        };
        if logit == f32::NEG_INFINITY {
            continue;
        }
        let score = scaled + gumbel(params.seed.unwrap(), position, token);
        if winner.is_none_or(|(_, top)| score > top) && score > f32::NEG_INFINITY {
            winner = Some((token, score));
        }
    }
    winner.map(|winner| winner.0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn pruning_changes_nothing(
        logits in prop::collection::vec(prop_oneof![
            20 => -12.0f32..12.0, 1 => Just(f32::NAN), 1 => Just(f32::NEG_INFINITY), 2 => -200.0f32..0.0, 2 => (-8i8..8).prop_map(f32::from),
        ], 0..600),
        seed: u64, position: u32, temperature in prop_oneof![0.01f32..3.0, Just(1.0f32), Just(1e-30), Just(1e30)],
        top_k in prop::option::of(1u32..50), top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
    ) {
        let params = params(|p| {
            p.temperature = temperature;
            p.seed = Some(seed);
            p.top_k = top_k;
            p.top_p = top_p;
        });
        let processors = Processors::new(&params);
        let got = token(&logits, &processors, position);
        prop_assert_eq!(got, unpruned(&logits, &params, position));
        prop_assert_eq!(got, token(&logits, &processors, position));
    }
}
