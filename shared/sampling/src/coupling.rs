//! What a drafter is told of a sequence's draw.

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
