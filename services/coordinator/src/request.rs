//! Checks a public request against the served model and turns it into one for verify.

use treespec_rpc::{
    ServiceError,
    convert::{
        ConstraintCompany, OutputOptions, Speculation, check_tokens, constraint_from_proto,
        ranking_from_proto, ranking_to_proto, sampling_from_proto, sampling_to_proto,
    },
    proto::{
        coordinator::v1::{self as public, generate_request::Prompt},
        verify::v1 as verify,
    },
};
use treespec_sampling::{Ranking, TokenRules, answer_seed};

use crate::{stop_strings::StopStrings, text::TextCodec, transcript::Ending};

const MAX_REQUEST_ID_BYTES: usize = 128;
const MAX_STOP_STRINGS: usize = 64;
const MAX_STOP_STRING_BYTES: usize = 1024;
/// Most answers to one request.
const MAX_CHOICES: u32 = 16;

/// What a request is checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits<'a> {
    /// The served model.
    pub(crate) model: &'a verify::GetModelInfoResponse,
    /// A draft service is configured. A model that hosts its drafter needs none.
    pub(crate) has_drafter: bool,
}

/// Everything of a request but its prompt, checked.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    max_tokens: Option<u32>,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
    min_tokens: Option<u32>,
    ending: Ending,
    choices: u32,
    rules: TokenRules,
    seed: u64,
    speculation: Speculation,
    ranking: Ranking,
    output: OutputOptions,
    constraint: Option<verify::Constraint>,
}

impl Limits<'_> {
    /// Trees and chains can be drafted: verify knows the drafter's shape, and there is a drafter.
    pub(crate) fn can_draft(self) -> bool {
        (self.has_drafter || self.model.hosts_drafter) && self.model.block_size > 0
    }

    /// Modes that make a difference now. Auto is accepted even where it can only mean plain decoding.
    pub(crate) fn modes(self) -> Vec<verify::Mode> {
        use verify::Mode::{Ar, Auto, Chain, Tree};
        if self.can_draft() {
            vec![Auto, Ar, Chain, Tree]
        } else {
            vec![Ar]
        }
    }
}

