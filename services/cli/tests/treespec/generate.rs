use serde_json::{Value, json};

use crate::{comma_separated, fixture_argument, fixture_json, treespec};

const CASE: &str = "cases/01_llama_gqa_tied";

/// The accepted counts of the reference's rounds that make 48 tokens; it runs one round more when they end exactly.
fn accepted_by_round(reference: &Value, run: &str) -> Vec<u64> {
    let prompt = reference["prompt"].as_array().unwrap().len() as u64;
    let rounds = reference["runs"][run]["rounds"].as_array().unwrap();
    rounds
        .iter()
        .filter(|round| round["start"].as_u64().unwrap() < prompt + 47)
        .map(|round| round["accepted"].as_u64().unwrap())
        .collect()
}

/// Runs one prompt of the case with its fitted drafter, 48 tokens, as JSON.
fn generate(prompt: &Value, flags: &[&str]) -> Value {
    let target = fixture_argument(&format!("{CASE}/model"));
    let drafter = fixture_argument(&format!("{CASE}/drafter_fit"));
    let tokens = comma_separated(prompt);
    let mut arguments = vec!["generate", "--target", &target, "--drafter", &drafter];
    arguments.extend(["--tokens", &tokens, "--max-tokens", "48", "--json"]);
    arguments.extend(flags);
    treespec(&arguments).json()
}

#[test]
fn every_mode_and_placement_gives_the_reference_answer() {
    let reference = fixture_json(&format!("{CASE}/drafter_fit_expected.json"));
    let greedy: Vec<Value> = reference["greedy_continuation"].as_array().unwrap()[..48].to_vec();
    for (flags, run) in [
        (&["--mode", "ar"][..], None),
        (&["--mode", "chain"], Some("chain")),
        (&["--mode", "tree:8"], Some("ddtree_8")),
        (
            &[
                "--mode",
                "tree",
                "--budget",
                "16",
                "--topk-placement",
                "verify",
            ],
            Some("ddtree_16"),
        ),
        (
            &["--mode", "tree:8", "--draft-placement", "local"],
            Some("ddtree_8"),
        ),
    ] {
        let answer = generate(&reference["prompt"], flags);
        assert_eq!(answer["token_ids"], json!(greedy), "{flags:?}");
        assert_eq!(answer["finish_reason"], "length");
        assert_eq!(answer["usage"]["completion_tokens"], 48);
        let stats = &answer["stats"];
        let steps = stats["steps"].as_f64().unwrap();
        let per_step = stats["tokens_per_step"].as_f64().unwrap();
        assert!((per_step - 47.0 / steps).abs() < 1e-9, "{stats}");
        if let Some(run) = run {
            assert_eq!(
                stats["rounds"],
                json!(accepted_by_round(&reference, run)),
                "{run}"
            );
        }
    }
}

#[test]
fn log_probs_are_there_when_asked_for() {
    let reference = fixture_json(&format!("{CASE}/expected.json"));
    let prompt = &reference["prompts"][1];
    let answer = generate(
        &prompt["prompt"],
        &["--mode", "chain", "--logprobs", "5", "--prompt-logprobs"],
    );
    let expected = prompt["prompt_logprobs"].as_array().unwrap();
    let got = answer["prompt_logprobs"].as_array().unwrap();
    assert_eq!(got.len(), expected.len());
    assert_eq!(got[0], Value::Null);
    for (got, expected) in got.iter().zip(expected).skip(1) {
        assert!((got.as_f64().unwrap() - expected.as_f64().unwrap()).abs() < 1e-3);
    }
    let logprobs = answer["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 48);
    for (entry, id) in logprobs.iter().zip(answer["token_ids"].as_array().unwrap()) {
        assert_eq!(&entry["id"], id);
        assert_eq!(entry["top"].as_array().unwrap().len(), 5);
        assert_eq!(&entry["top"][0], &json!([id, entry["logprob"]]));
    }
}

#[test]
fn text_goes_to_stdout_and_statistics_to_stderr() {
    let target = fixture_argument(&format!("{CASE}/model"));
    let run = treespec(&[
        "generate",
        "--target",
        &target,
        "--no-drafter",
        "--raw-prompt",
        "hello",
        "--max-tokens",
        "4",
        "--ignore-eos",
    ]);
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    assert!(run.stdout.ends_with('\n'));
    assert!(run.stderr.contains("tokens per step"), "{}", run.stderr);
    assert!(!run.stdout.contains("tokens per step"));
}
