//! Requests as tests write them.

use std::fmt;

use treespec_rpc::proto::coordinator::v1::{
    GenerateRequest, Message, Messages, TokenIds, generate_request::Prompt,
};
use treespec_rpc::proto::verify::v1::{self as verify, OutputOptions, SpeculationOptions};

/// How a request wants its drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The service chooses.
    Auto,
    /// Plain decoding.
    Ar,
    /// The drafter's argmax block.
    Chain,
    /// A tree of that many nodes below the root.
    Tree(u32),
}

impl Mode {
    /// The options of a request in this mode.
    pub fn speculation(self) -> SpeculationOptions {
        let (mode, budget) = match self {
            Self::Auto => (verify::Mode::Auto, None),
            Self::Ar => (verify::Mode::Ar, None),
            Self::Chain => (verify::Mode::Chain, None),
            Self::Tree(budget) => (verify::Mode::Tree, Some(budget)),
        };
        SpeculationOptions {
            mode: Some(mode.into()),
            budget,
            ..Default::default()
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => formatter.write_str("auto"),
            Self::Ar => formatter.write_str("ar"),
            Self::Chain => formatter.write_str("chain"),
            Self::Tree(budget) => write!(formatter, "tree {budget}"),
        }
    }
}

/// A greedy request under construction. End-of-sequence tokens count unless [`Ask::ignore_eos`] is called.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask(GenerateRequest);

impl Ask {
    /// A prompt of token ids.
    pub fn tokens(ids: &[u32]) -> Self {
        Self::prompt(Prompt::TokenIds(TokenIds { ids: ids.to_vec() }))
    }

    /// One user message through the model's chat template.
    pub fn user(content: &str) -> Self {
        let message = Message {
            role: "user".to_owned(),
            content: content.to_owned(),
        };
        Self::prompt(Prompt::Messages(Messages {
            messages: vec![message],
        }))
    }

    fn prompt(prompt: Prompt) -> Self {
        Self(GenerateRequest {
            prompt: Some(prompt),
            ..GenerateRequest::default()
        })
    }

    /// Sets how the request is drafted.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.0.speculation = Some(mode.speculation());
        self
    }

    /// Limits the answer.
    pub fn max_tokens(mut self, tokens: usize) -> Self {
        self.0.max_tokens = u32::try_from(tokens).ok();
        self
    }

    /// Goes on after end-of-sequence tokens.
    pub fn ignore_eos(mut self) -> Self {
        self.0.ignore_eos = Some(true);
        self
    }

    /// Asks for log-probabilities with this many alternatives.
    pub fn top_logprobs(mut self, count: u32) -> Self {
        self.output().top_logprobs = Some(count);
        self
    }

    /// Asks for the log-probabilities of the prompt.
    pub fn prompt_logprobs(mut self) -> Self {
        self.output().prompt_logprobs = Some(true);
        self
    }

    /// Asks for the tree of every step.
    pub fn trees(mut self) -> Self {
        self.output().include_trees = Some(true);
        self
    }

    /// Temperature and seed of the draw.
    pub fn sampled(self, temperature: f32, seed: u64) -> Self {
        self.edit(|request| {
            let sampling = request.sampling.get_or_insert_default();
            sampling.temperature = Some(temperature);
            sampling.seed = Some(seed);
        })
    }

    /// Anything else.
    pub fn edit(mut self, edit: impl FnOnce(&mut GenerateRequest)) -> Self {
        edit(&mut self.0);
        self
    }

    fn output(&mut self) -> &mut OutputOptions {
        self.0.output.get_or_insert_default()
    }
}

impl From<Ask> for GenerateRequest {
    fn from(ask: Ask) -> Self {
        ask.0
    }
}
