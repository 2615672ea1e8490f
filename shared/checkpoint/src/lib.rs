//! Model files: configurations, tensors, tokenizer and chat template.
//!
//! Everything here treats its input as untrusted: lengths are checked against the file before they are used, numbers are
//! range-checked when they are read, and what would need a computation that this project does not implement is refused
//! by the name of the field or tensor.
//!
//! * [`TargetCheckpoint`]: a Llama or Qwen3 target, from a Hugging Face directory or a GGUF file.
//! * [`DrafterCheckpoint`]: a DFlash v1 drafter in the z-lab layout.
//! * [`TextTokenizer`], [`IncrementalDecoder`]: text to ids and back, also piece by piece.
//! * [`ChatTemplate`]: messages to prompt text.

mod attention_shape;
mod chat_template;
mod config_file;
mod coupling_profile;
mod drafter;
mod drafter_config;
mod error;
mod float_bytes;
mod gguf;
mod hex;
mod incremental_decoder;
mod limits;
mod mapped_file;
mod rope;
mod safetensors_directory;
mod shape;
mod stored_matrix;
mod target;
mod target_config;
mod tensor_source;
mod tokenizer;

pub use chat_template::{ChatMessage, ChatTemplate};
pub use coupling_profile::{CouplingProfile, TemperatureFit, gap_index};
pub use drafter::DrafterCheckpoint;
pub use drafter_config::{DrafterAttention, DrafterConfig};
pub use error::CheckpointError;
pub use incremental_decoder::IncrementalDecoder;
pub use stored_matrix::{
    MatrixFormat, Q4_0Block, Q4_1Block, Q4KBlock, Q6KBlock, Q8_0Block, StoredMatrix,
};
pub use target::TargetCheckpoint;
pub use target_config::{Architecture, TargetConfig, TensorSpec};
pub use tensor_source::TensorSource;
pub use tokenizer::TextTokenizer;
