//! Where answers end.

use treespec_grammar::{GrammarError, GrammarSource};

use crate::vocabularies::{fixture, pieces};
use crate::walks::legal;

#[test]
fn an_answer_that_may_end_allows_every_end() {
    let model = fixture();
    let mut grammar = model.compile(&GrammarSource::Regex("a+".to_owned()));
    let mask = grammar.mask().unwrap();
    assert!(model.eos.iter().all(|&end| !mask.contains(end)));
    grammar.accept(model.id("a")).unwrap();
    let mask = grammar.mask().unwrap();
    assert!(mask.contains(model.id("a")));
    assert!(model.eos.iter().all(|&end| mask.contains(end)));
}

#[test]
fn an_answer_that_must_end_allows_nothing_else() {
    let model = fixture();
    for end in &model.eos {
        let mut grammar = model.compile(&GrammarSource::Regex("a".to_owned()));
        grammar.accept(model.id("a")).unwrap();
        let mut ends = model.eos.clone();
        ends.sort_unstable();
        assert_eq!(legal(&grammar.mask().unwrap()), ends);
        assert!(!grammar.is_finished());
        grammar.accept(*end).unwrap();
        assert!(grammar.is_finished());
        assert_eq!(legal(&grammar.mask().unwrap()), ends);
        let token = model.id("a");
        assert_eq!(grammar.accept(token), Err(GrammarError::Finished { token }));
    }
}

#[test]
fn a_refused_token_leaves_the_state_as_it_was() {
    let model = fixture();
    let mut grammar = model.compile(&GrammarSource::Regex("ab".to_owned()));
    let before = grammar.mask().unwrap();
    // An end too early, a wrong one, padding, one outside, a special one.
    for token in [model.eos[0], model.id("b"), 810, 5000, model.id("<|mask|>")] {
        assert_eq!(grammar.accept(token), Err(GrammarError::Refused { token }));
    }
    assert_eq!(grammar.mask().unwrap(), before);
    grammar.accept(model.id("a")).unwrap();
    grammar.accept(model.id("b")).unwrap();
}

#[test]
fn special_tokens_and_ids_by_number_are_legal_only_by_name_and_with_text() {
    let model = fixture();
    let mask = model.id("<|mask|>");
    let source = GrammarSource::Lark("start: <|mask|> <[790-831]>\n".to_owned());
    let mut grammar = model.compile(&source);
    assert_eq!(legal(&grammar.mask().unwrap()), [mask]);
    grammar.accept(mask).unwrap();
    let found = legal(&grammar.mask().unwrap());
    assert!(
        found.contains(&790) && found.iter().all(|&id| id < 800),
        "{found:?}"
    );
}

#[test]
fn an_end_in_the_middle_of_a_grammar_is_no_token() {
    let model = fixture();
    let middle = GrammarSource::Lark("start: \"a\" <|im_end|> \"b\"\n".to_owned());
    let mut grammar = model.compile(&middle);
    grammar.accept(model.id("a")).unwrap();
    assert_eq!(grammar.mask(), Err(GrammarError::DeadEnd));
    let last = GrammarSource::Lark("start: \"a\" <|im_end|>\n".to_owned());
    let mut grammar = model.compile(&last);
    grammar.accept(model.id("a")).unwrap();
    assert!(grammar.mask().unwrap().contains(model.id("<|im_end|>")));
    grammar.accept(model.id("<|im_end|>")).unwrap();
    assert!(grammar.is_finished());
}

#[test]
fn a_rule_that_lasts_until_the_end_ends_there() {
    let model = fixture();
    let source = GrammarSource::Lark("start: text\ntext[stop=\"\"]: /[ab]+/\n".to_owned());
    let mut grammar = model.compile(&source);
    grammar.accept(model.id("a")).unwrap();
    let mask = grammar.mask().unwrap();
    assert!(mask.contains(model.id("b")) && mask.contains(model.eos[1]));
    grammar.accept(model.eos[1]).unwrap();
    assert!(grammar.is_finished());
}

#[test]
fn a_text_that_the_vocabulary_cannot_write_is_a_dead_end() {
    let model = pieces(&["a", "b"]);
    let never = model
        .compiler
        .compile(&GrammarSource::Regex("xa".to_owned()));
    assert_eq!(never.unwrap_err(), GrammarError::DeadEnd);
    let mut later = model.compile(&GrammarSource::Regex("ax|b".to_owned()));
    later.accept(model.id("a")).unwrap();
    assert_eq!(later.mask(), Err(GrammarError::DeadEnd));
}
