//! The one error type of this crate.

use std::path::{Path, PathBuf};

/// Why a checkpoint, tokenizer or chat template cannot be used.
///
/// Every message is one line, names the file and the field, tensor or value at fault, and is meant to be shown to the
/// person who started the program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A path that has to exist does not.
    #[error("{}: {what} not found; {fix}", path.display())]
    NotFound {
        /// The missing file or directory.
        path: PathBuf,
        /// What was looked for there.
        what: &'static str,
        /// What to do about it.
        fix: String,
    },

    /// The operating system refused to open, read or map a file.
    #[error("{}: cannot be read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },

    /// A file that has to be JSON is not, or has another top-level type than an object.
    #[error("{}: not valid JSON: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        message: String,
    },

    /// A required configuration field is absent (or null).
    #[error("{}: field {field} is missing", path.display())]
    MissingField {
        /// The configuration file.
        path: PathBuf,
        /// The field, dotted when nested.
        field: String,
    },

    /// A configuration field has a value that makes no sense.
    #[error("{}: {field} is {value}, expected {expected}", path.display())]
    InvalidField {
        /// The configuration file.
        path: PathBuf,
        /// The field, dotted when nested.
        field: String,
        /// The value as written in the file.
        value: String,
        /// What would be valid.
        expected: String,
    },

    /// A configuration field asks for a computation that is not implemented.
    #[error("{}: {field} = {value} is not supported; supported: {supported}", path.display())]
    Unsupported {
        /// The configuration file.
        path: PathBuf,
        /// The field, dotted when nested.
        field: String,
        /// The value as written in the file.
        value: String,
        /// What is supported instead.
        supported: String,
    },

    /// The file does not start with the GGUF magic.
    #[error("{}: not a GGUF file: the magic is '{magic}', not 'GGUF'", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// The first four bytes, escaped where they are not printable.
        magic: String,
    },

    /// The container (GGUF or safetensors) is damaged.
    #[error("{}: {message}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },

    /// The file ends before the tensor data that its header describes.
    #[error(
        "{} is truncated: its header describes more bytes of tensor data ({described}) than the file has ({present})",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes of tensor data according to the header.
        described: u64,
        /// Bytes after the header.
        present: u64,
    },

    /// A tensor that the architecture needs is not stored.
    #[error("tensor {name} is missing from {}", path.display())]
    MissingTensor {
        /// The tensor's Hugging Face name.
        name: String,
        /// The file or directory.
        path: PathBuf,
    },

    /// A tensor is stored that the supported architecture has no use for, so that ignoring it would change the result.
    #[error("{}: tensor {name} does not belong to {model}; the checkpoint needs a computation that is not supported", path.display())]
    UnexpectedTensor {
        /// The tensor as named in the file.
        name: String,
        /// The file or directory.
        path: PathBuf,
        /// The architecture that has no such tensor.
        model: &'static str,
    },

    /// A tensor's stored shape is not the one that the configuration implies.
    #[error("tensor {name} in {} has shape {stored:?}, but {wanted:?} is needed", path.display())]
    TensorShape {
        /// The tensor.
        name: String,
        /// The file or directory.
        path: PathBuf,
        /// The shape in the file, row-major (outermost first).
        stored: Vec<usize>,
        /// The shape that was asked for.
        wanted: Vec<usize>,
    },

    /// A tensor is stored in a number format that cannot be converted to f32.
    #[error("tensor {name} in {} is stored as {dtype}, which is not supported", path.display())]
    TensorDtype {
        /// The tensor.
        name: String,
        /// The file or directory.
        path: PathBuf,
        /// The stored number format.
        dtype: String,
    },

    /// Drafter and target do not belong together.
    #[error("{0}")]
    DrafterMismatch(String),

    /// The tokenizer cannot be built, or it refused its input.
    #[error("{}: tokenizer: {message}", path.display())]
    Tokenizer {
        /// The file that the tokenizer was read from.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },

    /// A token id that neither the tokenizer nor the model knows.
    #[error("token id {id} is outside the vocabulary of {vocab_size} tokens")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Number of ids that exist (0..vocab_size).
        vocab_size: usize,
    },

    /// The chat template does not compile, or failed while rendering.
    #[error("{}: chat template: {message}", path.display())]
    ChatTemplate {
        /// The file that holds the template.
        path: PathBuf,
        /// What the template engine said.
        message: String,
    },

    /// The chat template itself refused the messages (`raise_exception`).
    #[error("the chat template refuses these messages: {message}")]
    MessagesRefused {
        /// The template's own words.
        message: String,
    },
}

impl CheckpointError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn malformed(path: &Path, message: impl Into<String>) -> Self {
        Self::Malformed {
            path: path.to_owned(),
            message: message.into(),
        }
    }

    pub(crate) fn tokenizer(path: &Path, message: impl ToString) -> Self {
        Self::Tokenizer {
            path: path.to_owned(),
            message: message.to_string(),
        }
    }
}
