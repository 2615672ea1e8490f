//! Token embeddings and the output head, one copy of the weights when they are tied.

use treespec_checkpoint::{StoredMatrix, TargetCheckpoint};

use super::kernels::{PackedLinear, Packer};
use crate::EngineError;

/// Embedding and, unless it was left out, the head of a target.
pub(super) struct VocabularyWeights {
    /// `[vocab, hidden]`; absent when the rows can be read back from the tied head.
    table: Option<StoredMatrix>,
    head: Option<PackedLinear>,
    vocab_size: usize,
    hidden_size: usize,
}

impl VocabularyWeights {
    pub(super) fn load(
        target: &TargetCheckpoint,
        with_head: bool,
        packer: &mut Packer,
    ) -> Result<Self, EngineError> {
        let config = &target.config;
        let shape = [config.vocab_size, config.hidden_size];
        let embedding = "model.embed_tokens.weight";
        let mut pack = |name: &str| packer.pack(target.matrix(name, shape)?);
        let (table, head) = match (with_head, config.tie_word_embeddings) {
            (false, _) => (Some(target.matrix(embedding, shape)?), None),
            (true, true) => (None, Some(pack(embedding)?)),
            (true, false) => (
                Some(target.matrix(embedding, shape)?),
                Some(pack("lm_head.weight")?),
            ),
        };
        Ok(Self {
            table,
            head,
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
        })
    }

    /// Appends the embedding of `token`.
    pub(super) fn embed(&self, token: u32, out: &mut Vec<f32>) -> Result<(), EngineError> {
        let index = token as usize;
        if index >= self.vocab_size {
            return Err(EngineError::UnknownToken {
                token,
                vocab_size: self.vocab_size,
            });
        }
        let start = out.len();
        if let Some(table) = &self.table {
            out.extend(table.row_f32(index));
        } else if let Some(head) = &self.head {
            out.resize(start + self.hidden_size, 0.0);
            head.copy_row(index, &mut out[start..]);
        }
        Ok(())
    }

    /// The head, if it was loaded.
    pub(super) fn head(&self) -> Option<&PackedLinear> {
        self.head.as_ref()
    }
}
