use std::fs;

use serde_json::Value;

use crate::{fixture_argument, treespec};

fn models() -> [String; 2] {
    ["model", "drafter_fit"]
        .map(|part| fixture_argument(&format!("cases/01_llama_gqa_tied/{part}")))
}

/// Runs a benchmark on the tiny models and returns its table and its report.
fn bench(arguments: &[&str]) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let [target, drafter] = models();
    let shared = [
        "--threads=1",
        "--target",
        &target,
        "--drafter",
        &drafter,
        "--json",
        path.to_str().unwrap(),
    ];
    let run = treespec(&[&["bench"], arguments, &shared].concat());
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let report = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    (run.stdout, report)
}

#[test]
fn the_engine_gives_the_same_answers_in_every_mode() {
    let (table, report) = bench(&[
        "engine",
        "--modes=ar,chain,tree:8",
        "--limit=3",
        "--max-tokens=12",
        "--repetitions=2",
        "--batch=2",
    ]);
    assert_eq!(report["command"], "bench engine");
    assert_eq!(report["config"]["batch"], 2);
    assert_eq!(report["config"]["prompts"].as_array().unwrap().len(), 3);
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 3);
    for result in results {
        assert_eq!(result["answers"], 6);
        assert_eq!(result["same_answers"], 6);
        // Two batches in each of two repetitions.
        assert_eq!(result["runs"].as_array().unwrap().len(), 4);
        let ratios = result["ratios"].as_array().unwrap();
        assert_eq!(
            (&ratios[0]["to"], &ratios[1]["to"]),
            (&"ar".into(), &"chain".into())
        );
    }
    assert!(table.lines().next().unwrap().contains("/ chain"), "{table}");
    assert!(table.contains("tree:8"), "{table}");
}

#[test]
fn steps_are_measured_by_rows() {
    let (table, report) = bench(&["step", "--rows=1,8", "--context=20", "--repetitions=3"]);
    let results = report["results"].as_array().unwrap();
    assert_eq!(results[1]["rows"], 8);
    assert!(results[1]["ms"]["median"].as_f64().unwrap() > 0.0);
    assert_eq!(results[0]["to_one_row"]["median"], 1.0);
    assert!(table.starts_with("rows"), "{table}");
}

#[test]
fn what_a_benchmark_lacks_is_one_line() {
    let [target, drafter] = models();
    let engine = ["bench", "engine", "--target", &target];
    let run = treespec(&[&engine[..], &["--no-drafter"]].concat());
    assert!(run.error().contains("give --drafter"), "{}", run.stderr);
    let run = treespec(&[&engine[..], &["--drafter", &drafter, "--modes=tree"]].concat());
    assert!(run.error().contains("tree:N"), "{}", run.stderr);
    let run = treespec(&["bench", "step", "--shape=qwen3-8b"]);
    assert!(run.error().contains("--device cuda:N"), "{}", run.stderr);
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_needs_a_build_for_it() {
    let [target, drafter] = models();
    for arguments in [
        &["step", "--device=cuda", "--shape=qwen3-8b"][..],
        &["topk", "--k=64"],
        &[
            "engine",
            "--device=cuda",
            "--target",
            &target,
            "--drafter",
            &drafter,
        ],
    ] {
        let run = treespec(&[&["bench"], arguments].concat());
        assert!(run.error().contains("--features cuda"), "{}", run.stderr);
    }
}
