//! Structured output: what a constraint asks for is what comes, at every temperature, with and without drafts.

use futures_util::{StreamExt, stream};
use serde::Deserialize;
use tonic::Code;
use tonic_types::StatusExt;
use treespec_engine::Precision;
use treespec_rpc::proto::verify::v1::{Choices, Constraint, FinishReason, constraint::Kind};
use treespec_testkit::{
    Answer, Ask, Client, Cluster, Mode, default_drafter, default_target, is_there,
};

use crate::models::{FIT, LLAMA, Placement, cluster};

const MODES: [Mode; 4] = [Mode::Ar, Mode::Chain, Mode::Tree(8), Mode::Tree(40)];

/// The schema of `treespec bench lossless`.
const SCHEMA: &str = include_str!("../../../services/cli/src/bench/lossless/person.schema.json");

/// What [`SCHEMA`] describes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Person {
    name: String,
    age: u8,
    #[serde(rename = "member")]
    _member: bool,
    colours: Vec<Colour>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Colour {
    Red,
    Green,
    Blue,
}

fn is_valid(text: &str) -> bool {
    serde_json::from_str(text).is_ok_and(|person: Person| {
        person.name.chars().count() <= 12
            && person.age <= 120
            && (1..=3).contains(&person.colours.len())
    })
}

fn constrained(ask: Ask, kind: Kind) -> Ask {
    ask.edit(|request| request.constraint = Some(Constraint { kind: Some(kind) }))
}

async fn ask(client: &Client, mode: Mode, temperature: f32, kind: Kind) -> Answer {
    let ask = Ask::tokens(&[40, 41, 42])
        .mode(mode)
        .max_tokens(200)
        .sampled(temperature, 9);
    client.generate(constrained(ask, kind)).await.unwrap()
}

