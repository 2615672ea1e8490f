//! What a single token contributes to a text, in bytes.

use serde_json::Value;

/// How a vocabulary spells bytes, told from the decoder of its tokenizer.json.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenSpelling {
    /// Every character stands for one byte (GPT-2's alphabet).
    ByteLevel,
    /// `▁` is a space, and `<0xE2>` is one byte where the decoder knows byte tokens (SentencePiece).
    Pieces {
        /// Whether `<0xE2>` is a byte and not six characters.
        byte_tokens: bool,
    },
    /// As it is written.
    Plain,
}

impl TokenSpelling {
    /// The spelling that `json`, a whole tokenizer.json, declares.
    pub(super) fn of(json: &Value) -> Self {
        let decoders = Steps::of(&json["decoder"]);
        let byte_tokens = decoders.has("ByteFallback");
        if decoders.has("ByteLevel") {
            Self::ByteLevel
        } else if byte_tokens || decoders.has("Metaspace") || decoders.replaces_space() {
            Self::Pieces { byte_tokens }
        } else {
            Self::Plain
        }
    }

    /// The bytes of a token that is written `token` in the vocabulary.
    pub(super) fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            // The library's decoder takes a token literally when a character of it is not of the alphabet, which
            // happens in added tokens only; what is decoded and what is counted here must be the same.
            Self::ByteLevel => token
                .chars()
                .map(byte_of)
                .collect::<Option<_>>()
                .unwrap_or_else(|| token.into()),
            Self::Pieces { byte_tokens } => match byte_token(token) {
                Some(byte) if byte_tokens => vec![byte],
                _ => token.replace('\u{2581}', " ").into_bytes(),
            },
            Self::Plain => token.into(),
        }
    }
}

/// The decoder's steps: itself, or those of a sequence.
struct Steps<'a>(Vec<&'a Value>);

impl<'a> Steps<'a> {
    fn of(decoder: &'a Value) -> Self {
        match decoder["decoders"].as_array() {
            Some(steps) => Self(steps.iter().collect()),
            None => Self(vec![decoder]),
        }
    }

    fn has(&self, kind: &str) -> bool {
        self.0.iter().any(|step| step["type"] == kind)
    }

    fn replaces_space(&self) -> bool {
        self.0
            .iter()
            .any(|step| step["type"] == "Replace" && step["pattern"]["String"] == "\u{2581}")
    }
}

/// The byte that a SentencePiece byte token names.
fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let two_digits = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    two_digits
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

/// The byte that a character of GPT-2's alphabet stands for. Bytes that print are themselves in Latin-1; the 68 others
/// follow from U+0100 on in ascending order.
fn byte_of(character: char) -> Option<u8> {
    const SHIFTED: u32 = 0x100;
    match u32::from(character) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ SHIFTED..=0x120 => u8::try_from(code - SHIFTED).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::*;

    #[test]
    fn the_alphabet_is_the_librarys_and_covers_every_byte_once() {
        let alphabet = ByteLevel::alphabet();
        let bytes: BTreeSet<u8> = alphabet.iter().filter_map(|&char| byte_of(char)).collect();
        assert_eq!(alphabet.len(), 256);
        assert_eq!(bytes.len(), 256);
        let known = (0..=0x2FFF)
            .filter_map(char::from_u32)
            .filter(|&character| byte_of(character).is_some());
        assert_eq!(known.count(), 256);
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
    }

    #[test]
    fn byte_level_tokens_outside_the_alphabet_are_literal() {
        let spelling = TokenSpelling::of(&json!({"decoder": {"type": "ByteLevel"}}));
        assert_eq!(spelling.bytes("Ġæ¼¢"), " 漢".as_bytes());
        assert_eq!(spelling.bytes("<a b>"), b"<a b>");
    }

    #[test]
    fn pieces_hold_spaces_and_bytes() {
        let llama = json!({"decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]}});
        let spelling = TokenSpelling::of(&llama);
        assert_eq!(spelling.bytes("▁the▁"), b" the ");
        assert_eq!(spelling.bytes("<0xE2>"), [0xE2]);
        for literal in ["<0x+1>", "<0xE>", "<0xGG>", "<0x>", "<0xE2"] {
            assert_eq!(spelling.bytes(literal), literal.as_bytes());
        }
        let metaspace = TokenSpelling::of(&json!({"decoder": {"type": "Metaspace"}}));
        assert_eq!(metaspace.bytes("▁<0xE2>"), b" <0xE2>");
        let without_byte_tokens = metaspace.bytes("<0xE2>");
        assert_eq!(without_byte_tokens, b"<0xE2>");
    }

    #[test]
    fn without_a_decoder_tokens_are_plain() {
        let spelling = TokenSpelling::of(&json!({"decoder": null}));
        assert_eq!(spelling, TokenSpelling::Plain);
        assert_eq!(spelling.bytes("▁Ġ"), "▁Ġ".as_bytes());
    }
}
