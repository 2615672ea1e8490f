use crate::{GrammarKind, MAX_CHOICES};

/// What can go wrong with a grammar. Messages are one line and name what is wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GrammarError {
    /// The source is longer than any that is compiled.
    #[error("the {kind} has {bytes} bytes, at most {limit} are allowed")]
    SourceTooLarge {
        /// What the source is.
        kind: GrammarKind,
        /// Its length; of choices, all together.
        bytes: usize,
        /// Most that are allowed.
        limit: usize,
    },
    /// A list without choices.
    #[error("there are no choices to choose from")]
    NoChoices,
    /// More choices than are compiled.
    #[error("there are {count} choices, at most {MAX_CHOICES} are allowed")]
    TooManyChoices {
        /// Number of choices.
        count: usize,
    },
    /// A choice without text.
    #[error("choice {index} is empty")]
    EmptyChoice {
        /// Its place in the list, counted from 0.
        index: usize,
    },
    /// A choice that is listed twice.
    #[error("choice {index} repeats choice {first}: {choice:?}")]
    RepeatedChoice {
        /// Its place in the list, counted from 0.
        index: usize,
        /// Place of the equal one before it.
        first: usize,
        /// The choice, shortened.
        choice: String,
    },
    /// A reference to another document, which is never fetched.
    #[error(
        "$ref {reference:?} leads out of the JSON schema: only references within it (#/...) are supported"
    )]
    ExternalReference {
        /// The reference, shortened.
        reference: String,
    },
    /// More `patternProperties` than can be compared with one another in reasonable time.
    #[error("the JSON schema has {count} patternProperties, at most {limit} are allowed")]
    TooManyPatterns {
        /// Patterns in all objects of the schema.
        count: usize,
        /// Most that are allowed.
        limit: usize,
    },
    /// The source is malformed, contradicts itself, or asks for what is not supported.
    #[error("the {kind} cannot be compiled: {reason}")]
    Invalid {
        /// What the source is.
        kind: GrammarKind,
        /// The reason, on one line.
        reason: String,
    },
    /// No token of the vocabulary may come next, and the answer may not end.
    #[error("no token of the vocabulary can continue the answer")]
    DeadEnd,
    /// A token that may not come next.
    #[error("token id {token} does not follow the grammar here")]
    Refused {
        /// The token.
        token: u32,
    },
    /// A token after the one that ended the answer.
    #[error("the answer has ended before token id {token}")]
    Finished {
        /// The token.
        token: u32,
    },
    /// The grammar needs more time or memory than it may have, or the engine failed.
    #[error("the grammar cannot be followed further: {reason}")]
    Failed {
        /// The reason, on one line.
        reason: String,
    },
    /// A model without a token that could end a constrained answer.
    #[error("the model names no end-of-sequence token, so no constrained answer could end")]
    NoEnd,
    /// An end-of-sequence token that the model cannot produce.
    #[error("end-of-sequence token id {token} is outside the vocabulary of {vocab_size}")]
    EndOutsideVocabulary {
        /// The token.
        token: u32,
        /// Rows of the model's head.
        vocab_size: usize,
    },
    /// A vocabulary that the engine cannot index.
    #[error("the vocabulary is too large for constrained answers: {reason}")]
    VocabularyTooLarge {
        /// What is too large.
        reason: String,
    },
    /// The operating system refuses a thread to compile on.
    #[error("cannot start a thread to compile the grammar: {reason}")]
    Thread {
        /// The system's reason.
        reason: String,
    },
}
