//! What a drafter is told of a sequence's draw.

use crate::SamplingParams;

/// How a sampled sequence's candidates are ranked. Tokens do not depend on it, only how many drafts are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ranking {
    /// By the drafter's probability alone.
    Plain,
    /// By `log q / T + G`, as if the drafter's distribution were the target's.
    Full,
    /// With as much of the noise as was fitted to the drafter; by its probability alone when nothing was.
    #[default]
    Fitted,
}

/// The noise that the target draws a sequence's tokens with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Coupling {
    /// Seed of the noise.
    pub seed: u64,
    /// Temperature of the answer, above 0.
    pub temperature: f32,
    /// What the drafter makes of it.
    pub ranking: Ranking,
}

impl Coupling {
    /// Of a sequence with these parameters; `None` where nothing is drawn, or the drafter need not know of it.
    pub fn of(params: &SamplingParams, ranking: Ranking) -> Option<Self> {
        (!params.is_greedy() && ranking != Ranking::Plain).then(|| Self {
            seed: params.seed.unwrap_or(0),
            temperature: params.temperature,
            ranking,
        })
    }
}
