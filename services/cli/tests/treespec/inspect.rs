use serde_json::{Value, json};

use crate::{comma_separated, fixture_argument, fixture_json, treespec, treespec_with_input};

const CASE: &str = "cases/03_qwen3_headdim";

/// `[[id, logprob], …]` against the reference's two lists. Neighbours may be closer than the tolerance, so ids are
/// looked up, not compared in order.
#[track_caller]
fn assert_close(got: &Value, ids: &Value, logprobs: &Value) {
    let got = got.as_array().unwrap();
    for (id, expected) in ids
        .as_array()
        .unwrap()
        .iter()
        .zip(logprobs.as_array().unwrap())
    {
        let found = got.iter().find(|pair| &pair[0] == id).unwrap();
        let difference = found[1].as_f64().unwrap() - expected.as_f64().unwrap();
        assert!(
            difference.abs() < 1e-3,
            "token {id}: {found} against {expected}"
        );
    }
}

#[test]
fn scores_of_a_tree_are_those_of_its_paths() {
    let file = format!("{CASE}/tree_forward.json");
    let reference = fixture_json(&file);
    let target = fixture_argument(&format!("{CASE}/model"));
    let tokens = comma_separated(&reference["prompt"]);
    let tree = fixture_argument(&file);
    let scores = treespec(&[
        "inspect", "score", "--target", &target, "--tokens", &tokens, "--tree", &tree, "--top",
        "8", "--json",
    ])
    .json();
    let expected = reference["nodes"].as_array().unwrap();
    let nodes = scores["nodes"].as_array().unwrap();
    assert_eq!(nodes.len(), expected.len());
    for (node, expected) in nodes.iter().zip(expected) {
        assert_eq!(node["top"].as_array().unwrap().len(), 8);
        assert_close(&node["top"], &expected["ids"], &expected["logprobs"]);
    }
}

#[test]
fn slots_and_trees_of_a_draft_are_the_references() {
    let reference = fixture_json(&format!("{CASE}/drafter_fit_expected.json"));
    let position = &reference["positions"][1];
    let start = position["start"].as_u64().unwrap() as usize;
    let mut sequence = reference["prompt"].as_array().unwrap().clone();
    sequence.extend(reference["greedy_continuation"].as_array().unwrap().clone());
    let tokens = comma_separated(&json!(sequence[..start]));
    let target = fixture_argument(&format!("{CASE}/model"));
    let drafter = fixture_argument(&format!("{CASE}/drafter_fit"));
    let draft = treespec(&[
        "inspect",
        "draft",
        "--target",
        &target,
        "--drafter",
        &drafter,
        "--tokens",
        &tokens,
        "--top",
        "60",
        "--json",
    ])
    .json();
    // The root is the target's own choice here.
    assert_eq!(draft["root"], position["root_token"]);
    let slots = draft["slots"].as_array().unwrap();
    let expected = position["slots"].as_array().unwrap();
    assert_eq!(slots.len(), expected.len());
    for (slot, expected) in slots.iter().zip(expected) {
        assert_close(&slot["top"], &expected["ids"], &expected["logprobs"]);
    }

    let depths: Vec<&Value> = slots.iter().map(|slot| &slot["top"]).collect();
    let input = json!({"root": draft["root"], "budget": 33, "depths": depths}).to_string();
    let tree = treespec_with_input(&["inspect", "tree", "-", "--json"], &input).json();
    let expected = &position["trees"]["33"];
    for field in ["tokens", "parents", "depths"] {
        assert_eq!(tree[field], expected[field], "{field}");
    }
}

#[test]
fn a_bad_tree_file_is_named() {
    let target = fixture_argument(&format!("{CASE}/model"));
    let file = fixture_argument("index.json");
    let run = treespec(&[
        "inspect", "score", "--target", &target, "--tokens", "1", "--tree", &file,
    ]);
    assert!(run.error().contains("index.json"), "{}", run.stderr);
    let run = treespec_with_input(&["inspect", "tree", "-"], "{}");
    assert!(run.error().contains("input of a tree"), "{}", run.stderr);
}
