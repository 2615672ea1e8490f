//! From the wire to a request that is sound.

use std::collections::HashSet;

use treespec_grammar::GrammarSource;
use treespec_rpc::ServiceError;
use treespec_rpc::convert::{
    ConstraintCompany, OutputOptions, Speculation, check_tokens, constraint_from_proto,
    ranking_from_proto, sampling_from_proto,
};
use treespec_rpc::proto::verify::v1 as pb;
use treespec_sampling::{EarlyBans, Ranking, TokenMask, TokenRules};

/// What a request is checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits<'a> {
    pub(crate) vocab_size: usize,
    pub(crate) context_length: usize,
    pub(crate) eos_token_ids: &'a [u32],
    pub(crate) max_budget: usize,
    /// Whether the service can compute a drafter's features.
    pub(crate) can_speculate: bool,
}

/// A request to decode one sequence.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GenerationRequest {
    /// Prompt, then tokens generated before a replay.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_length: usize,
    /// New tokens, those of a replay included. The context length is a limit of its own.
    pub(crate) max_tokens: usize,
    pub(crate) stop_tokens: HashSet<u32>,
    /// How tokens are chosen. Nothing is counted yet.
    pub(crate) rules: TokenRules,
    pub(crate) ranking: Ranking,
    /// What the answer must follow.
    pub(crate) constraint: Option<GrammarSource>,
    pub(crate) speculation: Speculation,
    pub(crate) output: OutputOptions,
    pub(crate) drafter: Option<String>,
}

impl GenerationRequest {
    /// Checks everything that can be wrong with a request.
    ///
    /// # Errors
    /// [`ServiceError::InvalidArgument`] naming the field, [`ServiceError::FailedPrecondition`] for speculation that
    /// this service was not started for.
    pub(crate) fn from_proto(
        message: pb::GenerateRequest,
        limits: &Limits<'_>,
    ) -> Result<Self, ServiceError> {
        let constraint = constraint_from_proto(
            message.constraint.as_ref(),
            ConstraintCompany {
                ignore_eos: message.ignore_eos(),
                min_tokens: message.min_tokens(),
                sampling: message.sampling.as_ref(),
            },
        )?;
        let tokens = message.token_ids;
        check_tokens("token_ids", &tokens, limits.vocab_size)?;
        check_tokens("stop_token_ids", &message.stop_token_ids, limits.vocab_size)?;
        let prompt_length = match message.prompt_length {
            None => tokens.len(),
            Some(length) => length as usize,
        };
        if prompt_length == 0 {
            return Err(ServiceError::invalid("token_ids", "the prompt is empty"));
        }
        if prompt_length > tokens.len() {
            return Err(ServiceError::invalid(
                "prompt_length",
                format!("{prompt_length} of {} tokens", tokens.len()),
            ));
        }
        if tokens.len() >= limits.context_length {
            return Err(ServiceError::invalid(
                "token_ids",
                format!(
                    "{} tokens leave no room for an answer in the context of {}",
                    tokens.len(),
                    limits.context_length
                ),
            ));
        }
        let room = limits.context_length - prompt_length;
        let max_tokens = message
            .max_tokens
            .map_or(room, |max| (max as usize).min(room));
        if max_tokens <= tokens.len() - prompt_length {
            return Err(ServiceError::invalid(
                "max_tokens",
                format!(
                    "{max_tokens} leaves nothing to generate after {} tokens",
                    tokens.len() - prompt_length
                ),
            ));
        }
        let mut rules = sampling_from_proto(message.sampling.as_ref(), limits.vocab_size)?;
        let speculation = Speculation::from_proto(message.speculation.as_ref())?;
        check_speculation(speculation, limits)?;
        let mut stop_tokens: HashSet<u32> = message.stop_token_ids.into_iter().collect();
        if !message.ignore_eos.unwrap_or_default() {
            stop_tokens.extend(limits.eos_token_ids);
        }
        let min_tokens = message.min_tokens.unwrap_or_default() as usize;
        rules.early = early_bans(min_tokens, max_tokens, prompt_length, &stop_tokens)?;
        check_early_choice(&rules, limits.vocab_size)?;
        Ok(Self {
            rules,
            constraint,
            ranking: ranking_from_proto(message.speculation.as_ref())?,
            tokens,
            prompt_length,
            max_tokens,
            stop_tokens,
            speculation,
            output: OutputOptions::from_proto(message.output.as_ref())?,
            drafter: message.drafter.map(|lease| lease.endpoint),
        })
    }
}

/// What cannot end an answer before it has `min_tokens`.
fn early_bans(
    min_tokens: usize,
    max_tokens: usize,
    prompt_length: usize,
    stop_tokens: &HashSet<u32>,
) -> Result<EarlyBans, ServiceError> {
    if min_tokens > max_tokens {
        return Err(ServiceError::invalid(
            "min_tokens",
            format!("{min_tokens} are more than the {max_tokens} that can be generated"),
        ));
    }
    if min_tokens == 0 {
        return Ok(EarlyBans::none());
    }
    let mut tokens: Vec<u32> = stop_tokens.iter().copied().collect();
    tokens.sort_unstable();
    Ok(EarlyBans {
        tokens,
        until: (prompt_length + min_tokens) as u32,
    })
}

