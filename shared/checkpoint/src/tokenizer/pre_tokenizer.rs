//! The pre-tokenizers that a GGUF file can declare in `tokenizer.ggml.pre`.

use serde_json::{Value, json};

/// How text is cut before byte-pair merges apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PreTokenizer {
    /// GPT-2's pattern.
    Gpt2,
    /// GPT-2's pattern after splitting off every digit.
    SmolLm,
    /// Llama 3: digits in groups of three, words before merges.
    Llama3,
    /// Qwen2 and Qwen3: single digits, text normalised to NFC.
    Qwen2,
}

const LLAMA3_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"|[^\r\n\p{L}\p{N}]?\p{L}+",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
);

const QWEN2_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"|[^\r\n\p{L}\p{N}]?\p{L}+",
    r"|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
);

impl PreTokenizer {
    pub(super) const SUPPORTED: &'static str =
        "'gpt-2', 'default', 'smollm', 'llama-bpe', 'llama3', 'qwen2'";

    /// By the name in the file. `default` is what converters wrote for plain GPT-2 vocabularies.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "gpt-2" | "default" => Self::Gpt2,
            "smollm" => Self::SmolLm,
            "llama-bpe" | "llama3" => Self::Llama3,
            "qwen2" => Self::Qwen2,
            _ => return None,
        })
    }

    /// The `pre_tokenizer` entry of a tokenizer.json.
    pub(super) fn json(self) -> Value {
        let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let sequence = |first: Value, second: Value| json!({"type": "Sequence", "pretokenizers": [first, second]});
        match self {
            Self::Gpt2 => byte_level(true),
            Self::SmolLm => sequence(
                json!({"type": "Digits", "individual_digits": true}),
                byte_level(true),
            ),
            Self::Llama3 => sequence(split(LLAMA3_PATTERN), byte_level(false)),
            Self::Qwen2 => sequence(split(QWEN2_PATTERN), byte_level(false)),
        }
    }

    /// The `normalizer` entry of a tokenizer.json.
    pub(super) fn normalizer_json(self) -> Value {
        match self {
            Self::Qwen2 => json!({"type": "NFC"}),
            _ => Value::Null,
        }
    }

    /// Whether a piece that is a token as a whole is taken without applying merges.
    pub(super) fn ignores_merges(self) -> bool {
        self == Self::Llama3
    }

    /// Whether a BOS is put first when the file does not say.
    pub(super) fn adds_bos_by_default(self) -> bool {
        self == Self::Llama3
    }
}
