//! What the device knows of the sequences that it samples for, and how little of it is written when they change.

use std::sync::Arc;

use treespec_sampling::{Filters, Penalties, Processors};

use super::patched_words::PatchedWords;
use super::seen_tokens::SeenChanges;
use super::slots::{Known, MaskSource, assign, has_lists};
use super::{SamplerRoom, fits};
use crate::{CudaError, Device, DevicePtr, Module};

/// Words of a sequence's `Sampling` in the kernel file.
pub(super) const SEQUENCE_WORDS: usize = 16;
pub(super) const FLAGS: usize = 11;
pub(super) const HAS_ALLOWED: u32 = 1;
pub(super) const HAS_PENALTIES: u32 = 2;
pub(super) const HAS_EARLY: u32 = 4;

/// Where the lists of a sequence begin on the device, as the kernel's arguments.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lists {
    pub(super) sequences: DevicePtr,
    pub(super) bias_tokens: DevicePtr,
    pub(super) bias_values: DevicePtr,
    pub(super) seen_tokens: DevicePtr,
    pub(super) seen_counts: DevicePtr,
    pub(super) allowed: DevicePtr,
    pub(super) early: DevicePtr,
    pub(super) grammar_rows: DevicePtr,
    pub(super) slots: DevicePtr,
}

/// All of it, and the flags of rows with a grammar mask.
pub(super) struct SequenceStates {
    room: SamplerRoom,
    words: PatchedWords,
    /// By slot. Lists stay in the slot that has them, whatever place in a batch their sequence takes.
    known: Vec<Known>,
    /// Slot of each sequence of a batch.
    slots: Vec<usize>,
    /// Batches so far.
    batches: u64,
    grammar_rows: Vec<bool>,
}

impl SequenceStates {
    /// All sequences are greedy and no row has a mask.
    pub(super) fn new(
        device: &Arc<Device>,
        module: &Module,
        room: SamplerRoom,
    ) -> Result<Self, CudaError> {
        let end = Offsets::new(&room).end;
        // Places of words are u32.
        fits("words of sampling state", end, u32::MAX as usize)?;
        Ok(Self {
            words: PatchedWords::new(device, module, end)?,
            known: (0..room.sequences).map(|_| Known::default()).collect(),
            // As the device's zeros, and changed by the first batch.
            slots: vec![0; room.sequences],
            batches: 0,
            grammar_rows: vec![false; room.rows],
            room,
        })
    }

    pub(super) fn lists(&self) -> Lists {
        let offsets = Offsets::new(&self.room);
        Lists {
            sequences: self.words.at(0),
            bias_tokens: self.words.at(offsets.bias_tokens),
            bias_values: self.words.at(offsets.bias_values),
            seen_tokens: self.words.at(offsets.seen_tokens),
            seen_counts: self.words.at(offsets.seen_counts),
            allowed: self.words.at(offsets.masks[0]),
            early: self.words.at(offsets.masks[1]),
            grammar_rows: self.words.at(offsets.grammar_rows),
            slots: self.words.at(offsets.slots),
        }
    }

