//! What the benchmarks ask.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

/// Prompts for measurements, in three classes: programs and algorithms, arithmetic, conversation. The default drafter
/// was not trained on them.
pub(crate) const EVAL: [&str; 32] = [
    "Write a Python function that returns the n-th Fibonacci number using memoization, and explain it.",
    "Explain how the quicksort algorithm works, including its average and worst case complexity.",
    "A train travels 60 miles per hour for 2.5 hours. How far does it go? Think step by step.",
    "Implement a Python class for a bank account with deposit, withdraw and balance methods.",
    "Write a Python script that counts how often each word occurs in a text file.",
    "Can you write a JavaScript function which debounces another function?",
    "Explain the difference between a process and a thread.",
    "How does a hash map handle collisions?",
    "Explain how public key encryption keeps a message secret.",
    "If I have 3 boxes with 12 pencils each and I give away 7 pencils, how many are left?",
    "What is 144 divided by 12, and what is the square root of the result?",
    "Compute the sum of the numbers from 1 to 20.",
    "Give me a recipe for pancakes.",
    "What should I pack for a week of hiking in the mountains?",
    "Write a cover letter for a junior data analyst position.",
    "Describe the plot of Romeo and Juliet.",
    "What are the health benefits of regular exercise?",
    "Write a haiku about autumn leaves.",
    "Summarize how the immune system fights a virus.",
    "Give advice to someone who is moving to a new city.",
    "Write a SQL query that returns the top five customers by total spending.",
    "Write a C program that prints the first ten square numbers.",
    "Write a bash script which backs up a directory.",
    "Write a function in Rust that sums the even numbers of a slice.",
    "Who was Marie Curie and what did she discover?",
    "Explain why the sky is blue to a child.",
    "What is the difference between weather and climate?",
    "List three ways to save energy at home.",
    "Tell a short story about a robot who learns to paint.",
    "What are the pros and cons of nuclear power?",
    "How do I make a budget when my income varies each month?",
    "Explain supply chain management in two paragraphs.",
];

#[derive(Debug, Deserialize)]
struct Line {
    prompt: String,
}

/// The first `limit` prompts of `file` (one `{"prompt": "…"}` a line), or of [`EVAL`] without a file.
///
/// # Errors
/// When the file can't be read, a line is not such an object (named by its number), or nothing is left.
pub(crate) fn load(file: Option<&Path>, limit: Option<usize>) -> Result<Vec<String>> {
    let mut prompts = match file {
        None => EVAL.iter().map(|&prompt| prompt.to_owned()).collect(),
        Some(path) => read(path)?,
    };
    prompts.truncate(limit.unwrap_or(usize::MAX));
    ensure!(!prompts.is_empty(), "there are no prompts to run");
    Ok(prompts)
}

fn read(path: &Path) -> Result<Vec<String>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            serde_json::from_str::<Line>(line)
                .map(|line| line.prompt)
                .with_context(|| {
                    format!(
                        "{} line {}: not {{\"prompt\": \"…\"}}",
                        path.display(),
                        index + 1
                    )
                })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_list_is_cut_at_the_limit() {
        assert_eq!(load(None, None).unwrap().len(), 32);
        assert_eq!(load(None, Some(2)).unwrap(), EVAL[..2]);
        assert!(load(None, Some(0)).is_err());
    }

    #[test]
    fn a_file_has_one_object_a_line_and_bad_lines_are_numbered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prompts.jsonl");
        fs::write(
            &path,
            "{\"prompt\": \"a\", \"class\": \"chat\"}\n\n{\"prompt\": \"b\"}\n",
        )
        .unwrap();
        assert_eq!(load(Some(&path), None).unwrap(), ["a", "b"]);
        fs::write(&path, "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n").unwrap();
        let error = format!("{:#}", load(Some(&path), None).unwrap_err());
        assert!(error.contains("line 2"), "{error}");
    }
}