impl Options {
    /// Checks everything that does not need the tokenizer, and draws the seed if the client gave none.
    ///
    /// # Errors
    /// INVALID_ARGUMENT names the field; FAILED_PRECONDITION when a mode needs a drafter and there is none.
    pub(crate) fn from_proto(
        request: &public::GenerateRequest,
        limits: Limits<'_>,
    ) -> Result<Self, ServiceError> {
        if request.request_id.len() > MAX_REQUEST_ID_BYTES {
            return Err(ServiceError::invalid(
                "request_id",
                format!(
                    "{} bytes are more than the {MAX_REQUEST_ID_BYTES} allowed",
                    request.request_id.len()
                ),
            ));
        }
        if request.max_tokens == Some(0) {
            return Err(ServiceError::invalid(
                "max_tokens",
                "is 0: ask for at least 1, or leave it out for the rest of the context",
            ));
        }
        let vocab_size = limits.model.vocab_size as usize;
        check_tokens("stop_token_ids", &request.stop_token_ids, vocab_size)?;
        let mut rules = sampling_from_proto(request.sampling.as_ref(), vocab_size)?;
        // Verify compiles it; what is wrong at first sight need not get there.
        constraint_from_proto(
            request.constraint.as_ref(),
            ConstraintCompany {
                ignore_eos: request.ignore_eos(),
                min_tokens: request.min_tokens(),
                sampling: request.sampling.as_ref(),
            },
        )?;
        let seed = rules.params.seed.unwrap_or_else(rand::random);
        rules.params.seed = Some(seed);
        Ok(Self {
            max_tokens: request.max_tokens,
            stop_token_ids: request.stop_token_ids.clone(),
            ignore_eos: request.ignore_eos.unwrap_or(false),
            min_tokens: check_min_tokens(request)?,
            ending: Ending {
                stops: check_stop_strings(request)?,
                min_tokens: request.min_tokens.unwrap_or_default() as usize,
            },
            choices: check_choices(request.choices)?,
            rules,
            seed,
            speculation: check_speculation(request.speculation.as_ref(), limits)?,
            ranking: ranking_from_proto(request.speculation.as_ref())?,
            output: OutputOptions::from_proto(request.output.as_ref())?,
            constraint: request.constraint.clone(),
        })
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// How many answers are wanted.
    pub(crate) fn choices(&self) -> u32 {
        self.choices
    }

    /// What ends an answer besides its tokens.
    pub(crate) fn ending(&self) -> Ending {
        self.ending.clone()
    }

    /// The request to verify for one of the answers, without a drafter. `prompt` is checked.
    pub(crate) fn verify_request(
        &self,
        request_id: &str,
        prompt: Vec<u32>,
        choice: u32,
    ) -> verify::GenerateRequest {
        let mut sampling = sampling_to_proto(&self.rules);
        sampling.seed = Some(answer_seed(self.seed, choice));
        let mut speculation = verify::SpeculationOptions::from(self.speculation);
        speculation.ranking = Some(ranking_to_proto(self.ranking).into());
        let output = OutputOptions {
            // The answers share their prompt.
            prompt_logprobs: self.output.prompt_logprobs && choice == 0,
            ..self.output
        };
        verify::GenerateRequest {
            request_id: match choice {
                0 => request_id.to_owned(),
                choice => format!("{request_id}#{choice}"),
            },
            token_ids: prompt,
            prompt_length: None,
            max_tokens: self.max_tokens,
            stop_token_ids: self.stop_token_ids.clone(),
            ignore_eos: Some(self.ignore_eos),
            sampling: Some(sampling),
            speculation: Some(speculation),
            output: Some(output.into()),
            drafter: None,
            min_tokens: self.min_tokens,
            constraint: self.constraint.clone(),
        }
    }

    /// False when verify is asked for plain decoding.
    pub(crate) fn wants_drafts(&self) -> bool {
        self.speculation != Speculation::Ar
    }
}

fn check_min_tokens(request: &public::GenerateRequest) -> Result<Option<u32>, ServiceError> {
    match (request.min_tokens, request.max_tokens) {
        (Some(least), Some(most)) if least > most => Err(ServiceError::invalid(
            "min_tokens",
            format!("{least} are more than max_tokens, {most}"),
        )),
        (least, _) => Ok(least),
    }
}

fn check_stop_strings(request: &public::GenerateRequest) -> Result<StopStrings, ServiceError> {
    let strings = &request.stop_strings;
    if strings.len() > MAX_STOP_STRINGS {
        return Err(ServiceError::invalid(
            "stop_strings",
            format!(
                "{} are more than the {MAX_STOP_STRINGS} allowed",
                strings.len()
            ),
        ));
    }
    for (index, string) in strings.iter().enumerate() {
        let problem = match string.len() {
            0 => "is empty".to_owned(),
            1..=MAX_STOP_STRING_BYTES => continue,
            bytes => format!("{bytes} bytes are more than the {MAX_STOP_STRING_BYTES} allowed"),
        };
        return Err(ServiceError::invalid(
            format!("stop_strings[{index}]"),
            problem,
        ));
    }
    let include = request.include_stop.unwrap_or_default();
    Ok(StopStrings::new(strings.clone(), include))
}

fn check_choices(choices: Option<u32>) -> Result<u32, ServiceError> {
    match choices.unwrap_or(1) {
        choices @ 1..=MAX_CHOICES => Ok(choices),
        choices => Err(ServiceError::invalid(
            "choices",
            format!("{choices} is outside 1..={MAX_CHOICES}"),
        )),
    }
}

fn check_speculation(
    message: Option<&verify::SpeculationOptions>,
    limits: Limits<'_>,
) -> Result<Speculation, ServiceError> {
    let speculation = Speculation::from_proto(message)?;
    if let Speculation::Auto {
        budget: Some(budget),
    }
    | Speculation::Tree {
        budget: Some(budget),
    } = speculation
        && limits.can_draft()
        && u32::from(budget) > limits.model.max_budget
    {
        return Err(ServiceError::invalid(
            "speculation.budget",
            format!(
                "{budget} is more than the {} that the verify service allows",
                limits.model.max_budget
            ),
        ));
    }
    match speculation {
        Speculation::Chain | Speculation::Tree { .. } if !limits.can_draft() => {
            Err(ServiceError::precondition(
                "speculation.mode",
                "chain and tree need a drafter: start the coordinator with --draft and verify with --drafter, or verify \
                 with --draft-placement local, or use mode auto or ar",
            ))
        }
        // Whatever a client that knows no drafter asks of auto, it is plain decoding.
        Speculation::Auto { .. } if !limits.can_draft() => Ok(Speculation::Ar),
        other => Ok(other),
    }
}

/// Token ids of the prompt. Tokenising long text takes a while: call it where blocking is allowed.
///
/// # Errors
/// INVALID_ARGUMENT names the field.
pub(crate) fn encode_prompt(
    prompt: Option<Prompt>,
    text: &TextCodec,
    model: &verify::GetModelInfoResponse,
) -> Result<Vec<u32>, ServiceError> {
    let (field, ids) = match prompt {
        None => {
            return Err(ServiceError::invalid(
                "prompt",
                "is missing: set text, messages or token_ids",
            ));
        }
        Some(Prompt::Text(raw)) if raw.is_empty() => ("text", Vec::new()),
        Some(Prompt::Text(raw)) => ("text", text.encode_text(&raw, true)?),
        Some(Prompt::Messages(messages)) => ("messages", text.encode_messages(messages)?),
        Some(Prompt::TokenIds(list)) => ("token_ids.ids", list.ids),
    };
    if ids.is_empty() {
        return Err(ServiceError::invalid(
            field,
            "is empty: a prompt has at least one token",
        ));
    }
    let context = model.context_length as usize;
    if ids.len() >= context {
        return Err(ServiceError::invalid(
            field,
            format!(
                "the prompt has {} tokens, the context holds {context}: leave room for at least one",
                ids.len()
            ),
        ));
    }
    check_tokens(field, &ids, model.vocab_size as usize)?;
    Ok(ids)
}
