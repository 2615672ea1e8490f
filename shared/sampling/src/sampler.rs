//! From logits to a token.

use crate::blocks::{BLOCK, GROUP, largest};
use crate::constraints::{EarlyBans, LogitBias, TokenMask};
use crate::filters::{Filters, Scale, distance};
use crate::noise::{NOISE_LIMIT, gumbel_of_word, noise_bound, random_words};
use crate::penalties::{Penalties, TokenCounts};
use crate::{KEEP_ALL, SamplingParams};

/// Everything besides the logits that decides a token. They work in the order of the fields of this list:
///
/// 1. bias, then allowed and banned ids;
/// 2. repetition, frequency and presence penalties;
/// 3. temperature, top-k, top-p, min-p, each on what the one before left;
/// 4. grammar;
/// 5. noise, keyed by the seed of the parameters (0 where none was drawn).
///
/// At temperature 0 the filters and the noise do nothing. Where the filters leave no token that the grammar allows, the
/// most probable allowed token is taken.
#[derive(Debug, Clone, Copy)]
pub struct Processors<'a> {
    /// Temperature, filters, penalties and seed.
    pub params: &'a SamplingParams,
    /// Added first.
    pub bias: &'a LogitBias,
    /// When there, all other ids are impossible.
    pub allowed: Option<&'a TokenMask>,
    /// Impossible ids.
    pub banned: &'a [u32],
    /// Ids that are impossible at the start of the answer.
    pub early: &'a EarlyBans,
    /// The tokens so far, for the penalties.
    pub counts: &'a TokenCounts,
    /// Tokens generated after those that `counts` has: of a tree node its ancestors and itself.
    pub path: &'a [u32],
    /// When there, only these tokens can come next.
    pub grammar: Option<&'a TokenMask>,
}

impl<'a> Processors<'a> {
    /// The parameters and nothing else.
    pub fn new(params: &'a SamplingParams) -> Self {
        static NO_BIAS: LogitBias = LogitBias::none();
        static NO_EARLY_BANS: EarlyBans = EarlyBans::none();
        static NO_COUNTS: TokenCounts = TokenCounts::none();
        Self {
            params,
            bias: &NO_BIAS,
            allowed: None,
            banned: &[],
            early: &NO_EARLY_BANS,
            counts: &NO_COUNTS,
            path: &[],
            grammar: None,
        }
    }

    /// True when the choice is the most probable token of the unprocessed logits, whatever they are.
    pub fn is_argmax(&self) -> bool {
        self.params.is_greedy()
            && self.bias.entries().is_empty()
            && self.allowed.is_none()
            && self.banned.is_empty()
            && self.early.tokens.is_empty()
            && self.grammar.is_none()
            && !self.has_penalties()
    }

    /// Whether the tokens so far matter.
    pub fn has_penalties(&self) -> bool {
        !Penalties::new(self.params).is_neutral()
    }

    /// Whether a token can follow the tokens so far.
    #[inline(always)]
    fn allows(&self, token: u32) -> bool {
        self.grammar.is_none_or(|grammar| grammar.contains(token))
    }
}

/// A token with what its log-probability needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Token id.
    pub token: u32,
    /// Its logit before any processor; less the log-normaliser of the same logits it is its log-probability.
    pub logit: f32,
    /// Its logit after bias and penalties.
    pub processed: f32,
}

/// Chooses the token at absolute position `position` from the logits of its row, one per token of the vocabulary.
///
/// Bias, bans and penalties are applied to `logits` in place. NaN and minus infinity are never chosen; `None` when
/// nothing else is there or nothing is allowed. Ties go to the lower id.
///
/// Inlined, with all that goes over the vocabulary, so that a caller which is compiled for an instruction set gets loops for
/// it. They do the same operations in every one.
#[inline(always)]
pub fn sample(logits: &mut [f32], processors: &Processors<'_>, position: u32) -> Option<Choice> {
    let originals = process(logits, processors, position);
    let allowed = |token: u32| processors.allows(token);
    let sampled = match processors.params.is_greedy() {
        true => None,
        false => perturbed(logits, processors.params, position, allowed),
    };
    let token = sampled.or_else(|| most_probable(logits, allowed))?;
    let processed = logits[token as usize];
    let edited = originals.iter().find(|original| original.0 == token);
    Some(Choice {
        token,
        logit: edited.map_or(processed, |original| original.1),
        processed,
    })
}

/// Turns the logits of a row into those of the distribution that its token is drawn from: processed, and divided by the
/// temperature unless that is 0. What cannot be chosen is minus infinity.
pub fn distribution(logits: &mut [f32], processors: &Processors<'_>, position: u32) {
    process(logits, processors, position);
    let best = largest(logits);
    if best == f32::NEG_INFINITY {
        return;
    }
    let last_resort = most_probable(logits, |token| processors.allows(token));
    let scale = Scale {
        best,
        temperature: processors.params.temperature,
    };
    let limit = match processors.params.is_greedy() {
        true => KEEP_ALL,
        false => Filters::new(processors.params).limit(logits, scale),
    };
    let mut is_empty = true;
    for (token, logit) in (0u32..).zip(logits.iter_mut()) {
        let scaled = match processors.params.is_greedy() {
            true => Some(*logit - best).filter(|scaled| !scaled.is_nan()),
            false => scale.apply(*logit),
        };
        let kept = scaled
            .filter(|&scaled| limit == KEEP_ALL || distance(scaled) <= limit)
            .filter(|_| processors.allows(token));
        is_empty &= kept.is_none_or(|kept| kept == f32::NEG_INFINITY);
        *logit = kept.unwrap_or(f32::NEG_INFINITY);
    }
    if let (true, Some(token)) = (is_empty, last_resort) {
        logits[token as usize] = 0.0;
    }
}