    /// See [`super::Sampler::set_sequences`].
    pub(super) fn set(&mut self, sequences: &[(Processors<'_>, usize)]) -> Result<(), CudaError> {
        fits("sequences", sequences.len(), self.room.sequences)?;
        self.batches += 1;
        let slots_at = Offsets::new(&self.room).slots;
        let slots = assign(&self.known, &self.slots, sequences);
        for (sequence, (slot, (processors, counted_path))) in
            slots.into_iter().zip(sequences).enumerate()
        {
            self.set_slot(slot, processors, *counted_path)?;
            if self.slots[sequence] != slot {
                self.slots[sequence] = slot;
                self.words.set(slots_at + sequence, &[slot as u32])?;
            }
        }
        Ok(())
    }

    fn set_slot(
        &mut self,
        slot: usize,
        processors: &Processors<'_>,
        counted_path: usize,
    ) -> Result<(), CudaError> {
        let room = &self.room;
        let bias = processors.bias.entries();
        fits("biased tokens", bias.len(), room.biases)?;
        let words = sequence_words(processors, counted_path);
        if words[FLAGS] & HAS_PENALTIES != 0 {
            let counts = processors.counts.entries();
            fits("different tokens", counts.len(), room.seen)?;
            self.set_seen(slot, processors)?;
        }
        // What has no bias leaves that of another sequence for when it comes back.
        if !bias.is_empty() {
            self.set_bias(slot, bias)?;
        }
        if words[FLAGS] & HAS_ALLOWED != 0 {
            self.set_mask(slot, 0, processors, &[])?;
        }
        if words[FLAGS] & HAS_EARLY != 0 {
            self.set_mask(slot, 1, processors, &processors.early.tokens)?;
        }
        let known = &mut self.known[slot];
        if has_lists(processors) {
            known.used = self.batches;
        }
        if known.words != words {
            known.words = words;
            self.words.set(slot * SEQUENCE_WORDS, &words)?;
        }
        Ok(())
    }

    fn set_seen(&mut self, slot: usize, processors: &Processors<'_>) -> Result<(), CudaError> {
        let offsets = Offsets::new(&self.room);
        let at = slot * self.room.seen;
        let (tokens_at, counts_at) = (offsets.seen_tokens + at, offsets.seen_counts + at);
        let seen = &mut self.known[slot].seen;
        match seen.update(processors.counts.entries()) {
            SeenChanges::Some(changes) => {
                for change in changes {
                    let place = change.place as usize;
                    self.words.set(tokens_at + place, &[change.token])?;
                    self.words.set(counts_at + place, &[change.generated])?;
                }
            }
            SeenChanges::All => {
                let entries = seen.entries();
                let tokens: Vec<u32> = entries.iter().map(|entry| entry.token).collect();
                let counts: Vec<u32> = entries.iter().map(|entry| entry.generated).collect();
                self.words.set(tokens_at, &tokens)?;
                self.words.set(counts_at, &counts)?;
            }
        }
        Ok(())
    }

    fn set_bias(&mut self, slot: usize, bias: &[(u32, f32)]) -> Result<(), CudaError> {
        let known = &mut self.known[slot];
        if known.bias == bias {
            return Ok(());
        }
        known.bias = bias.to_vec();
        let offsets = Offsets::new(&self.room);
        let at = slot * self.room.biases;
        let tokens: Vec<u32> = bias.iter().map(|bias| bias.0).collect();
        let values: Vec<u32> = bias.iter().map(|bias| bias.1.to_bits()).collect();
        self.words.set(offsets.bias_tokens + at, &tokens)?;
        self.words.set(offsets.bias_values + at, &values)
    }

    fn set_mask(
        &mut self,
        slot: usize,
        which: usize,
        processors: &Processors<'_>,
        early: &[u32],
    ) -> Result<(), CudaError> {
        let known = &mut self.known[slot];
        let is_known = |mask: &MaskSource| mask.is(processors, early);
        if known.masks[which].as_ref().is_some_and(is_known) {
            return Ok(());
        }
        let source = MaskSource::of(processors, early);
        let words = source.words(self.room.vocabulary);
        known.masks[which] = Some(source);
        let at = Offsets::new(&self.room).masks[which] + slot * self.room.mask_words();
        self.words.set(at, &words)
    }

    /// Whether a row has a grammar mask.
    pub(super) fn set_grammar_row(&mut self, row: usize, has: bool) -> Result<(), CudaError> {
        if self.grammar_rows[row] == has {
            return Ok(());
        }
        self.grammar_rows[row] = has;
        let at = Offsets::new(&self.room).grammar_rows + row;
        self.words.set(at, &[u32::from(has)])
    }

    pub(super) fn upload(&mut self) -> Result<(), CudaError> {
        self.words.upload()
    }
}

/// Where the lists begin, in words. The parameters of the sequences come first.
struct Offsets {
    bias_tokens: usize,
    bias_values: usize,
    seen_tokens: usize,
    seen_counts: usize,
    masks: [usize; 2],
    grammar_rows: usize,
    slots: usize,
    end: usize,
}

impl Offsets {
    fn new(room: &SamplerRoom) -> Self {
        let mut end = room.sequences * SEQUENCE_WORDS;
        let mut list = |words: usize| {
            let start = end;
            end += words;
            start
        };
        Self {
            bias_tokens: list(room.sequences * room.biases),
            bias_values: list(room.sequences * room.biases),
            seen_tokens: list(room.sequences * room.seen),
            seen_counts: list(room.sequences * room.seen),
            masks: [0; 2].map(|_| list(room.sequences * room.mask_words())),
            grammar_rows: list(room.rows),
            slots: list(room.sequences),
            end,
        }
    }
}

/// The kernel's `Sampling`.
pub(super) fn sequence_words(
    processors: &Processors<'_>,
    counted_path: usize,
) -> [u32; SEQUENCE_WORDS] {
    let params = processors.params;
    let filters = Filters::new(params);
    let penalties = Penalties::new(params);
    let seed = params.seed.unwrap_or(0);
    let mut flags = 0;
    if processors.allowed.is_some() || !processors.banned.is_empty() {
        flags |= HAS_ALLOWED;
    }
    let (mut seen, mut counted) = (0, 0);
    if !penalties.is_neutral() {
        flags |= HAS_PENALTIES;
        seen = processors.counts.entries().len();
        counted = counted_path;
    }
    let mut early_until = 0;
    if !processors.early.tokens.is_empty() {
        flags |= HAS_EARLY;
        early_until = processors.early.until;
    }
    [
        seed as u32,
        (seed >> 32) as u32,
        // -0 is greedy too.
        (params.temperature + 0.0).to_bits(),
        filters.top_k,
        filters.top_p,
        filters.min_p,
        penalties.repetition.to_bits(),
        penalties.presence.to_bits(),
        penalties.frequency.to_bits(),
        processors.bias.entries().len() as u32,
        seen as u32,
        flags,
        counted as u32,
        early_until,
        0,
        0,
    ]
}

#[cfg(test)]
mod tests {
    use treespec_sampling::{EarlyBans, KEEP_ALL, LogitBias, SamplingParams};

    use super::*;

    #[test]
    fn a_greedy_sequence_has_no_edits() {
        let params = SamplingParams::default();
        let words = sequence_words(&Processors::new(&params), 1);
        let one = 1f32.to_bits();
        assert_eq!(
            words,
            [0, 0, 0, 0, 0, KEEP_ALL, one, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
    }

    #[test]
    fn words_hold_the_parameters() {
        let params = SamplingParams {
            temperature: 0.5,
            top_k: Some(40),
            top_p: 0.5,
            seed: Some(0x1234_5678_9ABC_DEF0),
            presence_penalty: 1.0,
            ..SamplingParams::default()
        };
        let bias = LogitBias::new([(3, 1.0)]).unwrap();
        let early = EarlyBans {
            tokens: vec![1],
            until: 70,
        };
        let processors = Processors {
            bias: &bias,
            banned: &[5],
            early: &early,
            ..Processors::new(&params)
        };
        let words = sequence_words(&processors, 1);
        assert_eq!(words[..2], [0x9ABC_DEF0, 0x1234_5678]);
        assert_eq!(words[2], 0.5f32.to_bits());
        assert_eq!(words[3..5], [40, 1 << 31]);
        let flags = HAS_ALLOWED | HAS_PENALTIES | HAS_EARLY;
        assert_eq!(words[9..14], [1, 0, flags, 1, 70]);
    }

    #[test]
    fn lists_do_not_overlap() {
        let room = SamplerRoom {
            vocabulary: 70,
            rows: 5,
            logits_stride: 128,
            sequences: 2,
            biases: 3,
            seen: 10,
        };
        let offsets = Offsets::new(&room);
        assert_eq!(offsets.bias_tokens, 32);
        assert_eq!(offsets.seen_tokens, 32 + 12);
        assert_eq!(offsets.masks, [84, 84 + 2 * 3]);
        assert_eq!(offsets.grammar_rows, 96);
        assert_eq!((offsets.slots, offsets.end), (101, 103));
    }
}
