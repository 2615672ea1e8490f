use crate::{fixture_argument, treespec};

#[test]
fn bad_flags_are_usage_errors() {
    for arguments in [
        &["generate"][..],
        &["generate", "--prompt", "a", "--mode", "beam"],
        &["generate", "--tokens", "1,x"],
        &["explode"],
    ] {
        let run = treespec(arguments);
        assert_eq!(run.status, Some(2), "{arguments:?}: {}", run.stderr);
        assert_eq!(run.stdout, "");
    }
}

#[test]
fn a_missing_model_is_one_line() {
    let run = treespec(&["generate", "--prompt", "a", "--target", "/no/such/model"]);
    assert_eq!(run.error(), "the target /no/such/model does not exist");
    assert_eq!(run.stdout, "");
}

#[test]
fn an_endpoint_where_nobody_listens_is_unavailable() {
    let run = treespec(&["generate", "--prompt", "a", "--endpoint", "127.0.0.1:9"]);
    let error = run.error();
    assert!(error.starts_with("UNAVAILABLE: "), "{error}");
}

#[test]
fn a_stderr_that_takes_nothing_is_no_reason_to_panic() {
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let status = std::process::Command::new(env!("CARGO_BIN_EXE_treespec"))
        .args([
            "generate",
            "--prompt",
            "a",
            "--endpoint",
            "http://127.0.0.1:9",
        ])
        .env("TREESPEC_LOG", "trace")
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(full)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn settings_that_cannot_work_are_one_line() {
    let target = fixture_argument("cases/01_llama_gqa_tied/model");
    let run = treespec(&[
        "generate",
        "--tokens=5",
        "--threads=100000",
        "--no-drafter",
        "--target",
        &target,
    ]);
    let error = run.error();
    assert!(
        error.contains("--threads 100000") && error.contains("256"),
        "{error}"
    );
    let run = treespec(&[
        "generate",
        "--tokens=5",
        "--mode=tree:8",
        "--budget=9",
        "--no-drafter",
        "--target",
        &target,
    ]);
    assert!(run.error().contains("--budget 9"), "{}", run.error());
}

#[test]
fn a_device_that_cannot_be_used_is_one_line() {
    let target = fixture_argument("cases/01_llama_gqa_tied/model");
    let run = treespec(&["generate", "--tokens=5", "--device=gpu"]);
    assert_eq!(run.status, Some(2));
    assert!(run.stderr.contains("cuda:N"), "{}", run.stderr);
    if cfg!(feature = "cuda") {
        return;
    }
    for command in [
        &["generate", "--tokens=5"][..],
        &["bench", "step", "--context=1"],
        &["bench", "sweep"],
    ] {
        let flags = ["--device=cuda:0", "--no-drafter", "--target", &target];
        let run = treespec(&[command, &flags].concat());
        let error = run.error();
        assert!(error.contains("cuda:0 needs a build with CUDA"), "{error}");
        assert!(error.contains("--features cuda"), "{error}");
    }
}

#[test]
fn contradicting_placements_are_one_line() {
    let target = fixture_argument("cases/01_llama_gqa_tied/model");
    let drafter = fixture_argument("cases/01_llama_gqa_tied/drafter_fit");
    let with_drafter = ["--drafter", &drafter];
    let cases: [(&[&str], &[&str], &str); 3] = [
        (&[], &[], "--draft-placement local needs a drafter"),
        (
            &with_drafter,
            &["--topk-placement=draft"],
            "--topk-placement",
        ),
        (&with_drafter, &["--draft-device=cuda:1"], "--draft-device"),
    ];
    for (drafter, flags, expected) in cases {
        let common = [
            "generate",
            "--tokens=5",
            "--draft-placement=local",
            "--target",
            &target,
        ];
        let run = treespec(&[&common, drafter, flags].concat());
        let error = run.stderr.lines().last().unwrap();
        assert!(error.starts_with(&format!("error: {expected}")), "{error}");
        assert_eq!(run.status, Some(1));
    }
}

#[test]
fn a_broken_model_is_told_by_the_service_that_met_it() {
    let target = fixture_argument("malformed/01_missing_tensor/model");
    let run = treespec(&[
        "generate",
        "--tokens",
        "1",
        "--no-drafter",
        "--target",
        &target,
    ]);
    let error = run.error();
    assert!(error.starts_with("verify: "), "{error}");
    assert!(error.contains("tensor"), "{error}");
}

#[test]
fn a_bad_request_has_the_services_status() {
    let target = fixture_argument("cases/01_llama_gqa_tied/model");
    for (flags, expected) in [
        (&["--tokens", ""][..], "INVALID_ARGUMENT: token_ids"),
        (&["--tokens", "999999"], "INVALID_ARGUMENT: token_ids"),
        (
            &["--tokens=1", "--temperature=-0.5"],
            "INVALID_ARGUMENT: sampling.temperature",
        ),
        (
            &["--tokens=1", "--max-tokens=0"],
            "INVALID_ARGUMENT: max_tokens",
        ),
        (
            &["--tokens=1", "--json", "--logprobs=21"],
            "INVALID_ARGUMENT: output.top_logprobs",
        ),
    ] {
        let arguments = [&["generate", "--no-drafter", "--target", &target], flags].concat();
        let run = treespec(&arguments);
        assert!(
            run.error().starts_with(expected),
            "{flags:?}: {}",
            run.stderr
        );
    }
}
