//! What the coordinator itself sees of a request's steps: the statistics of an answer that a stop string has ended, since
//! the verifier that would report them is not listened to any more.

use std::time::Instant;

use treespec_rpc::proto::verify::v1::SpeculationStats;

#[derive(Debug)]
pub(crate) struct StepLog {
    started: Instant,
    first_tokens: Option<Instant>,
    last_tokens: Option<Instant>,
    /// Tokens of each message after the first.
    steps: Vec<u32>,
}

impl StepLog {
    /// A request that begins now.
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            first_tokens: None,
            last_tokens: None,
            steps: Vec::new(),
        }
    }

    /// Verify has sent the tokens of a step.
    pub(crate) fn add(&mut self, tokens: usize) {
        let now = Instant::now();
        if self.first_tokens.is_some() {
            self.steps.push(u32::try_from(tokens).unwrap_or(u32::MAX));
        }
        self.first_tokens.get_or_insert(now);
        self.last_tokens = Some(now);
    }

    /// As far as they can be known here, for an answer of `tokens` tokens: drafts and stages are left out.
    pub(crate) fn report(&self, tokens: usize) -> SpeculationStats {
        let seconds = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.duration_since(from).as_secs_f64(),
            _ => 0.0,
        };
        let rounds: Vec<u32> = self.steps.iter().map(|n| n.saturating_sub(1)).collect();
        let deepest = rounds.iter().copied().max().unwrap_or(0);
        let reached = |depth: u32| rounds.iter().filter(|&&round| round > depth).count() as u32;
        let steps = u32::try_from(self.steps.len()).unwrap_or(u32::MAX);
        SpeculationStats {
            steps,
            tokens_per_step: match steps {
                0 => 0.0,
                steps => tokens.saturating_sub(1) as f64 / f64::from(steps),
            },
            accepted_by_depth: (0..deepest).map(reached).collect(),
            decode_seconds: seconds(self.first_tokens, self.last_tokens),
            time_to_first_token_seconds: seconds(Some(self.started), self.first_tokens),
            rounds,
            ..SpeculationStats::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_after_the_first_token() {
        let mut log = StepLog::new();
        assert_eq!(log.report(0).steps, 0);
        [1, 3, 1, 4].into_iter().for_each(|tokens| log.add(tokens));
        let stats = log.report(7);
        assert_eq!((stats.steps, stats.tokens_per_step), (3, 2.0));
        assert_eq!(stats.rounds, [2, 0, 3]);
        assert_eq!(stats.accepted_by_depth, [2, 2, 1]);
    }
}
