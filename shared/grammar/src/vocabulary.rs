//! The model's tokens as the grammar library sees them.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use treespec_checkpoint::TextTokenizer;
use treespec_sampling::TokenMask;

use crate::{GrammarError, library};

/// What the library's index can hold: a token's bytes, ids, and bytes of all tokens together.
const MAX_TOKEN_BYTES: usize = 1000;
const MAX_IDS: usize = (1 << 24) - 1;
const MAX_BYTES: usize = 1 << 22;

/// Most legal tokens among which a likely one is looked for.
const LIKELY_AMONG: u32 = 64;

/// The tokens of a model, indexed by their bytes.
pub(crate) struct Vocabulary {
    env: TokEnv,
    /// The tokens that have a text.
    texts: TokenMask,
    /// The tokens that end an answer.
    ends: TokenMask,
    end_tokens: Vec<u32>,
}

impl Vocabulary {
    pub(crate) fn new(
        tokenizer: &TextTokenizer,
        vocab_size: usize,
        ends: &[u32],
    ) -> Result<Self, GrammarError> {
        let &first_end = ends.first().ok_or(GrammarError::NoEnd)?;
        if let Some(&token) = ends.iter().find(|&&end| end as usize >= vocab_size) {
            return Err(GrammarError::EndOutsideVocabulary { token, vocab_size });
        }
        if vocab_size > MAX_IDS {
            let reason = format!("{vocab_size} ids, at most {MAX_IDS} are allowed");
            return Err(GrammarError::VocabularyTooLarge { reason });
        }
        let words: Vec<Vec<u8>> = (0..vocab_size as u32)
            .map(|id| word(tokenizer, id, ends.contains(&id)))
            .collect();
        let bytes: usize = words.iter().map(Vec::len).sum();
        if bytes > MAX_BYTES {
            let reason = format!("{bytes} bytes of text, at most {MAX_BYTES} are allowed");
            return Err(GrammarError::VocabularyTooLarge { reason });
        }
        let with_text = words
            .iter()
            .zip(0..)
            .filter_map(|(word, id)| (!word.is_empty()).then_some(id));
        let info = TokRxInfo::new(vocab_size as u32, first_end);
        let trie = library::guarded(|| TokTrie::from(&info, &words).with_eos_tokens(ends))?;
        Ok(Self {
            // Not canonical: the library then leaves every tokenisation of a forced text legal.
            env: Arc::new(ApproximateTokEnv::new(trie)),
            texts: TokenMask::from_tokens(vocab_size, with_text),
            ends: TokenMask::from_tokens(vocab_size, ends.iter().copied()),
            end_tokens: ends.to_vec(),
        })
    }

    pub(crate) fn env(&self) -> &TokEnv {
        &self.env
    }

    pub(crate) fn has_text(&self, token: u32) -> bool {
        self.texts.contains(token)
    }

    /// The bytes of a token that has a text.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        self.env.tok_trie().token(token)
    }

    /// The set of one token.
    pub(crate) fn only(&self, token: u32) -> TokenMask {
        TokenMask::from_tokens(self.texts.words().len() * 32, [token])
    }

    /// The tokens that end an answer.
    pub(crate) fn ends(&self) -> &TokenMask {
        &self.ends
    }

    /// One of them.
    pub(crate) fn end_token(&self) -> u32 {
        self.end_tokens[0]
    }

    /// Whether the library lets the answer end.
    pub(crate) fn allows_end(&self, set: &SimpleVob) -> bool {
        self.end_tokens.iter().any(|&end| set.is_allowed(end))
    }

    /// The library's set without the ids that have no text, and with all tokens that end the answer or none.
    pub(crate) fn mask(&self, set: &SimpleVob, may_end: bool) -> TokenMask {
        let words = self.texts.words().iter().zip(self.ends.words());
        let words = words.zip(set.as_slice());
        let words = words.map(|((texts, ends), set)| {
            let open = set & texts & !ends;
            if may_end { open | ends } else { open }
        });
        TokenMask::from_words(words.collect())
    }

    /// The longest legal token when every other one is a part of its beginning: then the text goes on like that, and
    /// the others only cut it differently. Of equal ones the higher id, because SentencePiece vocabularies list their
    /// byte tokens first. `None` where there is a real choice.
    pub(crate) fn likely(&self, mask: &TokenMask) -> Option<u32> {
        let words = mask.words();
        let count: u32 = words.iter().map(|word| word.count_ones()).sum();
        if count > LIKELY_AMONG {
            return None;
        }
        let legal: Vec<u32> = (0..)
            .zip(words)
            .flat_map(|(index, &word)| bits(word).map(move |bit| index * 32 + bit))
            .collect();
        let trie = self.env.tok_trie();
        let longest = *legal.iter().max_by_key(|&&token| trie.token(token).len())?;
        let text = trie.token(longest);
        let agrees = |&token: &u32| {
            !self.ends.contains(token)
                && !trie.is_special_token(token)
                && text.starts_with(trie.token(token))
        };
        legal.iter().all(agrees).then_some(longest)
    }
}

fn bits(word: u32) -> impl Iterator<Item = u32> {
    (0..32).filter(move |bit| word >> bit & 1 != 0)
}

/// A token's entry in the index; empty for what is never text. Special tokens are marked by a byte that no text holds,
/// so that only a grammar that names them can mean them.
fn word(tokenizer: &TextTokenizer, id: u32, is_end: bool) -> Vec<u8> {
    let Some(bytes) = tokenizer.token_bytes(id) else {
        return Vec::new();
    };
    let is_text = !bytes.is_empty()
        && bytes.len() <= MAX_TOKEN_BYTES
        && !bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER);
    match is_text {
        false => Vec::new(),
        true if is_end || tokenizer.is_special(id) => {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat()
        }
        true => bytes,
    }
}
