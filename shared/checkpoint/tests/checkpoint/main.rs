//! Tests of the public interface on the shared fixtures, on edited copies of them, and on damaged bytes.
#![allow(clippy::unwrap_used)]

mod chat_templates;
mod damaged_bytes;
mod drafters;
mod fixtures;
mod gguf_formats;
mod gguf_targets;
mod gguf_writer;
mod hugging_face_targets;
mod incremental_decoding;
mod malformed;
mod quantisation;
mod reference_blocks;
mod stored_matrices;
mod token_bytes;
mod tokenizers;
