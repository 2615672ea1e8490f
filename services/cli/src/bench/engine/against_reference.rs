//! How the answers of `bench engine` compare with a reference file's, and how near the two best tokens were where they
//! part: on other arithmetic than the reference's a near-tie may fall the other way.

use std::collections::HashMap;

use anyhow::Result;
use serde::Serialize;

use super::decoding::Decoder;
use crate::{
    bench::{
        questions::Question,
        reference::{Difference, ReferencePrompt},
    },
    mode::Mode,
};

/// The comparison of one mode.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct AgainstReference {
    /// Prompts whose ids equal the reference's.
    pub(super) equal: usize,
    pub(super) prompts: usize,
    /// The first difference of every other prompt.
    pub(super) differences: Vec<FirstDifference>,
}

/// Where an answer leaves the reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct FirstDifference {
    pub(super) prompt: usize,
    /// Index into the answer.
    pub(super) position: usize,
    pub(super) got: Option<u32>,
    pub(super) expected: Option<u32>,
    /// The two best tokens of our own distribution there.
    pub(super) best: Vec<u32>,
    /// Distance of their log-probabilities in nats.
    pub(super) gap: Option<f32>,
}

/// Compares the answers `[mode][prompt]`. The gaps come from untimed passes over the tokens before a difference.
///
/// # Errors
/// A fault of the model.
pub(super) fn compare(
    decoder: &mut Decoder,
    questions: &[Question],
    reference: &[ReferencePrompt],
    answers: &[Vec<Vec<u32>>],
) -> Result<Vec<AgainstReference>> {
    // The modes should give the same ids: one pass serves all that part at the same place.
    let mut gaps = HashMap::new();
    answers
        .iter()
        .map(|answers| {
            let mut outcome = AgainstReference {
                prompts: answers.len(),
                ..Default::default()
            };
            let prompts = reference.iter().zip(questions).zip(answers).enumerate();
            for (prompt, ((expected, question), answer)) in prompts {
                let Some(difference) = expected.first_difference(question.max_tokens, answer)
                else {
                    outcome.equal += 1;
                    continue;
                };
                let Difference {
                    position,
                    got,
                    expected,
                } = difference;
                let (best, gap) = match gaps.get(&(prompt, position)) {
                    Some(known) => known,
                    None => {
                        let before = [&question.tokens[..], &answer[..position]].concat();
                        let found = gap_after(decoder, &before)?;
                        gaps.entry((prompt, position)).or_insert(found)
                    }
                }
                .clone();
                outcome.differences.push(FirstDifference {
                    prompt,
                    position,
                    got,
                    expected,
                    best,
                    gap,
                });
            }
            Ok(outcome)
        })
        .collect()
}

fn gap_after(decoder: &mut Decoder, tokens: &[u32]) -> Result<(Vec<u32>, Option<f32>)> {
    let top = decoder.best_two(tokens)?.top;
    // The normaliser is the same for both.
    let gap = match top[..] {
        [first, second, ..] => Some(first.score - second.score),
        _ => None,
    };
    Ok((top.iter().map(|scored| scored.token).collect(), gap))
}

/// One line per place where modes part from the reference, with the modes that do.
pub(super) fn describe(modes: &[Mode], outcomes: &[AgainstReference]) -> String {
    let mut places: Vec<(&FirstDifference, Vec<String>)> = Vec::new();
    for (mode, outcome) in modes.iter().zip(outcomes) {
        for difference in &outcome.differences {
            match places.iter_mut().find(|(known, _)| *known == difference) {
                Some((_, modes)) => modes.push(mode.to_string()),
                None => places.push((difference, vec![mode.to_string()])),
            }
        }
    }
    places.sort_by_key(|(difference, _)| (difference.prompt, difference.position));
    let mut text = String::new();
    for (difference, parted) in places {
        let values = Difference {
            position: difference.position,
            got: difference.got,
            expected: difference.expected,
        }
        .values();
        let gap = difference
            .gap
            .map_or("unknown".to_owned(), |gap| format!("{gap:.1e} nats"));
        let parted = if parted.len() == modes.len() {
            "all modes".to_owned()
        } else {
            parted.join(", ")
        };
        text.push_str(&format!(
            "prompt {} token {} is {values}; the two best are {gap} apart ({parted})\n",
            difference.prompt, difference.position
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::engine::tests::decoder;

    fn difference(prompt: usize, gap: f32) -> FirstDifference {
        FirstDifference {
            prompt,
            position: 17,
            got: Some(284),
            expected: Some(28),
            best: vec![284, 28],
            gap: Some(gap),
        }
    }

    fn outcome(differences: Vec<FirstDifference>) -> AgainstReference {
        AgainstReference {
            equal: 3 - differences.len(),
            prompts: 3,
            differences,
        }
    }

    #[test]
    fn a_place_is_told_once_with_its_modes() {
        let outcomes = [
            outcome(vec![difference(2, 3e-4)]),
            outcome(vec![difference(0, 0.5), difference(2, 3e-4)]),
        ];
        let text = describe(&[Mode::Ar, Mode::Chain], &outcomes);
        assert_eq!(
            text,
            "prompt 0 token 17 is 284, expected 28; the two best are 5.0e-1 nats apart (chain)\n\
             prompt 2 token 17 is 284, expected 28; the two best are 3.0e-4 nats apart (all modes)\n"
        );
        assert_eq!(describe(&[Mode::Ar], &[outcome(vec![])]), "");
    }

    #[test]
    fn a_difference_comes_with_the_two_best_tokens_at_its_place() {
        let mut decoder = decoder("01_llama_gqa_tied", 1, 256);
        let question = Question {
            tokens: vec![5, 17, 300, 21],
            max_tokens: 12,
        };
        let (answered, _) = decoder
            .answer(std::slice::from_ref(&question), None)
            .unwrap();
        let ours = answered[0].tokens.clone();
        let reference = |token_ids: &[u32]| -> ReferencePrompt {
            serde_json::from_value(serde_json::json!({
                "prompt": "p", "prompt_tokens": 4, "token_ids": token_ids, "min_top1_top2_gap": 0.01, "rounds": {},
            }))
            .unwrap()
        };
        let mut other = ours.clone();
        other[7] = (other[7] + 1) % 560;
        let prompts = [reference(&ours), reference(&other)];
        let questions = [question.clone(), question];
        let mode = vec![ours.clone(), ours.clone()];
        let outcomes = compare(&mut decoder, &questions, &prompts, &[mode.clone(), mode]).unwrap();
        assert_eq!(outcomes[0], outcomes[1]);
        let AgainstReference {
            equal,
            prompts,
            differences,
        } = &outcomes[0];
        assert_eq!((*equal, *prompts), (1, 2));
        let [difference] = &differences[..] else {
            panic!("{differences:?}")
        };
        assert_eq!((difference.prompt, difference.position), (1, 7));
        assert_eq!(difference.got, Some(ours[7]));
        assert_eq!(difference.expected, Some(other[7]));
        assert_eq!(difference.best[0], ours[7]);
        assert!(difference.gap.unwrap() > 0.0);
    }
}
