//! The public service of treespec: text in, text out.
//!
//! A coordinator turns text or messages into token ids, admits the request, picks a verify replica and a drafter for
//! it, and streams the committed tokens back as text. It keeps no state beyond the requests in flight: a lost verify
//! replica is replaced by replaying the tokens so far on another one, and the client sees one unbroken stream.

mod admission;
mod config;
mod deadline;
mod drafters;
mod error;
mod generation;
mod in_flight;
mod replicas;
mod request;
mod server;
mod service;
mod step_log;
mod stop_strings;
mod text;
mod transcript;

pub use config::Config;
pub use error::Error;
pub use server::{Server, run};
