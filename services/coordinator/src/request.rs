//! Checks a public request against the served model and turns it into one for verify.

use treespec_rpc::{
    ServiceError,
    convert::{OutputOptions, Speculation, sampling_from_proto, sampling_to_proto},
    proto::{
        coordinator::v1::{self as public, generate_request::Prompt},
        verify::v1 as verify,
    },
};
use treespec_sampling::SamplingParams;

use crate::text::{TextCodec, check_vocabulary};

const MAX_REQUEST_ID_BYTES: usize = 128;

/// What a request is checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits<'a> {
    /// The served model.
    pub(crate) model: &'a verify::GetModelInfoResponse,
    /// A draft service is configured. A model that hosts its drafter needs none.
    pub(crate) has_drafter: bool,
}

/// Everything of a request but its prompt, checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Options {
    max_tokens: Option<u32>,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
    sampling: SamplingParams,
    seed: u64,
    speculation: Speculation,
    output: OutputOptions,
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
        check_vocabulary(
            "stop_token_ids",
            &request.stop_token_ids,
            limits.model.vocab_size as usize,
        )?;
        let sampling = sampling_from_proto(request.sampling.as_ref())?;
        let seed = sampling.seed.unwrap_or_else(rand::random);
        Ok(Self {
            max_tokens: request.max_tokens,
            stop_token_ids: request.stop_token_ids.clone(),
            ignore_eos: request.ignore_eos.unwrap_or(false),
            sampling: SamplingParams {
                seed: Some(seed),
                ..sampling
            },
            seed,
            speculation: check_speculation(request.speculation.as_ref(), limits)?,
            output: OutputOptions::from_proto(request.output.as_ref())?,
        })
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// The request for verify, without a drafter. `prompt` is checked.
    pub(crate) fn verify_request(
        self,
        request_id: &str,
        prompt: Vec<u32>,
    ) -> verify::GenerateRequest {
        verify::GenerateRequest {
            request_id: request_id.to_owned(),
            token_ids: prompt,
            prompt_length: None,
            max_tokens: self.max_tokens,
            stop_token_ids: self.stop_token_ids,
            ignore_eos: Some(self.ignore_eos),
            sampling: Some(sampling_to_proto(&self.sampling)),
            speculation: Some(self.speculation.into()),
            output: Some(self.output.into()),
            drafter: None,
        }
    }

    /// False when verify is asked for plain decoding.
    pub(crate) fn wants_drafts(&self) -> bool {
        self.speculation != Speculation::Ar
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
    check_vocabulary(field, &ids, model.vocab_size as usize)?;
    Ok(ids)
}
