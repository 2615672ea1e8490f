//! What a request forbids or favours: sets of tokens and additions to logits.

use std::collections::BTreeMap;

use crate::SamplingError;

/// A set of token ids, one bit each. Ids beyond its words are not in it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenMask(Vec<u32>);

impl TokenMask {
    /// Bit `token % 32` of word `token / 32` says whether the token is in the set.
    pub fn from_words(words: Vec<u32>) -> Self {
        Self(words)
    }

    /// All tokens of a vocabulary.
    pub fn all(vocabulary: usize) -> Self {
        let mut mask = Self(vec![u32::MAX; vocabulary.div_ceil(32)]);
        if let (Some(last), used @ 1..) = (mask.0.last_mut(), vocabulary % 32) {
            *last = (1 << used) - 1;
        }
        mask
    }

    /// These tokens of a vocabulary; ids outside it are left out.
    pub fn from_tokens(vocabulary: usize, tokens: impl IntoIterator<Item = u32>) -> Self {
        let mut mask = Self(vec![0; vocabulary.div_ceil(32)]);
        for token in tokens {
            if (token as usize) < vocabulary {
                mask.0[token as usize / 32] |= 1 << (token % 32);
            }
        }
        mask
    }

    /// What can be chosen from a vocabulary: the allowed tokens, all where there is no list of them, less the banned ones.
    pub fn possible(
        vocabulary: usize,
        allowed: Option<&TokenMask>,
        banned: impl IntoIterator<Item = u32>,
    ) -> Self {
        let mut mask = allowed.map_or_else(|| Self::all(vocabulary), Self::clone);
        banned.into_iter().for_each(|token| mask.remove(token));
        mask
    }

    /// True when no token is in the set.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    /// Takes a token out.
    pub fn remove(&mut self, token: u32) {
        if let Some(word) = self.0.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }

    /// Whether the token is in the set.
    pub fn contains(&self, token: u32) -> bool {
        self.0
            .get(token as usize / 32)
            .is_some_and(|word| word >> (token % 32) & 1 != 0)
    }

    /// The tokens, ascending.
    pub fn tokens(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..)
            .step_by(32)
            .zip(&self.0)
            .flat_map(|(first, &word)| {
                (0..32)
                    .filter(move |bit| word >> bit & 1 != 0)
                    .map(move |bit| first + bit)
            })
    }

    /// The words.
    pub fn words(&self) -> &[u32] {
        &self.0
    }
}

/// Tokens that are impossible at the start of an answer, so that it gets its least length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EarlyBans {
    /// Token ids: those that would end the answer.
    pub tokens: Vec<u32>,
    /// First absolute position at which they are possible.
    pub until: u32,
}

impl EarlyBans {
    /// No token is banned anywhere.
    pub const fn none() -> Self {
        Self {
            tokens: Vec::new(),
            until: 0,
        }
    }

    /// The tokens that are impossible at a position.
    pub fn at(&self, position: u32) -> &[u32] {
        match position < self.until {
            true => &self.tokens,
            false => &[],
        }
    }
}

/// Additions to the logits of single tokens.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LogitBias(Vec<(u32, f32)>);

impl LogitBias {
    /// No additions.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// One addition per token: of several the last counts.
    ///
    /// # Errors
    /// [`SamplingError::OutOfRange`] for a bias that is not finite; to forbid a token, ban it.
    pub fn new(entries: impl IntoIterator<Item = (u32, f32)>) -> Result<Self, SamplingError> {
        let entries: BTreeMap<u32, f32> = entries.into_iter().collect();
        match entries.values().find(|bias| !bias.is_finite()) {
            Some(&value) => Err(SamplingError::OutOfRange {
                field: "logit_bias",
                value,
                allowed: "a finite number",
            }),
            None => Ok(Self(entries.into_iter().collect())),
        }
    }

    /// Token and addition, ascending by token.
    pub fn entries(&self) -> &[(u32, f32)] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_hold_what_was_put_in() {
        let mut mask = TokenMask::from_tokens(70, [0, 31, 32, 69, 70, u32::MAX]);
        let held: Vec<u32> = (0..200).filter(|&token| mask.contains(token)).collect();
        assert_eq!(held, [0, 31, 32, 69]);
        assert_eq!(mask.tokens().collect::<Vec<u32>>(), held);
        mask.remove(31);
        mask.remove(1000);
        assert!(!mask.contains(31));
        assert_eq!(mask.words().len(), 3);
    }

    #[test]
    fn what_is_possible_is_allowed_and_not_banned() {
        let held = |mask: &TokenMask| mask.tokens().collect::<Vec<u32>>();
        assert_eq!(held(&TokenMask::possible(4, None, [1, 9])), [0, 2, 3]);
        let allowed = TokenMask::from_tokens(4, [1, 2]);
        assert_eq!(held(&TokenMask::possible(4, Some(&allowed), [1])), [2]);
        assert!(TokenMask::possible(4, Some(&allowed), [1, 2]).is_empty());
    }

    #[test]
    fn a_full_mask_ends_with_the_vocabulary() {
        for vocabulary in [0, 1, 31, 32, 33, 64, 100] {
            let mask = TokenMask::all(vocabulary);
            let held = (0..200).filter(|&token| mask.contains(token)).count();
            assert_eq!(held, vocabulary);
        }
    }

    #[test]
    fn biases_are_sorted_unique_and_finite() {
        let bias = LogitBias::new([(9, 1.0), (2, -3.0), (9, 4.0)]).unwrap();
        assert_eq!(bias.entries(), [(2, -3.0), (9, 4.0)]);
        let error = LogitBias::new([(1, f32::NAN)]).unwrap_err();
        assert_eq!(error.field(), "logit_bias");
        assert!(LogitBias::new([(1, f32::INFINITY)]).is_err());
    }
}
