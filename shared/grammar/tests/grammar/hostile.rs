//! Sources that are made to hang, exhaust memory or crash.

use proptest::prelude::*;
use treespec_grammar::{GrammarError, GrammarSource};

use crate::vocabularies::fixture;
use crate::walks::legal;

/// Compiles, and takes some legal tokens. Whatever happens is an error of one line.
fn survive(source: &GrammarSource) {
    let outcome = fixture().compiler.compile(source).and_then(|mut grammar| {
        for step in 0..24 {
            let mask = grammar.mask()?;
            let legal = legal(&mask);
            grammar.accept(legal[step * 7 % legal.len()])?;
            if grammar.is_finished() {
                break;
            }
        }
        Ok::<_, GrammarError>(())
    });
    if let Err(error) = outcome {
        let message = error.to_string();
        assert!(!message.contains('\n') && message.len() < 1200, "{message}");
    }
}

fn joined(count: usize, separator: &str, item: impl Fn(usize) -> String) -> String {
    (0..count).map(item).collect::<Vec<_>>().join(separator)
}

#[test]
fn expressions_that_explode_are_survived() {
    for regex in [
        format!("{}a{}", "(".repeat(200), "){9}".repeat(200)),
        "(a|b)*a(a|b){300}".to_owned(),
        "((a{1,1000}b){1,1000}c){1,1000}".to_owned(),
        "(a|b){1000000000}".to_owned(),
        "a?".repeat(2000) + &"a".repeat(2000),
        ".*x".repeat(2000),
        r"\p{L}".repeat(1000),
    ] {
        survive(&GrammarSource::Regex(regex));
    }
}

#[test]
fn grammars_that_explode_are_survived() {
    let doubling = |name: &str, last: &str| {
        let lines = joined(13, "\n", |at| {
            format!("{name}{at}: {name}{0} {name}{0}", at + 1)
        });
        format!("start: {name}0\n{lines}\n{name}13: {last}\n")
    };
    let chain = |name: &str| {
        let lines = joined(3000, "\n", |at| format!("{name}{at}: {name}{}", at + 1));
        format!("start: {name}0\n{lines}\n{name}3000: \"a\"\n")
    };
    for lark in [
        doubling("T", "\"a\""),
        doubling("T", "\"a\"?"),
        doubling("r", "\"a\"?"),
        chain("T"),
        chain("r"),
        format!("start: {}\"a\"{}\n", "(".repeat(20_000), ")".repeat(20_000)),
        "start: s\ns: s s s | s s | \"a\" |\n".to_owned(),
        "start: start\n".to_owned(),
        format!("start: /{}/\n", "a?".repeat(11_000)),
        format!("start: %json[{}\n", "\"%json\",".repeat(7000)),
        "start: (((\"a\" \"b\"){1,99999}){1,99999}){1,99999}\n".to_owned(),
    ] {
        survive(&GrammarSource::Lark(lark));
    }
}

#[test]
fn schemas_that_explode_are_survived() {
    let doubling = joined(40, ",", |at| {
        format!(
            r##""a{at}": {{"allOf": [{{"$ref": "#/$defs/a{0}"}}, {{"$ref": "#/$defs/a{0}"}}]}}"##,
            at + 1
        )
    });
    let chain = joined(1500, ",", |at| {
        format!(r##""a{at}": {{"$ref": "#/$defs/a{}"}}"##, at + 1)
    });
    let properties = joined(1500, ",", |at| format!(r#""p{at}": {{}}"#));
    for schema in [
        format!("{}true{}", r#"{"items": "#.repeat(120), "}".repeat(120)),
        format!(
            r##"{{"$ref": "#/$defs/a0", "$defs": {{{doubling}, "a40": {{"pattern": "a+"}}}}}}"##
        ),
        format!(r##"{{"$ref": "#/$defs/a0", "$defs": {{{chain}, "a1500": {{}}}}}}"##),
        format!(
            r#"{{"anyOf": [{}], "properties": {{{properties}}}}}"#,
            joined(5000, ",", |_| "{}".to_owned())
        ),
        format!(r#"{{"type": "object", "properties": {{{properties}}}}}"#),
        r#"{"type": "array", "items": {"type": "integer"}, "minItems": 1000000000}"#.to_owned(),
        r#"{"type": "string", "minLength": 1000000, "maxLength": 1000000000}"#.to_owned(),
        r#"{"type": "object", "minProperties": 1000000}"#.to_owned(),
        r##"{"allOf": [{"$ref": "#"}, {"$ref": "#"}]}"##.to_owned(),
        r##"{"$ref": "#"}"##.to_owned(),
        r#"{"type": "number", "multipleOf": 1e-300}"#.to_owned(),
        r#"{"type": "number", "minimum": -1e308, "maximum": 1e308}"#.to_owned(),
    ] {
        survive(&GrammarSource::JsonSchema(schema));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn junk_is_survived(
        regex in r"([ab.(){},0-9?*+|^$\[\]\\]|\\p\{L\}|\(\?i\)){0,24}",
        lark in "(start: |x: |T: |\"a\"|/b+/|[xT|*?(){}~0-9%\n ]|%json|%regex|<x>|<\\[1\\]>|%ignore|lazy|\\[stop=\"\"\\]){0,16}",
        any in "\\PC{0,30}",
    ) {
        survive(&GrammarSource::Regex(regex));
        survive(&GrammarSource::Lark(format!("start: {lark}")));
        survive(&GrammarSource::Lark(lark));
        survive(&GrammarSource::JsonSchema(any.clone()));
        survive(&GrammarSource::Regex(any.clone()));
        survive(&GrammarSource::Choices(vec![any]));
    }

    #[test]
    fn junk_schemas_are_survived(schema in any_schema(3)) {
        survive(&GrammarSource::JsonSchema(schema));
    }
}

/// Schemas of known keywords with values of all kinds.
fn any_schema(depth: u32) -> BoxedStrategy<String> {
    let leaf = prop_oneof![
        Just("true".to_owned()),
        Just("[]".to_owned()),
        Just("-1".to_owned()),
        Just("7".to_owned()),
        Just("0.1".to_owned()),
        Just("\"#\"".to_owned()),
        Just("\"integer\"".to_owned()),
        Just("\"object\"".to_owned()),
        Just("\"[a-\"".to_owned()),
        Just("\"date-time\"".to_owned()),
    ];
    if depth == 0 {
        return leaf.boxed();
    }
    let keyword = prop::sample::select(vec![
        "type",
        "properties",
        "items",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "enum",
        "const",
        "pattern",
        "minimum",
        "maximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "required",
        "additionalProperties",
        "patternProperties",
        "prefixItems",
        "format",
        "minProperties",
        "x-guidance",
        "$schema",
    ]);
    let inner = any_schema(depth - 1);
    let object = prop::collection::vec((keyword, inner.clone()), 0..4).prop_map(|entries| {
        let entries: Vec<String> = entries
            .iter()
            .map(|(key, value)| format!("\"{key}\": {value}"))
            .collect();
        format!("{{{}}}", entries.join(", "))
    });
    let list =
        prop::collection::vec(inner, 0..3).prop_map(|items| format!("[{}]", items.join(", ")));
    prop_oneof![leaf, object.clone(), object, list].boxed()
}
