//! The tokens that a sequence has seen, as the device has them.

use treespec_sampling::TokenCount;

/// More changes than this are not worth looking for: the whole list is written.
const MOST_CHANGES: usize = 256;

/// A token in the device's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SeenToken {
    pub(super) token: u32,
    /// Times it was generated.
    pub(super) generated: u32,
    /// Index in the device's list, whose order does not matter: new tokens are appended.
    pub(super) place: u32,
}

/// What an update changes on the device.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SeenChanges {
    /// These entries.
    Some(Vec<SeenToken>),
    /// The whole list, see [`SeenTokens::entries`].
    All,
}

/// The list of one sequence, ascending by token.
#[derive(Debug, Default)]
pub(super) struct SeenTokens(Vec<SeenToken>);

impl SeenTokens {
    /// All of it; where it was replaced, in the order of the device's list.
    pub(super) fn entries(&self) -> &[SeenToken] {
        &self.0
    }

    /// Makes it that of `counts` (ascending by token). A sequence that goes on changes as many entries as it has new
    /// tokens; another sequence in its place lacks some of the old ones.
    pub(super) fn update(&mut self, counts: &[TokenCount]) -> SeenChanges {
        match self.changed(counts) {
            Some((entries, changes)) => {
                self.0 = entries;
                SeenChanges::Some(changes)
            }
            None => {
                let place = |(place, count): (u32, &TokenCount)| SeenToken {
                    token: count.token,
                    generated: count.generated,
                    place,
                };
                self.0 = (0u32..).zip(counts).map(place).collect();
                SeenChanges::All
            }
        }
    }

    /// Whether `counts` (ascending by token) is this list or one that goes on from it. An empty list is nobody's.
    pub(super) fn goes_on_in(&self, counts: &[TokenCount]) -> bool {
        let new = counts.len().checked_sub(self.0.len());
        if self.0.is_empty() || new.is_none_or(|new| new > MOST_CHANGES) {
            return false;
        }
        let mut counts = counts.iter();
        self.0
            .iter()
            .all(|known| counts.any(|count| count.token == known.token))
    }

    /// The new list and how it differs; `None` when it is another one.
    fn changed(&self, counts: &[TokenCount]) -> Option<(Vec<SeenToken>, Vec<SeenToken>)> {
        if counts.len() < self.0.len() || counts.len() - self.0.len() > MOST_CHANGES {
            return None;
        }
        let mut known = self.0.iter().copied().peekable();
        let mut entries = Vec::with_capacity(counts.len());
        let mut changes = Vec::new();
        let mut end = self.0.len() as u32;
        for count in counts {
            let old = known.next_if(|known| known.token <= count.token);
            let place = match old {
                Some(old) if old.token == count.token => old.place,
                Some(_) => return None,
                None => {
                    end += 1;
                    end - 1
                }
            };
            let entry = SeenToken {
                token: count.token,
                generated: count.generated,
                place,
            };
            if old != Some(entry) {
                changes.push(entry);
            }
            entries.push(entry);
        }
        (known.peek().is_none() && changes.len() <= MOST_CHANGES).then_some((entries, changes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use treespec_sampling::TokenCounts;

    /// Applies changes to a device's list.
    fn apply(list: &mut Vec<(u32, u32)>, seen: &SeenTokens, changes: &SeenChanges) {
        let changes = match changes {
            SeenChanges::Some(changes) => changes,
            SeenChanges::All => seen.entries(),
        };
        for change in changes {
            let place = change.place as usize;
            if place >= list.len() {
                list.resize(place + 1, (u32::MAX, 0));
            }
            list[place] = (change.token, change.generated);
        }
    }

    fn sorted(list: &[(u32, u32)]) -> Vec<(u32, u32)> {
        let mut list = list.to_vec();
        list.sort_unstable();
        list
    }

    fn pairs(counts: &TokenCounts) -> Vec<(u32, u32)> {
        let pair = |count: &TokenCount| (count.token, count.generated);
        counts.entries().iter().map(pair).collect()
    }

    #[test]
    fn the_device_has_the_counts_after_every_step_and_few_words_change() {
        let (mut seen, mut list) = (SeenTokens::default(), Vec::new());
        let prompt: Vec<u32> = (0..2_000).map(|i| i * 7 % 5_003).collect();
        let mut counts = TokenCounts::from_prompt(&prompt);
        let first = seen.update(counts.entries());
        assert_eq!(first, SeenChanges::All);
        apply(&mut list, &seen, &first);
        for step in 0..300u32 {
            let tokens = [step * 31 % 97, 5_100 - step, 14];
            tokens.iter().for_each(|&token| counts.push(token));
            assert!(seen.goes_on_in(counts.entries()));
            let changes = seen.update(counts.entries());
            assert!(
                matches!(&changes, SeenChanges::Some(changes) if changes.len() <= 3),
                "{changes:?}"
            );
            apply(&mut list, &seen, &changes);
            assert_eq!(sorted(&list), pairs(&counts));
        }
        assert_eq!(seen.update(counts.entries()), SeenChanges::Some(Vec::new()));
    }

    #[test]
    fn another_sequence_replaces_the_list() {
        for other in [
            vec![1, 2],
            vec![1, 2, 4],
            vec![5, 6, 7, 8],
            vec![0, 1, 3, 9],
        ] {
            let mut seen = SeenTokens::default();
            seen.update(TokenCounts::from_prompt(&[1, 2, 3]).entries());
            let counts = TokenCounts::from_prompt(&other);
            assert!(!seen.goes_on_in(counts.entries()), "{other:?}");
            assert_eq!(seen.update(counts.entries()), SeenChanges::All, "{other:?}");
            assert!(seen.goes_on_in(counts.entries()));
            let mut list = Vec::new();
            apply(&mut list, &seen, &SeenChanges::All);
            assert_eq!(list, pairs(&counts));
        }
    }
}
