//! The program as a user runs it: exit status, streams, JSON.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod bench;
mod errors;
mod generate;
mod inspect;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;

/// A finished run of the program.
struct Run {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Run {
    /// The object that a successful run printed.
    #[track_caller]
    fn json(&self) -> Value {
        assert_eq!(self.status, Some(0), "{}", self.stderr);
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// The one line that a failed run printed, without its prefix.
    #[track_caller]
    fn error(&self) -> &str {
        assert_eq!(self.status, Some(1), "{}{}", self.stdout, self.stderr);
        let lines: Vec<&str> = self.stderr.lines().collect();
        let [line] = lines[..] else {
            panic!("not one line: {}", self.stderr)
        };
        line.strip_prefix("error: ").unwrap()
    }
}

impl From<Output> for Run {
    fn from(output: Output) -> Self {
        Self {
            status: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Runs the program with `arguments` and `input` on stdin.
fn treespec_with_input(arguments: &[&str], input: &str) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_treespec"));
    command.args(arguments);
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("TREESPEC_") {
            command.env_remove(variable);
        }
    }
    let mut child = command
        .env_remove("RUST_LOG")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).unwrap();
    drop(stdin);
    child.wait_with_output().unwrap().into()
}

/// Runs the program with `arguments` and an empty stdin.
fn treespec(arguments: &[&str]) -> Run {
    treespec_with_input(arguments, "")
}

/// A file of the reference cases.
fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(path)
}

fn fixture_argument(path: &str) -> String {
    fixture(path).to_str().unwrap().to_owned()
}

fn fixture_json(path: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(fixture(path)).unwrap()).unwrap()
}

/// Numbers of a JSON list as the program's `--tokens` wants them.
fn comma_separated(ids: &Value) -> String {
    let ids: Vec<String> = ids
        .as_array()
        .unwrap()
        .iter()
        .map(Value::to_string)
        .collect();
    ids.join(",")
}
