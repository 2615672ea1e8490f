//! How the next token is chosen: parameters with their ranges, the logits processors, and seeded Gumbel-max sampling.
//!
//! A token at absolute position p is `argmax(logit' + G(seed, p, token))`, where logit' is the processed logit and G is
//! Gumbel noise from a counter-based generator. The choice is a function of the row's logits, the parameters, the seed
//! and the position alone, so speculation, batching and placement cannot change it. All arithmetic is f32 multiplication,
//! addition and division in one order, and integers: a kernel that does the same chooses the same token.
//!
//! Pure: no I/O, no tensors, no async.

mod arithmetic;
mod blocks;
mod constraints;
mod coupling;
mod filters;
mod greedy;
mod noise;
mod params;
mod penalties;
mod rules;
mod sampler;

pub use arithmetic::mass;
pub use constraints::{EarlyBans, LogitBias, TokenMask};
pub use coupling::{Coupling, Ranking};
pub use filters::{Filters, KEEP_ALL, distance};
pub use greedy::{ScoredToken, greedy};
pub use noise::{NOISE_FLOOR, NOISE_LIMIT, answer_seed, gumbel, gumbel_of_word, random_words};
pub use params::{SamplingError, SamplingParams};
pub use penalties::{Penalties, TokenCount, TokenCounts};
pub use rules::TokenRules;
pub use sampler::{Choice, Processors, distribution, rank, sample};
