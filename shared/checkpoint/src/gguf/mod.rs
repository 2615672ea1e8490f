//! GGUF: header, metadata and tensors, all bounds-checked against the file.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3, little-endian.

mod cursor;
mod file;
mod header;
mod metadata;
mod target;
mod tensor_type;

pub(crate) use file::GgufFile;
pub(crate) use target::{GgufTarget, is_gguf};
