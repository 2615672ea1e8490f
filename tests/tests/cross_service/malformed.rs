//! Broken checkpoints: both services end their start-up with one line that names what is broken.

use std::future::pending;
use std::path::PathBuf;

use tokio::time::timeout;
use treespec_testkit::{Ask, Cluster, ClusterBuilder, Mode, PATIENCE};
use treespec_tests::{Expected, Malformed, fixture, read_json};

use crate::models::top;

const CONTROL_TARGET: &str = "_control_ok/model";
const CONTROL_DRAFTER: &str = "_control_ok/drafter";

fn path(relative: &str) -> PathBuf {
    fixture("malformed").join(relative)
}

fn builder(target: &str, drafter: &str) -> ClusterBuilder {
    Cluster::builder(path(target)).drafter(path(drafter))
}

async fn verify_error(builder: &ClusterBuilder) -> String {
    let run = treespec_verify::run(builder.verify_config(), pending());
    let ended = timeout(PATIENCE, run).await.expect("start-up ends");
    ended.expect_err("it is broken").to_string()
}

async fn draft_error(builder: &ClusterBuilder) -> String {
    let run = treespec_draft::run(builder.draft_config().unwrap(), pending());
    let ended = timeout(PATIENCE, run).await.expect("start-up ends");
    ended.expect_err("it is broken").to_string()
}

fn check_error(error: &str, mentions: &[String], what: &str) {
    assert!(!error.contains('\n'), "{what}: {error}");
    for mention in mentions {
        assert!(
            error.contains(mention),
            "{what}: {error:?} lacks {mention:?}"
        );
    }
}

#[tokio::test]
async fn a_broken_checkpoint_ends_the_start_with_one_line_that_names_it() {
    let malformed: Malformed = read_json(&path("malformed.json"));
    assert!(!malformed.cases.is_empty());
    for case in &malformed.cases {
        let drafter = case.drafter.as_deref().unwrap_or(CONTROL_DRAFTER);
        let builder = builder(&case.model, drafter);
        let what = format!("verify, {} ({})", case.name, case.kind);
        check_error(&verify_error(&builder).await, &case.should_mention, &what);
        let what = format!("draft, {} ({})", case.name, case.kind);
        check_error(&draft_error(&builder).await, &case.should_mention, &what);
    }
}

#[tokio::test]
async fn a_missing_file_is_named() {
    let missing = builder("no_such_model", CONTROL_DRAFTER);
    let mention = [path("no_such_model").display().to_string()];
    check_error(&verify_error(&missing).await, &mention, "verify");
    check_error(&draft_error(&missing).await, &mention, "draft");

    // A directory that is no model at all: its first missing file is named.
    let empty = builder("", CONTROL_DRAFTER);
    let mention = ["config.json".to_owned()];
    check_error(&verify_error(&empty).await, &mention, "verify");
    check_error(&draft_error(&empty).await, &mention, "draft");

    let no_drafter = builder(CONTROL_TARGET, "no_such_drafter");
    let mention = [path("no_such_drafter").display().to_string()];
    check_error(&verify_error(&no_drafter).await, &mention, "verify");
    check_error(&draft_error(&no_drafter).await, &mention, "draft");
}

#[tokio::test]
async fn the_valid_base_of_the_broken_ones_works() {
    let expected: Expected = read_json(&path("_control_ok/expected.json"));
    for target in [CONTROL_TARGET, "_control_ok/model.gguf"] {
        let cluster = builder(target, CONTROL_DRAFTER).start().await;
        for expected in &expected.prompts {
            for mode in [Mode::Ar, Mode::Chain, Mode::Tree(16)] {
                let ask = Ask::tokens(&expected.prompt)
                    .mode(mode)
                    .max_tokens(expected.greedy.len())
                    .top_logprobs(5);
                let answer = cluster.client().generate(ask).await.unwrap();
                let what = format!("{target} {mode}");
                assert_eq!(answer.token_ids, expected.greedy, "{what}");
                for (got, expected) in answer.logprobs.iter().zip(&expected.top5) {
                    expected.assert_close(&top(got), &what);
                }
            }
        }
    }
}
