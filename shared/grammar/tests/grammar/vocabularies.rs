//! Tokenizers to compile grammars for.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use treespec_checkpoint::TextTokenizer;
use treespec_grammar::{Grammar, GrammarCompiler, GrammarSource};

/// A model's vocabulary with the compiler for it.
pub(crate) struct Model {
    pub(crate) tokenizer: TextTokenizer,
    pub(crate) compiler: GrammarCompiler,
    pub(crate) vocab_size: usize,
    pub(crate) eos: Vec<u32>,
}

impl Model {
    pub(crate) fn new(tokenizer: TextTokenizer, vocab_size: usize, eos: &[&str]) -> Self {
        let id = |token: &&str| tokenizer.token_id(token).unwrap();
        let eos: Vec<u32> = eos.iter().map(id).collect();
        let compiler = GrammarCompiler::new(&tokenizer, vocab_size, &eos).unwrap();
        Self {
            tokenizer,
            compiler,
            vocab_size,
            eos,
        }
    }

    pub(crate) fn compile(&self, source: &GrammarSource) -> Grammar {
        self.compiler.compile(source).unwrap()
    }

    pub(crate) fn id(&self, token: &str) -> u32 {
        self.tokenizer.token_id(token).unwrap()
    }

    /// The ids of a text, without the tokenizer's frame.
    pub(crate) fn ids(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, false).unwrap()
    }

    /// The text of ids up to the one that ends it.
    pub(crate) fn text(&self, ids: &[u32]) -> String {
        let bytes = ids
            .iter()
            .filter(|id| !self.eos.contains(id))
            .flat_map(|&id| self.tokenizer.token_bytes(id).unwrap());
        String::from_utf8(bytes.collect()).unwrap()
    }
}

fn repository(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

/// Byte-level BPE of 800 tokens in a model of 832 ids, with two ends.
pub(crate) fn fixture() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| {
        let path = repository("tests/fixtures/cases/03_qwen3_headdim/model");
        let tokenizer = TextTokenizer::open(&path).unwrap();
        Model::new(tokenizer, 832, &["<|im_end|>", "<|endoftext|>"])
    })
}

/// The default model's vocabulary, where it has been fetched.
pub(crate) fn smollm() -> Option<&'static Model> {
    static MODEL: OnceLock<Option<Model>> = OnceLock::new();
    let model = MODEL.get_or_init(|| {
        let path = std::env::var_os("TREESPEC_TARGET").map_or_else(
            || repository("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
            PathBuf::from,
        );
        let tokenizer = path.exists().then(|| TextTokenizer::open(&path).unwrap())?;
        Some(Model::new(tokenizer, 49_152, &["<|im_end|>"]))
    });
    model.as_ref()
}

/// A SentencePiece vocabulary of these tokens: `▁` is a space, `<0x41>` a byte, `</s>` ends an answer and `<tool>` is
/// special.
pub(crate) fn pieces(tokens: &[&str]) -> Model {
    let special = ["</s>", "<tool>"];
    let vocabulary: Map<String, Value> = special
        .iter()
        .chain(tokens)
        .zip(0..)
        .map(|(&token, id)| (token.to_owned(), json!(id)))
        .collect();
    let vocab_size = vocabulary.len();
    let added = [0, 1].map(|id| {
        json!({"id": id, "content": special[id], "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false})
    });
    let tokenizer = json!({
        "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true},
    });
    let directory = tempfile::TempDir::new().unwrap();
    let file = directory.path().join("tokenizer.json");
    fs::write(file, tokenizer.to_string()).unwrap();
    let tokenizer = TextTokenizer::open(directory.path()).unwrap();
    Model::new(tokenizer, vocab_size, &["</s>"])
}
