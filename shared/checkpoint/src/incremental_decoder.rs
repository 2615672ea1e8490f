//! Decoding of a token stream, piece by piece.

use std::sync::Arc;

use crate::{CheckpointError, TextTokenizer};

/// Turns ids that arrive in pieces into text that can be shown as it comes: every delta consists of whole characters,
/// and all deltas together, with [`IncrementalDecoder::finish`], are exactly the text of all ids decoded at once.
///
/// What is not yet certain is held back: an incomplete UTF-8 sequence at the end, or a run of byte-fallback tokens.
#[derive(Debug)]
pub struct IncrementalDecoder {
    tokenizer: Arc<TextTokenizer>,
    skip_special: bool,
    /// Ids since a point at which the text was complete, preceded by some whose text has been given out: a decoder may
    /// treat the first word of a text differently, so a window never starts with new text.
    window: Vec<u32>,
    /// How many ids of the window were there at its last complete point.
    settled_ids: usize,
    /// Bytes of the window's text that have been given out.
    emitted: usize,
}

impl IncrementalDecoder {
    /// A decoder at the start of a text.
    pub fn new(tokenizer: Arc<TextTokenizer>, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            window: Vec::new(),
            settled_ids: 0,
            emitted: 0,
        }
    }

    /// Appends `ids` and gives the text that is certain now; possibly empty.
    ///
    /// # Errors
    /// [`CheckpointError::UnknownToken`] for an id outside the vocabulary; then nothing of `ids` has been taken.
    pub fn push(&mut self, ids: &[u32]) -> Result<String, CheckpointError> {
        let before = self.window.len();
        self.window.extend_from_slice(ids);
        let text = match self.tokenizer.decode(&self.window, self.skip_special) {
            Ok(text) => text,
            Err(error) => {
                self.window.truncate(before);
                return Err(error);
            }
        };
        let certain = self.certain_len(&text);
        let delta = text
            .get(self.emitted..certain)
            .unwrap_or_default()
            .to_owned();
        self.emitted = self.emitted.max(certain);
        if certain == text.len() {
            self.settle()?;
        }
        Ok(delta)
    }

    /// The text held back, with U+FFFD for what never became a character. The decoder is at the start again.
    ///
    /// # Errors
    /// Only if decoding fails as such.
    pub fn finish(&mut self) -> Result<String, CheckpointError> {
        let text = self.tokenizer.decode(&self.window, self.skip_special)?;
        let rest = text.get(self.emitted..).unwrap_or_default().to_owned();
        self.window.clear();
        self.settled_ids = 0;
        self.emitted = 0;
        Ok(rest)
    }

    /// How much of the window's text no later id can change.
    fn certain_len(&self, text: &str) -> usize {
        // Tokens that are left out of the text do not end a run of bytes either.
        let ends_in_byte = self
            .window
            .iter()
            .rev()
            .find(|&&id| !self.tokenizer.is_omitted(id, self.skip_special))
            .is_some_and(|&id| self.tokenizer.is_byte_fallback(id));
        if ends_in_byte {
            return self.emitted;
        }
        // An incomplete sequence at the end shows as exactly one replacement character.
        text.strip_suffix(char::REPLACEMENT_CHARACTER)
            .unwrap_or(text)
            .len()
    }

    /// All text is out: keep only the newest ids as context, provided that they have a text of their own.
    fn settle(&mut self) -> Result<(), CheckpointError> {
        let context = &self.window[self.settled_ids..];
        let context_len = self.tokenizer.decode(context, self.skip_special)?.len();
        if context_len > 0 {
            self.window.drain(..self.settled_ids);
            self.emitted = context_len;
        }
        self.settled_ids = self.window.len();
        Ok(())
    }
}
