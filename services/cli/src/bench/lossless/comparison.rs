//! Whether an answer is the one of plain decoding.

use crate::answer::Answer;

/// Most that a log-probability may differ.
pub(super) const LOGPROB_TOLERANCE: f32 = 1e-4;

/// How answers compare with those of plain decoding.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Agreement {
    /// Answers compared.
    pub(super) answers: usize,
    /// Of those: the same ids, text, end and ranks, and log-probabilities within [`LOGPROB_TOLERANCE`].
    pub(super) equal: usize,
    /// Largest difference of a log-probability.
    pub(super) logprob_difference: f32,
    /// Tokens and steps, without first tokens.
    tokens: u64,
    steps: u64,
}

impl Agreement {
    /// Compares one more answer.
    pub(super) fn add(&mut self, plain: &Answer, answer: &Answer) {
        let difference = logprob_difference(plain, answer);
        self.answers += 1;
        self.logprob_difference = self.logprob_difference.max(difference);
        let equal = plain.token_ids == answer.token_ids
            && plain.text == answer.text
            && plain.finish_reason == answer.finish_reason
            && plain.logprobs.len() == answer.logprobs.len()
            && difference <= LOGPROB_TOLERANCE;
        self.equal += usize::from(equal);
        self.tokens += answer.token_ids.len().saturating_sub(1) as u64;
        self.steps += u64::from(answer.stats.steps);
    }

    pub(super) fn is_complete(&self) -> bool {
        self.equal == self.answers
    }

    pub(super) fn tokens_per_step(&self) -> f64 {
        self.tokens as f64 / self.steps.max(1) as f64
    }
}

/// The largest difference of chosen and alternative tokens; infinite where they are other tokens or other ranks.
fn logprob_difference(plain: &Answer, answer: &Answer) -> f32 {
    let mut largest = 0f32;
    for (a, b) in plain.logprobs.iter().zip(&answer.logprobs) {
        let same = a.token_id == b.token_id && a.rank == b.rank && a.top.len() == b.top.len();
        let same_top = a
            .top
            .iter()
            .zip(&b.top)
            .all(|(a, b)| a.token_id == b.token_id);
        if !same || !same_top {
            return f32::INFINITY;
        }
        largest = largest.max((a.logprob - b.logprob).abs());
        for (a, b) in a.top.iter().zip(&b.top) {
            largest = largest.max((a.logprob - b.logprob).abs());
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use treespec_rpc::proto::verify::v1::{CandidateLogprob, TokenLogprob};

    use super::*;

    fn answer(logprob: f32) -> Answer {
        let mut answer = Answer {
            text: "ab".into(),
            token_ids: vec![1, 2],
            logprobs: vec![TokenLogprob {
                token_id: 1,
                logprob,
                rank: 1,
                top: vec![CandidateLogprob {
                    token_id: 1,
                    logprob,
                }],
            }],
            ..Answer::default()
        };
        answer.stats.steps = 1;
        answer
    }

    #[test]
    fn any_difference_counts() {
        let mut same = Agreement::default();
        same.add(&answer(-1.0), &answer(-1.00005));
        assert!(same.is_complete());
        assert_eq!(same.tokens_per_step(), 1.0);
        type Edit = fn(&mut Answer);
        let edits: [Edit; 5] = [
            |a| a.token_ids[1] = 3,
            |a| a.text.push('c'),
            |a| a.logprobs[0].logprob = -1.1,
            |a| a.logprobs[0].rank = 2,
            |a| a.logprobs[0].top[0].token_id = 5,
        ];
        for edit in edits {
            let mut other = answer(-1.0);
            edit(&mut other);
            let mut agreement = Agreement::default();
            agreement.add(&answer(-1.0), &other);
            assert_eq!((agreement.answers, agreement.equal), (1, 0));
        }
    }
}