#[tokio::test]
async fn answers_are_what_their_constraint_asks_for_in_every_mode() {
    let lark = "start: \"<\" ITEM (\",\" ITEM)* \">\"\nITEM: /[0-9]{1,3}/\n";
    let options: Vec<String> = ["perhaps", "yes", "yesterday", "no"]
        .map(String::from)
        .into();
    let choices = Choices {
        options: options.clone(),
    };
    type Valid<'a> = &'a dyn Fn(&str) -> bool;
    let cases: [(Kind, Valid<'_>); 4] = [
        (Kind::JsonSchema(SCHEMA.into()), &is_valid),
        (Kind::Regex("[A-F]{3}-[0-9]{2,4}".into()), &|text| {
            let (letters, digits) = text.split_once('-').unwrap();
            letters.len() == 3 && (2..=4).contains(&digits.len())
        }),
        (Kind::Choices(choices), &|text| {
            options.iter().any(|option| option == text)
        }),
        (Kind::Lark(lark.into()), &|text| {
            text.starts_with('<') && (text.ends_with('>') || text.len() >= 200)
        }),
    ];
    for placement in [
        Placement::Draft,
        Placement::DraftWithoutTopk,
        Placement::Local,
    ] {
        let cluster = placement.cluster(LLAMA, FIT).start().await;
        for (kind, is_valid) in &cases {
            for temperature in [0.0, 1.0] {
                let mut plain = None;
                for mode in MODES {
                    let answer = ask(&cluster.client(), mode, temperature, kind.clone()).await;
                    let what = format!("{placement:?} {mode} {temperature} {kind:?}");
                    assert!(is_valid(&answer.text), "{what}: {}", answer.text);
                    let plain = plain.get_or_insert_with(|| answer.clone());
                    assert_eq!(answer.token_ids, plain.token_ids, "{what}");
                    assert_eq!(answer.text, plain.text, "{what}");
                }
            }
        }
    }
}

/// Where only one text is left it costs no steps: it is drafted whole.
#[tokio::test]
async fn forced_text_comes_in_few_steps_even_with_a_useless_drafter() {
    for placement in [Placement::Draft, Placement::Local] {
        let cluster = placement
            .cluster(LLAMA, crate::models::RANDOM)
            .start()
            .await;
        let text = "This sentence is the only one that may be said here.";
        let kind = Kind::Choices(Choices {
            options: vec![text.into()],
        });
        let answer = ask(&cluster.client(), Mode::Tree(40), 1.0, kind).await;
        assert_eq!(answer.text, text);
        assert_eq!(answer.finish, FinishReason::Stop);
        let (tokens, steps) = (answer.token_ids.len(), answer.stats.steps as usize);
        assert!(steps * 4 <= tokens, "{tokens} tokens in {steps} steps");
    }
}

#[tokio::test]
async fn a_constraint_outlives_its_verifier() {
    let mut cluster = cluster(LLAMA, FIT).verifiers(2).start().await;
    let client = cluster.client();
    let request = || {
        let ask = Ask::tokens(&[40, 41, 42])
            .mode(Mode::Tree(8))
            .max_tokens(300)
            .sampled(1.0, 21)
            .edit(|request| {
                let sampling = request.sampling.as_mut().unwrap();
                sampling.frequency_penalty = Some(0.5);
                sampling.repetition_penalty = Some(1.1);
            });
        constrained(ask, Kind::Regex("([a-z]{2,9} ){60}end".into()))
    };
    let expected = client.generate(request()).await.unwrap();
    assert!(expected.text.ends_with(" end") || expected.token_ids.len() == 300);
    let mut stream = client.open(request()).await.unwrap();
    for _ in 0..5 {
        stream.next().await.unwrap().unwrap();
    }
    cluster.verifiers[0].kill().await;
    stream.next().await.unwrap().unwrap();
    cluster.verifiers[0].restart().await;
    cluster.verifiers[1].kill().await;
    let answer = stream.finish().await.unwrap();
    assert_eq!(answer.token_ids, expected.token_ids);
    assert_eq!(answer.text, expected.text);
}

#[tokio::test]
async fn what_is_wrong_with_a_constraint_is_said_in_one_line() {
    let cluster = cluster(LLAMA, FIT).start().await;
    let many = Choices {
        options: vec!["a".into(), "b".into(), "a".into()],
    };
    let cases = [
        (Kind::JsonSchema("{".into()), "constraint.json_schema"),
        (
            Kind::JsonSchema(r#"{"type": "color"}"#.into()),
            "constraint.json_schema",
        ),
        (
            Kind::JsonSchema(r#"{"$ref": "http://127.0.0.1/x"}"#.into()),
            "constraint.json_schema",
        ),
        (Kind::Regex("(".into()), "constraint.regex"),
        (
            Kind::Choices(Choices::default()),
            "constraint.choices.options",
        ),
        (Kind::Choices(many), "constraint.choices.options"),
        (Kind::Lark("start: missing".into()), "constraint.lark"),
    ];
    for (kind, field) in cases {
        let ask = constrained(Ask::tokens(&[40]).max_tokens(4), kind);
        let status = cluster.client().generate(ask).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(!status.message().contains('\n'), "{status:?}");
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, field, "{status:?}");
    }
    let ask = Ask::tokens(&[40]).max_tokens(4).ignore_eos();
    let ask = constrained(ask, Kind::Regex("a+".into()));
    let status = cluster.client().generate(ask).await.unwrap_err();
    let violations = status.get_details_bad_request().unwrap().field_violations;
    assert_eq!(violations[0].field, "ignore_eos");
    // It keeps serving.
    let answer = ask_for_a_word(&cluster.client()).await;
    assert_eq!(answer.text.len(), 5);
}

async fn ask_for_a_word(client: &Client) -> Answer {
    ask(client, Mode::Tree(8), 1.0, Kind::Regex("[a-z]{5}".into())).await
}

#[tokio::test]
async fn a_hundred_answers_at_temperature_one_parse_and_validate() {
    if !is_there(&default_target()) {
        return;
    }
    let cluster = Cluster::builder(default_target())
        .drafter(default_drafter())
        .precision(Precision::Quantised)
        .kv_tokens(4_096)
        .max_sequences(8)
        .start()
        .await;
    let client = cluster.client();
    let answers = (0..100u64).map(|seed| {
        let people = [
            "a painter",
            "a retired sailor",
            "a young chess player",
            "your best friend",
        ];
        let question = format!("Describe {} as JSON.", people[seed as usize % 4]);
        let ask = Ask::user(&question)
            .mode(Mode::Tree(8))
            .max_tokens(96)
            .sampled(1.0, seed);
        client.generate(constrained(ask, Kind::JsonSchema(SCHEMA.into())))
    });
    let answers: Vec<_> = stream::iter(answers).buffered(8).collect().await;
    let (mut tokens, mut steps) = (0, 0);
    for answer in answers {
        let answer = answer.unwrap();
        assert!(is_valid(&answer.text), "{}", answer.text);
        assert_eq!(answer.finish, FinishReason::Stop);
        tokens += answer.token_ids.len() - 1;
        steps += answer.stats.steps as usize;
    }
    assert!(tokens > 2 * steps, "{tokens} tokens in {steps} steps");
}
