//! Chat templates: the fixtures' conversations, where templates are found, what templates may do.

use std::fs;

use serde_json::json;
use tempfile::TempDir;
use treespec_checkpoint::{ChatMessage, ChatTemplate, CheckpointError, TextTokenizer};

use crate::fixtures;
use crate::gguf_targets::tiny;

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
    }
}

/// A directory with nothing but a tokenizer_config.json.
fn configured(config: serde_json::Value) -> TempDir {
    let directory = TempDir::new().unwrap();
    fs::write(
        directory.path().join("tokenizer_config.json"),
        config.to_string(),
    )
    .unwrap();
    directory
}

fn render(template: &str) -> Result<String, CheckpointError> {
    let directory = configured(
        json!({"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": null}),
    );
    let template = ChatTemplate::open(directory.path())?.unwrap();
    template.render(
        &[message("user", "hi <b>"), message("assistant", " ok ")],
        true,
    )
}

#[test]
fn fixture_conversations_are_rendered_and_encoded() {
    for case in fixtures::CASES {
        let template = ChatTemplate::open(&fixtures::model(case)).unwrap().unwrap();
        let tokenizer = TextTokenizer::open(&fixtures::model(case)).unwrap();
        for expected in fixtures::tokenizer_cases(case)["chat"].as_array().unwrap() {
            let messages: Vec<ChatMessage> =
                serde_json::from_value(expected["messages"].clone()).unwrap();
            let add_generation_prompt = expected["add_generation_prompt"].as_bool().unwrap();
            let text = template.render(&messages, add_generation_prompt).unwrap();
            assert_eq!(text, expected["rendered"].as_str().unwrap());
            assert_eq!(
                tokenizer.encode(&text, false).unwrap(),
                fixtures::ids(&expected["ids"])
            );
        }
    }
}

#[test]
fn a_refusal_carries_the_templates_own_words() {
    for model in ["model", "model.gguf"] {
        let template = ChatTemplate::open(&fixtures::path("malformed/_control_ok").join(model))
            .unwrap()
            .unwrap();
        assert_eq!(
            template.render(&[message("user", "Hi")], true).unwrap(),
            "<s>[INST] Hi [/INST]"
        );
        let error = template
            .render(&[message("system", "Be brief.")], true)
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "the chat template refuses these messages: Only user and assistant roles are supported!"
        );
    }
}

#[test]
fn templates_behave_as_in_transformers() {
    for (template, expected) in [
        // trim_blocks and lstrip_blocks; the last newline of a template is not part of it.
        (
            "{% for m in messages %}\n  {% if m.role == 'user' %}\nU\n  {% endif %}\n{% endfor %}\nend\n",
            "U\nend",
        ),
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        (
            "{{ messages[1]['content'].strip().upper() }}{{ messages[1:] | length }}",
            "OK1",
        ),
        (
            "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
            "user",
        ),
        (
            "{{ messages[0] | tojson }}",
            r#"{"role": "user", "content": "hi <b>"}"#,
        ),
        (
            "{{ add_generation_prompt }} {{ none }} {{ tools }}",
            "True None None",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        ("{{ messages[0]['content'] }}", "hi <b>"),
    ] {
        assert_eq!(render(template).unwrap(), expected, "{template}");
    }
    let year: u32 = render("{{ strftime_now('%Y') }}").unwrap().parse().unwrap();
    assert!(year >= 2024);
}

#[test]
fn broken_and_endless_templates_are_errors() {
    for template in [
        "{% for m in messages %}",
        "{{ messages.nothing.at.all }}",
        "{{ strftime_now('%Q%') }}",
        "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}",
        "{% include 'chat' %}",
    ] {
        let error = render(template).unwrap_err();
        assert!(
            matches!(error, CheckpointError::ChatTemplate { .. }),
            "{template}: {error}"
        );
        assert!(
            error.to_string().contains("tokenizer_config.json"),
            "{error}"
        );
    }
}

#[test]
fn the_template_is_found_in_every_place() {
    let named =
        json!([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]);
    let directory = configured(json!({"chat_template": named}));
    let text = |directory: &TempDir| {
        let template = ChatTemplate::open(directory.path()).unwrap().unwrap();
        template.render(&[], false).unwrap()
    };
    assert_eq!(text(&directory), "D");
    fs::write(directory.path().join("chat_template.jinja"), "own file").unwrap();
    assert_eq!(text(&directory), "own file");

    assert!(
        ChatTemplate::open(configured(json!({})).path())
            .unwrap()
            .is_none()
    );
    assert!(
        ChatTemplate::open(TempDir::new().unwrap().path())
            .unwrap()
            .is_none()
    );
    let without = tiny("llama").save();
    assert!(ChatTemplate::open(without.path()).unwrap().is_none());
}