/// How many tokens come before `token` by logit, ties by the lower id, and itself: 1 is the most probable.
pub fn rank(logits: &[f32], token: u32) -> u32 {
    let own = logits
        .get(token as usize)
        .copied()
        .unwrap_or(f32::NEG_INFINITY);
    let (before, behind) = logits.split_at(logits.len().min(token as usize));
    let above = before.iter().filter(|&&logit| logit >= own).count()
        + behind.iter().filter(|&&logit| logit > own).count();
    1 + above as u32
}

/// Applies bias, bans and penalties. Returns the changed logits of tokens that can still be chosen, as they were.
fn process(logits: &mut [f32], processors: &Processors<'_>, position: u32) -> Vec<(u32, f32)> {
    let mut originals = Vec::new();
    for &(token, bias) in processors.bias.entries() {
        if let Some(logit) = logits.get_mut(token as usize) {
            originals.push((token, *logit));
            *logit += bias;
        }
    }
    if let Some(allowed) = processors.allowed {
        for (token, logit) in (0u32..).zip(logits.iter_mut()) {
            if !allowed.contains(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    for &token in processors
        .banned
        .iter()
        .chain(processors.early.at(position))
    {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    let penalties = Penalties::new(processors.params);
    if !penalties.is_neutral() {
        Penalties::visit(processors.counts, processors.path, |token, generated| {
            if let Some(logit) = logits.get_mut(token as usize) {
                // After the bias's entry of the same token, which is found first.
                originals.push((token, *logit));
                *logit = penalties.apply(*logit, generated);
            }
        });
    }
    originals
}

fn most_probable(logits: &[f32], allowed: impl Fn(u32) -> bool) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (token, &logit) in (0u32..).zip(logits) {
        // False for NaN; a tie stays with the lower id, which came first.
        if logit > best.map_or(f32::NEG_INFINITY, |best| best.1) && allowed(token) {
            best = Some((token, logit));
        }
    }
    best.map(|best| best.0)
}

/// The token with the best sum of scaled logit and noise, among those that filters and grammar leave.
///
/// Most tokens need no logarithm and many not even random words: noise is bounded, so only tokens near the best sum so
/// far can win. The bounds are above the exact values, so the outcome is that of trying them all.
#[inline(always)]
fn perturbed(
    logits: &[f32],
    params: &SamplingParams,
    position: u32,
    allowed: impl Fn(u32) -> bool,
) -> Option<u32> {
    let seed = params.seed.unwrap_or(0);
    let best = largest(logits);
    if best == f32::NEG_INFINITY {
        return None;
    }
    let scale = Scale {
        best,
        temperature: params.temperature,
    };
    let limit = Filters::new(params).limit(logits, scale);
    let floor = scale.floor(limit);
    // A little less than 1 / temperature brings negative numbers nearer to 0 than the exact quotients.
    let bound_scale = (1.0 - 1.0 / 1_048_576.0) / params.temperature;
    // NaN, when the best is infinite or the temperature tiny, passes all bounds.
    let reach = |logit: f32| (logit - best) * bound_scale;
    let hopeless = |logit: f32, word: u32, top: f32| {
        (logit < floor) | (reach(logit) + noise_bound(word) < top)
    };
    let mut winner: Option<u32> = None;
    let mut top = f32::NEG_INFINITY;
    for (first, logits) in (0u32..).step_by(BLOCK).zip(logits.chunks(BLOCK)) {
        let nearest = largest(logits);
        if nearest < floor || reach(nearest) + NOISE_LIMIT < top {
            continue;
        }
        let words = block_words(seed, position, first / 4);
        let groups = logits.chunks(GROUP).zip(words.chunks(GROUP));
        for (first, (logits, words)) in (first..).step_by(GROUP).zip(groups) {
            let pairs = logits.iter().zip(words);
            let all_are = |all: bool, (&logit, &word)| all & hopeless(logit, word, top);
            if pairs.clone().fold(true, all_are) {
                continue;
            }
            for (token, (&logit, &word)) in (first..).zip(pairs) {
                if hopeless(logit, word, top) {
                    continue;
                }
                let Some(scaled) = scale.apply(logit) else {
                    continue;
                };
                if (limit < KEEP_ALL && distance(scaled) > limit) || !allowed(token) {
                    continue;
                }
                let score = scaled + gumbel_of_word(word);
                if score > top {
                    top = score;
                    winner = Some(token);
                }
            }
        }
    }
    winner
}

/// The random words of a block of tokens, in the order of their ids.
#[inline(always)]
fn block_words(seed: u64, position: u32, first_quad: u32) -> [u32; BLOCK] {
    let mut words = [0; BLOCK];
    for (quad, four) in (first_quad..).zip(words.chunks_exact_mut(4)) {
        four.copy_from_slice(&random_words(seed, position, quad));
    }
    words
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
