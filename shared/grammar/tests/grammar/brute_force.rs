//! Masks over tiny vocabularies against the definition: a token is legal when some answer starts with the text so far
//! and the token's bytes.

use std::collections::BTreeSet;

use treespec_grammar::{Grammar, GrammarSource};

use crate::vocabularies::{Model, pieces};
use crate::walks::legal;

/// The longest of these tokens alone, when all answers go on with its text.
fn without_pieces(model: &Model, tokens: Vec<u32>, text: &[u8], answers: &[&str]) -> Vec<u32> {
    let bytes = |token: u32| model.tokenizer.token_bytes(token).unwrap();
    let Some(&longest) = tokens.iter().max_by_key(|&&token| bytes(token).len()) else {
        return tokens;
    };
    let forced = [text, &bytes(longest)].concat();
    let is_forced = answers
        .iter()
        .filter(|answer| answer.as_bytes().starts_with(text))
        .all(|answer| answer.as_bytes().starts_with(&forced));
    match is_forced && !model.eos.contains(&longest) {
        true => vec![longest],
        false => tokens,
    }
}

/// Walks every legal path, and compares the mask at each text with the definition.
fn compare(model: &Model, source: &GrammarSource, answers: &[&str]) {
    let mut open: Vec<(Grammar, Vec<u8>)> = vec![(model.compile(source), Vec::new())];
    let mut seen = BTreeSet::new();
    while let Some((mut grammar, text)) = open.pop() {
        let mask = grammar.mask().unwrap();
        let found = legal(&mask);
        let continues = |token: u32| {
            let bytes = model.tokenizer.token_bytes(token).unwrap();
            let longer = [&text[..], &bytes].concat();
            !model.tokenizer.is_special(token)
                && answers
                    .iter()
                    .any(|answer| answer.as_bytes().starts_with(&longer))
        };
        let may_end = answers.iter().any(|answer| answer.as_bytes() == text);
        let expected: Vec<u32> = (0..model.vocab_size as u32)
            .filter(|&token| match model.eos.contains(&token) {
                true => may_end,
                false => continues(token),
            })
            .collect();
        let chosen = without_pieces(model, expected.clone(), &text, answers);
        assert_eq!(found, chosen, "after {:?}", String::from_utf8_lossy(&text));
        for token in 0..model.vocab_size as u32 {
            let mut next = grammar.clone();
            assert_eq!(next.accept(token).is_ok(), expected.contains(&token));
            assert_eq!(grammar.mask().unwrap(), mask);
            if model.eos.contains(&token) || !expected.contains(&token) {
                continue;
            }
            let longer = [&text[..], &model.tokenizer.token_bytes(token).unwrap()].concat();
            if seen.insert(longer.clone()) {
                open.push((next, longer));
            }
        }
    }
    assert!(
        answers
            .iter()
            .all(|answer| seen.contains(answer.as_bytes()))
    );
}

#[test]
fn masks_are_what_some_answer_goes_on_with() {
    // Two tokens for `a`, parts of a character, a special token spelled like an answer, and what no answer has.
    let model = pieces(&[
        "a", "b", "ab", "abc", "c", "▁", "▁b", "<0x61>", "é", "<0xC3>", "<0xA9>", "tool", "<", ">",
        "x", "ca",
    ]);
    let answers = ["a", "ab", "abc", "a b", "caé", "é", "<tool>"];
    let choices = GrammarSource::Choices(answers.map(str::to_owned).to_vec());
    compare(&model, &choices, &answers);
    let regex = GrammarSource::Regex("a(b?c?|b|bb)".to_owned());
    compare(&model, &regex, &["a", "ab", "ac", "abc", "abb"]);
    let lark = GrammarSource::Lark("start: a | \"c\" a\na: \"a\" [\"b\"]\n".to_owned());
    compare(&model, &lark, &["a", "ab", "ca", "cab"]);
}
