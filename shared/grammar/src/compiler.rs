use std::fmt;
use std::sync::Arc;
use std::thread;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Logger, Matcher, ParserFactory};
use treespec_checkpoint::TextTokenizer;

use crate::position::Position;
use crate::vocabulary::Vocabulary;
use crate::{Grammar, GrammarError, GrammarSource, library};

/// Stack of the thread that compiles. The library follows rules that refer to one another by recursion, thousands deep
/// in a hostile source, and an overflow would end the process. Only what is used is ever backed by memory.
const COMPILER_STACK: usize = 256 << 20;

/// Compiles what answers of one model must follow. Shared by all requests.
pub struct GrammarCompiler {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
}

impl GrammarCompiler {
    /// `vocab_size` is the number of the model's ids (rows of its head), which may exceed the tokenizer's; ids without a
    /// text are never allowed. `eos` are all ids at which the model's answers end.
    ///
    /// Takes a fraction of a second: the vocabulary is indexed.
    ///
    /// # Errors
    /// [`GrammarError::NoEnd`] and [`GrammarError::EndOutsideVocabulary`] for `eos`,
    /// [`GrammarError::VocabularyTooLarge`] for more than the library can index.
    pub fn new(
        tokenizer: &TextTokenizer,
        vocab_size: usize,
        eos: &[u32],
    ) -> Result<Self, GrammarError> {
        let vocabulary = Arc::new(Vocabulary::new(tokenizer, vocab_size, eos)?);
        let mut factory = library::guarded(|| {
            ParserFactory::new(
                vocabulary.env(),
                InferenceCapabilities::default(),
                &SlicedBiasComputer::general_slices(),
            )
        })?
        .map_err(|error| library::failed(&error))?;
        *factory.limits_mut() = limits();
        Ok(Self {
            vocabulary,
            factory,
        })
    }

    /// The grammar at the start of an answer.
    ///
    /// May take a second for a hostile source, and milliseconds for an ordinary one: not a call for an async task.
    ///
    /// # Errors
    /// Names what is wrong with the source, or the limit that it exceeds. [`GrammarError::DeadEnd`] when no answer can
    /// begin.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
        thread::scope(|scope| {
            let compile = || self.compile_here(source.to_grammar()?, source);
            let thread = thread::Builder::new()
                .name("grammar".to_owned())
                .stack_size(COMPILER_STACK)
                .spawn_scoped(scope, compile)
                .map_err(|error| GrammarError::Thread {
                    reason: error.to_string(),
                })?;
            thread
                .join()
                .unwrap_or_else(|_| Err(source.invalid(&"the compiler failed")))
        })
    }

    fn compile_here(
        &self,
        grammar: TopLevelGrammar,
        source: &GrammarSource,
    ) -> Result<Grammar, GrammarError> {
        let limits = ParserLimits {
            initial_lexer_fuel: source.lexer_fuel(),
            ..self.factory.limits().clone()
        };
        let parser = self
            .factory
            .create_parser_from_init_ext(
                GrammarInit::Serialized(grammar),
                Logger::new(0, 0),
                InferenceCapabilities::default(),
                limits,
            )
            .map_err(|error| source.invalid(&format_args!("{error:#}")))?;
        let rolls_back = parser.parser.grammar().lexer_spec().can_rollback();
        let matcher = library::guarded(|| Matcher::new(Ok(parser)))?;
        let origin = Position::new(self.vocabulary.clone(), matcher, rolls_back);
        let mut grammar = Grammar::new(origin);
        grammar.mask()?;
        Ok(grammar)
    }
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("GrammarCompiler")
            .finish_non_exhaustive()
    }
}

/// The library's limits, lower than its own where those would let one request take hundreds of megabytes.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 50_000,
        max_grammar_size: 100_000,
        // Walks the whole vocabulary while compiling, for expressions that only hostile sources have.
        precompute_large_lexemes: false,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilers_are_shared_and_grammars_moved_between_threads() {
        fn shared<T: Send + Sync>() {}
        fn moved<T: Send + Clone>() {}
        shared::<GrammarCompiler>();
        moved::<Grammar>();
    }
}
