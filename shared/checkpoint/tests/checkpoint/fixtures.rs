//! The shared fixtures, and edited copies of them.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

pub(crate) const CASES: [&str; 3] = ["01_llama_gqa_tied", "03_qwen3_headdim", "05_qwen35_hybrid"];

pub(crate) fn path(relative: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(relative)
}

pub(crate) fn model(case: &str) -> PathBuf {
    path(&format!("cases/{case}/model"))
}

pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// `tokenizer_cases` of a case's expected.json.
pub(crate) fn tokenizer_cases(case: &str) -> Value {
    json(&path(&format!("cases/{case}/expected.json")))["tokenizer_cases"].clone()
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

/// A copy of the directory `source` in which `edit` has changed the JSON file `name`.
pub(crate) fn edited(source: &Path, name: &str, edit: impl FnOnce(&mut Value)) -> TempDir {
    let directory = copied(source);
    let file = directory.path().join(name);
    let mut value = json(&file);
    edit(&mut value);
    fs::write(&file, value.to_string()).unwrap();
    directory
}

pub(crate) fn copied(source: &Path) -> TempDir {
    let directory = TempDir::new().unwrap();
    for entry in fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
    }
    directory
}