/// Some token that does not end the answer is possible while none may end it.
fn check_early_choice(rules: &TokenRules, vocab_size: usize) -> Result<(), ServiceError> {
    let early = rules.early.at(0);
    if early.is_empty() {
        return Ok(());
    }
    let banned = early.iter().chain(&rules.banned).copied();
    if TokenMask::possible(vocab_size, rules.allowed.as_ref(), banned).is_empty() {
        return Err(ServiceError::invalid(
            "min_tokens",
            "cannot be reached: all allowed tokens would end the answer",
        ));
    }
    Ok(())
}

fn check_speculation(speculation: Speculation, limits: &Limits<'_>) -> Result<(), ServiceError> {
    let budget = match speculation {
        Speculation::Auto { budget } | Speculation::Tree { budget } => budget,
        Speculation::Ar | Speculation::Chain => None,
    };
    if let Some(budget) = budget.filter(|&budget| usize::from(budget) > limits.max_budget) {
        return Err(ServiceError::invalid(
            "speculation.budget",
            format!(
                "{budget} is above this service's limit of {}",
                limits.max_budget
            ),
        ));
    }
    let needs_drafter = matches!(speculation, Speculation::Chain | Speculation::Tree { .. });
    if needs_drafter && !limits.can_speculate {
        return Err(ServiceError::precondition(
            "speculation.mode",
            "this verify service was started without --drafter and decodes plainly only",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits<'static> = Limits {
        vocab_size: 100,
        context_length: 32,
        eos_token_ids: &[7],
        max_budget: 63,
        can_speculate: true,
    };

    fn request() -> pb::GenerateRequest {
        pb::GenerateRequest {
            token_ids: vec![1, 2, 3],
            ..Default::default()
        }
    }

    fn read(message: pb::GenerateRequest) -> Result<GenerationRequest, ServiceError> {
        GenerationRequest::from_proto(message, &LIMITS)
    }

    #[test]
    fn defaults() {
        let request = read(request()).unwrap();
        assert_eq!((request.prompt_length, request.max_tokens), (3, 29));
        assert!(request.stop_tokens.contains(&7));
        assert_eq!(request.speculation, Speculation::Auto { budget: None });
    }

    #[test]
    fn the_context_bounds_max_tokens_and_eos_can_be_ignored() {
        let message = pb::GenerateRequest {
            max_tokens: Some(1_000),
            ignore_eos: Some(true),
            stop_token_ids: vec![9],
            ..request()
        };
        let request = read(message).unwrap();
        assert_eq!(request.max_tokens, 29);
        assert_eq!(request.stop_tokens, HashSet::from([9]));
    }

    #[test]
    fn bad_input_names_the_field() {
        let speculation = |mode: i32, budget: Option<u32>| pb::GenerateRequest {
            speculation: Some(pb::SpeculationOptions {
                mode: Some(mode),
                budget,
                ranking: None,
            }),
            ..request()
        };
        let cases = [
            (
                pb::GenerateRequest {
                    token_ids: vec![1, 100],
                    ..request()
                },
                "token_ids[1]",
            ),
            (
                pb::GenerateRequest {
                    token_ids: vec![],
                    ..request()
                },
                "empty",
            ),
            (
                pb::GenerateRequest {
                    token_ids: vec![1; 32],
                    ..request()
                },
                "32",
            ),
            (
                pb::GenerateRequest {
                    prompt_length: Some(4),
                    ..request()
                },
                "prompt_length",
            ),
            (
                pb::GenerateRequest {
                    prompt_length: Some(0),
                    ..request()
                },
                "empty",
            ),
            (
                pb::GenerateRequest {
                    max_tokens: Some(0),
                    ..request()
                },
                "max_tokens",
            ),
            (
                pb::GenerateRequest {
                    prompt_length: Some(1),
                    max_tokens: Some(2),
                    ..request()
                },
                "max_tokens",
            ),
            (
                pb::GenerateRequest {
                    stop_token_ids: vec![100],
                    ..request()
                },
                "stop_token_ids[0]",
            ),
            (speculation(99, None), "speculation.mode"),
            (speculation(4, Some(0)), "speculation.budget"),
            (speculation(4, Some(64)), "63"),
            (speculation(3, Some(4)), "speculation.budget"),
        ];
        for (message, part) in cases {
            let error = read(message).unwrap_err();
            assert!(
                matches!(error, ServiceError::InvalidArgument { .. }),
                "{error:?}"
            );
            assert!(error.to_string().contains(part), "{error} lacks {part}");
        }
    }

    #[test]
    fn speculation_needs_a_drafter_checkpoint() {
        let limits = Limits {
            can_speculate: false,
            ..LIMITS
        };
        for (mode, refused) in [(0, false), (1, false), (2, false), (3, true), (4, true)] {
            let message = pb::GenerateRequest {
                speculation: Some(pb::SpeculationOptions {
                    mode: Some(mode),
                    ..Default::default()
                }),
                ..request()
            };
            let result = GenerationRequest::from_proto(message, &limits);
            assert_eq!(result.is_err(), refused, "mode {mode}");
        }
    }
}
