//! The runs of a benchmark that compares modes: in which order they run, and what they answered.

use super::figures::{Cost, Run};

/// The order of modes in one round: rotated, so that no mode always follows the same other one.
pub(super) fn rotated(count: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |index| (index + round) % count)
}

/// What one mode did with the prompts of a round.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    /// What it took.
    pub(super) cost: Cost,
    /// Token ids of the answers, one per prompt of the round.
    pub(super) answers: Vec<Vec<u32>>,
}

/// All runs so far, by mode.
#[derive(Debug)]
pub(super) struct RunLog {
    runs: Vec<Vec<Run>>,
    /// The first mode's first answer to every prompt.
    expected: Vec<Option<Vec<u32>>>,
}

impl RunLog {
    /// An empty log.
    pub(super) fn new(modes: usize, prompts: usize) -> Self {
        Self {
            runs: vec![Vec::new(); modes],
            expected: vec![None; prompts],
        }
    }

    /// Runs one round: every mode once, in the order of the round, over the prompts from `first_prompt`.
    ///
    /// # Errors
    /// What `measure`, which gets the index of a mode, returns.
    pub(super) async fn round<E>(
        &mut self,
        repetition: u32,
        first_prompt: usize,
        mut measure: impl AsyncFnMut(usize) -> Result<Measured, E>,
    ) -> Result<(), E> {
        let modes = self.runs.len();
        let mut round: Vec<Option<Measured>> = vec![None; modes];
        for mode in rotated(modes, repetition as usize + first_prompt) {
            round[mode] = Some(measure(mode).await?);
        }
        for (mode, measured) in round.into_iter().flatten().enumerate() {
            self.add(mode, repetition, first_prompt, measured);
        }
        Ok(())
    }

    fn add(&mut self, mode: usize, repetition: u32, first_prompt: usize, measured: Measured) {
        let mut same_answers = 0;
        for (expected, answer) in self.expected[first_prompt..]
            .iter_mut()
            .zip(&measured.answers)
        {
            let expected = expected.get_or_insert_with(|| answer.clone());
            same_answers += u32::from(expected == answer);
        }
        self.runs[mode].push(Run {
            repetition,
            prompt: first_prompt,
            cost: measured.cost,
            same_answers,
        });
    }

    /// The runs by mode.
    pub(super) fn into_runs(self) -> Vec<Vec<Run>> {
        self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_takes_every_place_in_turn() {
        assert_eq!(rotated(3, 0).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(rotated(3, 4).collect::<Vec<_>>(), [1, 2, 0]);
    }

    #[tokio::test]
    async fn answers_are_compared_with_the_first_mode_whatever_ran_first() {
        let mut log = RunLog::new(2, 3);
        let mut order = Vec::new();
        // The batch begins at prompt 1, so that the second mode runs first.
        log.round(0, 1, async |mode| {
            order.push(mode);
            let second = if mode == 0 { 5 } else { 6 };
            Ok::<_, ()>(Measured {
                cost: Cost::default(),
                answers: vec![vec![1], vec![second]],
            })
        })
        .await
        .unwrap();
        assert_eq!(order, [1, 0]);
        let runs = log.into_runs();
        assert_eq!((runs[0][0].same_answers, runs[0][0].prompt), (2, 1));
        assert_eq!(runs[1][0].same_answers, 1);
    }
}
