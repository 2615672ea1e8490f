use serde_json::Value;

use super::*;
use crate::bench::engine::tests::{decoder, fixture_json};

const MODES: [(&str, Option<DraftShape>); 4] = [
    ("ar", None),
    ("chain", Some(DraftShape::Chain)),
    ("ddtree_8", Some(DraftShape::Tree { budget: 8 })),
    ("ddtree_16", Some(DraftShape::Tree { budget: 16 })),
];

fn numbers(list: &Value) -> Vec<u32> {
    list.as_array()
        .unwrap()
        .iter()
        .map(|number| number.as_u64().unwrap() as u32)
        .collect()
}

/// Prompt, its first 48 greedy tokens, and the rounds of every mode by the reference implementation.
struct Reference {
    question: Question,
    tokens: Vec<u32>,
    runs: Value,
}

fn reference(case: &str) -> Reference {
    let json = fixture_json(&format!("cases/{case}/drafter_fit_expected.json"));
    Reference {
        question: Question {
            tokens: numbers(&json["prompt"]),
            max_tokens: 48,
        },
        tokens: numbers(&json["greedy_continuation"])[..48].to_vec(),
        runs: json["runs"].clone(),
    }
}

impl Reference {
    fn rounds(&self, mode: &str) -> Vec<u32> {
        let rounds = self.runs[mode]["rounds"].as_array().unwrap();
        rounds
            .iter()
            .map(|round| round["accepted"].as_u64().unwrap() as u32)
            .collect()
    }
}

#[test]
fn every_mode_gives_the_reference_ids_in_the_reference_rounds() {
    for case in ["01_llama_gqa_tied", "03_qwen3_headdim"] {
        let reference = reference(case);
        let mut decoder = decoder(case, 1, 512);
        let free = decoder.pool.free_blocks();
        for (mode, shape) in MODES {
            let (answers, cost) = decoder
                .answer(std::slice::from_ref(&reference.question), shape)
                .unwrap();
            assert_eq!(answers[0].tokens, reference.tokens, "{case} {mode}");
            if shape.is_none() {
                assert_eq!((cost.steps, cost.forwards), (47, 47));
            } else {
                // The reference goes on for one more token.
                let rounds = &answers[0].rounds[..];
                let expected = reference.rounds(mode);
                assert!(expected.starts_with(rounds), "{case} {mode}: {rounds:?}");
                assert!(expected.len() <= rounds.len() + 1, "{case} {mode}");
            }
            assert_eq!((cost.answers, cost.completion_tokens), (1, 48));
            assert_eq!(cost.steps as usize, answers[0].rounds.len());
            assert_eq!(decoder.pool.free_blocks(), free, "{case} {mode}");
        }
    }
}

#[test]
fn every_mode_samples_the_same_ids() {
    for case in ["01_llama_gqa_tied", "03_qwen3_headdim"] {
        let mut decoder = decoder(case, 2, 1024);
        let reference = reference(case);
        let other = Question {
            tokens: reference.question.tokens[..4].to_vec(),
            max_tokens: 20,
        };
        let questions = [reference.question, other];
        for seed in [0, 7] {
            decoder.draw = Some(Draw {
                params: SamplingParams {
                    temperature: 1.0,
                    seed: Some(seed),
                    ..SamplingParams::default()
                },
                ranking: Ranking::Full,
            });
            let answers = MODES.map(|(_, shape)| {
                let (answers, _) = decoder.answer(&questions, shape).unwrap();
                answers.into_iter().map(|answer| answer.tokens).collect()
            });
            let plain: &Vec<Vec<u32>> = &answers[0];
            assert_ne!(plain[0], reference.tokens, "{case}: as without noise");
            for ((mode, _), answer) in MODES.iter().zip(&answers) {
                assert_eq!(answer, plain, "{case} {mode} seed {seed}");
            }
        }
    }
}

#[test]
fn a_batch_gives_what_its_sequences_give_alone() {
    let case = "01_llama_gqa_tied";
    let long = reference(case).question;
    let short = Question {
        tokens: long.tokens[..3].to_vec(),
        max_tokens: 9,
    };
    let other = Question {
        tokens: long.tokens.iter().rev().copied().collect(),
        max_tokens: 30,
    };
    let batch = [long, short, other];
    let mut decoder = decoder(case, batch.len(), 1024);
    for (mode, shape) in MODES {
        let alone: Vec<Answered> = batch
            .iter()
            .map(|question| {
                let one = std::slice::from_ref(question);
                decoder.answer(one, shape).unwrap().0.remove(0)
            })
            .collect();
        let (together, cost) = decoder.answer(&batch, shape).unwrap();
        assert_eq!(together, alone, "{mode}");
        let steps: Vec<usize> = alone.iter().map(|answer| answer.rounds.len()).collect();
        assert_eq!(cost.steps as usize, steps.iter().sum::<usize>(), "{mode}");
        assert_eq!(cost.forwards as usize, steps.into_iter().max().unwrap());
    }
}

#[test]
fn an_answer_ends_with_a_stop_token_inside_an_accepted_path() {
    let case = "01_llama_gqa_tied";
    let reference = reference(case);
    let mut decoder = decoder(case, 1, 512);
    // The first token of the answer that is not seen earlier in it, from the tenth on.
    let end = (10..48)
        .find(|&index| !reference.tokens[..index].contains(&reference.tokens[index]))
        .unwrap();
    decoder.stop_tokens = vec![reference.tokens[end]];
    for (mode, shape) in MODES {
        let (answers, _) = decoder
            .answer(std::slice::from_ref(&reference.question), shape)
            .unwrap();
        assert_eq!(answers[0].tokens, reference.tokens[..=end], "{mode}");
    }
}

#[test]
fn a_question_beyond_the_context_is_refused() {
    let mut decoder = decoder("01_llama_gqa_tied", 1, 64);
    let question = Question {
        tokens: vec![5],
        max_tokens: 4096,
    };
    let error = decoder.answer(&[question], None).unwrap_err().to_string();
    assert!(error.contains("context length 4096"), "{error}");
}

#[test]
fn the_two_best_tokens_are_those_that_decoding_chooses_from() {
    let case = "01_llama_gqa_tied";
    let reference = reference(case);
    let mut decoder = decoder(case, 1, 512);
    let tokens = [&reference.question.tokens[..], &reference.tokens[..20]].concat();
    let row = decoder.best_two(&tokens).unwrap();
    assert_eq!(row.top.len(), 2);
    assert_eq!(row.top[0].token, reference.tokens[20]);
    assert!(row.top[0].score > row.top[1].score);
}
