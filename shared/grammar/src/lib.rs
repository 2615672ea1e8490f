//! Structured output: which tokens may come next in an answer that must follow a JSON schema, a regular expression, a
//! list of choices or a Lark grammar, and the trees of tokens that follow it.
//!
//! * [`GrammarCompiler`]: one per model; turns a [`GrammarSource`] into a [`Grammar`].
//! * [`Grammar`]: where an answer is; its mask, the next token, and a draft made legal.
//! * [`grow`]: the tree of legal tokens for any rules, for tests and for other rules than grammars.
//!
//! Sources are untrusted: they are limited in size, and what the engine gives up on or fails at is an error of the
//! request. Nothing is fetched, and nothing is printed.

mod compiler;
mod error;
mod grammar;
mod growth;
mod library;
mod position;
mod schema;
mod schema_weight;
mod source;
mod vocabulary;
mod walk;

pub use compiler::GrammarCompiler;
pub use error::GrammarError;
pub use grammar::Grammar;
pub use growth::{ConstrainedTree, Continuation, Continuations, LIKELY_LOG_PROB, TreeLimits, grow};
pub use source::{GrammarKind, GrammarSource, MAX_CHOICES, MAX_REGEX_BYTES, MAX_SOURCE_BYTES};
