//! Grammars over real and tiny vocabularies: what they accept, what they refuse, and the trees that follow them.
#![allow(clippy::unwrap_used)]

mod brute_force;
mod constraining;
mod ends;
mod hostile;
mod refusals;
mod vocabularies;
mod walks;
