use treespec_sampling::{LogitBias, SamplingError, SamplingParams, TokenMask, TokenRules};

use crate::{ServiceError, proto::verify::v1 as pb};

/// Most tokens that a request may bias.
const MAX_BIASES: usize = 1024;

/// Reads and validates sampling parameters; an absent scalar takes its default, an absent message is greedy. Counts and
/// early bans are left empty: they are the sequence's.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] naming `sampling.<field>` and the value.
pub fn sampling_from_proto(
    message: Option<&pb::SamplingParams>,
    vocab_size: usize,
) -> Result<TokenRules, ServiceError> {
    let Some(message) = message else {
        return Ok(TokenRules::default());
    };
    let params = params_from_proto(message);
    params.validate().map_err(refused)?;
    let biases = message.logit_bias.len();
    if biases > MAX_BIASES {
        return Err(ServiceError::invalid(
            "sampling.logit_bias",
            format!("{biases} tokens are more than the {MAX_BIASES} allowed"),
        ));
    }
    for &token in message.logit_bias.keys() {
        let field = || format!("sampling.logit_bias[{token}]");
        check_token(field, token, vocab_size)?;
    }
    let biases = message.logit_bias.iter();
    let bias = LogitBias::new(biases.map(|(&token, &bias)| (token, bias))).map_err(refused)?;
    let allowed = &message.allowed_token_ids;
    let banned = &message.banned_token_ids;
    check_tokens("sampling.allowed_token_ids", allowed, vocab_size)?;
    check_tokens("sampling.banned_token_ids", banned, vocab_size)?;
    let rules = TokenRules {
        params,
        bias,
        allowed: (!allowed.is_empty())
            .then(|| TokenMask::from_tokens(vocab_size, allowed.iter().copied())),
        banned: banned.clone(),
        ..TokenRules::default()
    };
    check_choice(&rules, vocab_size)?;
    Ok(rules)
}

/// Every parameter explicit, so that the receiver's defaults do not matter.
pub fn sampling_to_proto(rules: &TokenRules) -> pb::SamplingParams {
    let params = &rules.params;
    pb::SamplingParams {
        temperature: Some(params.temperature),
        top_p: Some(params.top_p),
        top_k: params.top_k,
        min_p: Some(params.min_p),
        seed: params.seed,
        repetition_penalty: Some(params.repetition_penalty),
        presence_penalty: Some(params.presence_penalty),
        frequency_penalty: Some(params.frequency_penalty),
        logit_bias: rules.bias.entries().iter().copied().collect(),
        allowed_token_ids: rules.allowed.iter().flat_map(TokenMask::tokens).collect(),
        banned_token_ids: rules.banned.clone(),
    }
}

/// Refuses the first of a request's token ids that is not below `vocab_size`.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] naming the entry of `field`.
pub fn check_tokens(field: &str, ids: &[u32], vocab_size: usize) -> Result<(), ServiceError> {
    ids.iter()
        .enumerate()
        .try_for_each(|(index, &id)| check_token(|| format!("{field}[{index}]"), id, vocab_size))
}

fn check_token(field: impl Fn() -> String, id: u32, vocab_size: usize) -> Result<(), ServiceError> {
    if (id as usize) < vocab_size {
        return Ok(());
    }
    Err(ServiceError::invalid(
        field(),
        format!("token id {id} is not in the vocabulary of {vocab_size} tokens"),
    ))
}

/// At least one token can be chosen.
fn check_choice(rules: &TokenRules, vocab_size: usize) -> Result<(), ServiceError> {
    let banned = rules.banned.iter().copied();
    if !TokenMask::possible(vocab_size, rules.allowed.as_ref(), banned).is_empty() {
        return Ok(());
    }
    let field = match rules.allowed {
        Some(_) => "sampling.allowed_token_ids",
        None => "sampling.banned_token_ids",
    };
    Err(ServiceError::invalid(
        field,
        "leaves no token: all that are allowed are banned",
    ))
}

fn params_from_proto(message: &pb::SamplingParams) -> SamplingParams {
    let defaults = SamplingParams::default();
    SamplingParams {
        temperature: message.temperature.unwrap_or(defaults.temperature),
        top_p: message.top_p.unwrap_or(defaults.top_p),
        top_k: message.top_k.or(defaults.top_k),
        min_p: message.min_p.unwrap_or(defaults.min_p),
        seed: message.seed,
        repetition_penalty: message
            .repetition_penalty
            .unwrap_or(defaults.repetition_penalty),
        presence_penalty: message
            .presence_penalty
            .unwrap_or(defaults.presence_penalty),
        frequency_penalty: message
            .frequency_penalty
            .unwrap_or(defaults.frequency_penalty),
    }
}

fn refused(error: SamplingError) -> ServiceError {
    let SamplingError::OutOfRange {
        field,
        value,
        allowed,
    } = error;
    ServiceError::invalid(
        format!("sampling.{field}"),
        format!("{value:?} is not allowed, only {allowed}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCABULARY: usize = 100;

    fn read(message: &pb::SamplingParams) -> Result<TokenRules, ServiceError> {
        sampling_from_proto(Some(message), VOCABULARY)
    }

    #[test]
    fn absent_means_default_and_values_survive_the_wire() {
        let nothing = sampling_from_proto(None, VOCABULARY);
        assert_eq!(nothing, Ok(TokenRules::default()));
        assert_eq!(read(&pb::SamplingParams::default()), nothing);
        let rules = TokenRules {
            params: SamplingParams {
                temperature: 0.7,
                top_p: 0.5,
                top_k: Some(3),
                seed: Some(u64::MAX),
                ..SamplingParams::default()
            },
            bias: LogitBias::new([(3, -1.5), (99, 2.0)]).unwrap(),
            allowed: Some(TokenMask::from_tokens(VOCABULARY, [1, 2, 99])),
            banned: vec![2],
            ..TokenRules::default()
        };
        assert_eq!(read(&sampling_to_proto(&rules)), Ok(rules));
    }

    #[test]
    fn refused_values_name_the_field_of_the_request() {
        type Edit = fn(&mut pb::SamplingParams);
        let cases: [(&str, Edit); 9] = [
            ("sampling.top_p", |m| m.top_p = Some(f32::NAN)),
            ("sampling.logit_bias", |m| {
                m.logit_bias.insert(1, f32::NAN);
            }),
            ("sampling.logit_bias", |m| {
                m.logit_bias.insert(1, f32::INFINITY);
            }),
            ("sampling.logit_bias[100]", |m| {
                m.logit_bias.insert(100, 1.0);
            }),
            ("sampling.logit_bias", |m| {
                m.logit_bias = (0..1025).map(|token| (token, 0.0)).collect();
            }),
            ("sampling.allowed_token_ids[1]", |m| {
                m.allowed_token_ids = vec![0, 100];
            }),
            ("sampling.banned_token_ids[0]", |m| {
                m.banned_token_ids = vec![u32::MAX];
            }),
            ("sampling.allowed_token_ids", |m| {
                m.allowed_token_ids = vec![4];
                m.banned_token_ids = vec![4];
            }),
            ("sampling.banned_token_ids", |m| {
                m.banned_token_ids = (0..100).collect();
            }),
        ];
        for (expected, edit) in cases {
            let mut message = pb::SamplingParams::default();
            edit(&mut message);
            let error = read(&message).unwrap_err();
            assert!(
                matches!(&error, ServiceError::InvalidArgument { field, .. } if field == expected),
                "{expected}: {error:?}"
            );
        }
    }
}
