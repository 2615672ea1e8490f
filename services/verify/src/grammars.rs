//! What constrained requests of a model share: its vocabulary, indexed for grammars.

use std::sync::{Arc, OnceLock};

use treespec_checkpoint::TextTokenizer;
use treespec_grammar::{Grammar, GrammarCompiler, GrammarError, GrammarSource};
use treespec_rpc::ServiceError;
use treespec_rpc::convert::constraint_error;

/// Compiles the constraints of requests. The vocabulary is indexed for the first of them.
pub(crate) struct Grammars {
    tokenizer: TextTokenizer,
    vocab_size: usize,
    eos_token_ids: Vec<u32>,
    compiler: OnceLock<Result<GrammarCompiler, GrammarError>>,
}

impl Grammars {
    pub(crate) fn new(
        tokenizer: TextTokenizer,
        vocab_size: usize,
        eos_token_ids: Vec<u32>,
    ) -> Arc<Self> {
        Arc::new(Self {
            tokenizer,
            vocab_size,
            eos_token_ids,
            compiler: OnceLock::new(),
        })
    }

    /// The grammar of a request behind the tokens that it has generated before a replay.
    ///
    /// # Errors
    /// INVALID_ARGUMENT names the kind of constraint and what is wrong with it, or that the tokens do not follow it.
    pub(crate) async fn compile(
        self: Arc<Self>,
        source: GrammarSource,
        generated: Vec<u32>,
    ) -> Result<Grammar, ServiceError> {
        let compile = move || self.compile_blocking(&source, &generated);
        tokio::task::spawn_blocking(compile)
            .await
            .map_err(|error| ServiceError::internal(format!("grammar compiler: {error}")))?
    }

    fn compile_blocking(
        &self,
        source: &GrammarSource,
        generated: &[u32],
    ) -> Result<Grammar, ServiceError> {
        let compiler = self.compiler.get_or_init(|| {
            GrammarCompiler::new(&self.tokenizer, self.vocab_size, &self.eos_token_ids)
        });
        let compiled = compiler.as_ref().map_err(Clone::clone);
        let mut grammar = compiled
            .and_then(|compiler| compiler.compile(source))
            .map_err(|error| constraint_error(source.kind(), &error))?;
        for &token in generated {
            grammar
                .accept(token)
                .map_err(|error| ServiceError::invalid("token_ids", error.to_string()))?;
        }
        if grammar.is_finished() {
            return Err(ServiceError::invalid(
                "token_ids",
                "the answer has ended already: its constraint is fulfilled",
            ));
        }
        Ok(grammar)
    }
}
