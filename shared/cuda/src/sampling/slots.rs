//! Which sequence of a batch finds its lists where on the device.

use treespec_sampling::{Processors, TokenMask};

use super::seen_tokens::SeenTokens;
use super::sequence_state::{
    FLAGS, HAS_ALLOWED, HAS_EARLY, HAS_PENALTIES, SEQUENCE_WORDS, sequence_words,
};

/// What the device has in one slot.
#[derive(Default)]
pub(super) struct Known {
    pub(super) words: [u32; SEQUENCE_WORDS],
    pub(super) bias: Vec<(u32, f32)>,
    pub(super) seen: SeenTokens,
    /// The mask of all positions and that of the early ones, where they were written.
    pub(super) masks: [Option<MaskSource>; 2],
    /// The last batch that used the lists.
    pub(super) used: u64,
}

impl Known {
    /// Whether all lists of a sequence are here, but for what its last steps added.
    fn holds(&self, processors: &Processors<'_>) -> bool {
        let flags = sequence_words(processors, 0)[FLAGS];
        let mask = |which: usize, early: &[u32]| {
            let mask = self.masks[which].as_ref();
            mask.is_some_and(|mask| mask.is(processors, early))
        };
        let bias = processors.bias.entries();
        (bias.is_empty() || self.bias == bias)
            && (flags & HAS_ALLOWED == 0 || mask(0, &[]))
            && (flags & HAS_EARLY == 0 || mask(1, &processors.early.tokens))
            && (flags & HAS_PENALTIES == 0 || self.seen.goes_on_in(processors.counts.entries()))
    }
}

/// Whether a sequence has lists.
pub(super) fn has_lists(processors: &Processors<'_>) -> bool {
    !processors.bias.entries().is_empty() || sequence_words(processors, 0)[FLAGS] != 0
}

/// A slot for every sequence of a batch: the one that has its lists, else the one whose lists were not used for longest.
/// `before` are the slots of the last batch: without lists any slot is as good, and that one needs no change.
pub(super) fn assign(
    known: &[Known],
    before: &[usize],
    sequences: &[(Processors<'_>, usize)],
) -> Vec<usize> {
    let mut free = vec![true; known.len()];
    let mut slots: Vec<Option<usize>> = vec![None; sequences.len()];
    for (slot, (&own, (processors, _))) in slots.iter_mut().zip(before.iter().zip(sequences)) {
        if has_lists(processors) {
            let mut all = std::iter::once(own).chain(0..known.len());
            *slot = all.find(|&slot| free[slot] && known[slot].holds(processors));
            slot.iter().for_each(|&slot| free[slot] = false);
        }
    }
    let slots = slots.into_iter().zip(before.iter().zip(sequences));
    let rest = slots.map(|(slot, (&own, (processors, _)))| {
        let slot = slot.unwrap_or_else(|| {
            let mut open = (0..known.len()).filter(|&slot| free[slot]);
            match has_lists(processors) {
                true => open.min_by_key(|&slot| known[slot].used),
                false if free[own] => Some(own),
                false => open.next(),
            }
            .expect("invariant: there are as many slots as sequences")
        });
        free[slot] = false;
        slot
    });
    rest.collect()
}

/// What a mask is made of. Comparing it costs less than making the mask.
pub(super) struct MaskSource {
    allowed: Option<TokenMask>,
    banned: Vec<u32>,
    early: Vec<u32>,
}

impl MaskSource {
    pub(super) fn is(&self, processors: &Processors<'_>, early: &[u32]) -> bool {
        self.allowed.as_ref() == processors.allowed
            && self.banned == processors.banned
            && self.early == early
    }

    pub(super) fn of(processors: &Processors<'_>, early: &[u32]) -> Self {
        Self {
            allowed: processors.allowed.cloned(),
            banned: processors.banned.to_vec(),
            early: early.to_vec(),
        }
    }

    /// Words of the allowed ids less the banned ones, for a whole vocabulary.
    pub(super) fn words(&self, vocabulary: usize) -> Vec<u32> {
        let banned = self.banned.iter().chain(&self.early).copied();
        let mask = TokenMask::possible(vocabulary, self.allowed.as_ref(), banned);
        let mut words = mask.words().to_vec();
        // A mask holds no token beyond its own words.
        words.resize(vocabulary.div_ceil(32), 0);
        words
    }
}

#[cfg(test)]
mod tests {
    use treespec_sampling::{SamplingParams, TokenCounts};

    use super::*;

    #[test]
    fn bans_are_taken_out_of_what_is_allowed() {
        let params = SamplingParams::default();
        let allowed = TokenMask::from_tokens(40, [1, 5, 39]);
        let mut processors = Processors {
            banned: &[5, 1000],
            ..Processors::new(&params)
        };
        let words = |processors: &Processors<'_>, early: &[u32]| {
            MaskSource::of(processors, early).words(70)
        };
        assert_eq!(words(&processors, &[]), [!(1 << 5), u32::MAX, 0x3F]);
        assert_eq!(words(&processors, &[0]), [!(1 << 5) - 1, u32::MAX, 0x3F]);
        processors.allowed = Some(&allowed);
        assert_eq!(words(&processors, &[39]), [1 << 1, 0, 0]);
    }

    #[test]
    fn sequences_find_their_lists_wherever_they_come_in_a_batch() {
        let params = SamplingParams {
            presence_penalty: 1.0,
            ..SamplingParams::default()
        };
        let best = SamplingParams::default();
        let plain = Processors::new(&best);
        let mut counts = [[1, 2], [2, 3], [3, 4]].map(|prompt| TokenCounts::from_prompt(&prompt));
        let mut known: Vec<Known> = (0..4).map(|_| Known::default()).collect();
        let of = |counts| Processors {
            counts,
            ..Processors::new(&params)
        };
        for (slot, of_slot) in [(1, 0), (3, 1)] {
            known[slot].seen.update(counts[of_slot].entries());
            known[slot].used = 7;
        }
        counts[1].push(9);
        let batch = [
            (plain, 0),
            (of(&counts[2]), 0),
            (of(&counts[1]), 0),
            (of(&counts[0]), 0),
        ];
        let before = [1, 1, 2, 3];
        assert_eq!(assign(&known, &before, &batch), [0, 2, 3, 1]);
        // A new one takes what was not used for longest.
        known[0].used = 5;
        known[2].used = 4;
        assert_eq!(assign(&known, &before, &batch[1..2]), [2]);
        assert_eq!(assign(&known, &before, &batch[..1]), [1]);
    }
}
