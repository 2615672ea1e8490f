//! How large a JSON schema becomes when its parts are merged.
//!
//! The compiler merges what stands side by side (`allOf`, a union or a `$ref` with siblings) by copying: a union of n
//! options next to m properties becomes n times m properties, and a pattern that is referred to twice on each of forty
//! levels becomes 2^40 patterns. This is an estimate from above, so that such a schema is refused before it takes the
//! memory.

use std::collections::{HashMap, HashSet};
use std::ptr;

use serde_json::{Map, Value};

/// Most alternatives that the compiler merges before it gives up by itself.
const MOST_ALTERNATIVES: u64 = 50_000;

/// About how many schemas, properties and bytes of patterns `schema` becomes, at most.
pub(crate) fn weight(schema: &Value) -> u64 {
    let mut weigher = Weigher {
        root: schema,
        merged: HashMap::new(),
        open: HashSet::new(),
        referenced: vec![schema],
    };
    let mut weighed = HashSet::new();
    let mut sum: u64 = 0;
    while let Some(schema) = weigher.referenced.pop() {
        if weighed.insert(ptr::from_ref(schema)) {
            sum = sum.saturating_add(weigher.alone(schema));
        }
    }
    sum
}

/// A schema that is merged with others.
#[derive(Clone, Copy)]
struct Merged {
    /// Alternatives that it multiplies the others by.
    alternatives: u64,
    /// Size of them all before they are multiplied.
    size: u64,
}

impl Merged {
    const LEAF: Self = Self {
        alternatives: 1,
        size: 1,
    };

    fn both(self, other: Self) -> Self {
        let alternatives = self.alternatives.saturating_mul(other.alternatives);
        Self {
            alternatives: alternatives.min(MOST_ALTERNATIVES),
            size: self.size.saturating_add(other.size),
        }
    }

    fn either(self, other: Self) -> Self {
        let alternatives = self.alternatives.saturating_add(other.alternatives);
        Self {
            alternatives: alternatives.min(MOST_ALTERNATIVES),
            size: self.size.saturating_add(other.size),
        }
    }
}

/// What a keyword says, as far as it matters here.
enum Part<'a> {
    /// Schemas that all hold, of the same value or of parts of it.
    All(Vec<&'a Value>),
    /// Schemas one of which holds.
    Any(&'a [Value]),
    Reference(&'a str),
    /// Nothing with schemas in it.
    Data(u64),
}

impl<'a> Part<'a> {
    fn of(keyword: &str, value: &'a Value) -> Self {
        match (keyword, value) {
            ("$defs" | "definitions", _) => Self::Data(0),
            ("enum" | "const", value) => Self::Data(nodes(value)),
            ("anyOf" | "oneOf", Value::Array(options)) => Self::Any(options),
            ("$ref", Value::String(reference)) => Self::Reference(reference),
            ("properties" | "patternProperties", Value::Object(schemas)) => {
                Self::All(schemas.values().collect())
            }
            (_, Value::Array(schemas)) => Self::All(schemas.iter().collect()),
            (_, schema @ Value::Object(_)) => Self::All(vec![schema]),
            (_, Value::String(text)) => Self::Data(text.len() as u64),
            _ => Self::Data(1),
        }
    }
}

struct Weigher<'a> {
    root: &'a Value,
    merged: HashMap<*const Value, Merged>,
    /// Merged schemas on the way to the one at hand.
    open: HashSet<*const Value>,
    /// Schemas that are referred to without being merged: each is compiled once.
    referenced: Vec<&'a Value>,
}

impl<'a> Weigher<'a> {
    /// The size of a schema that is not merged with others.
    fn alone(&mut self, schema: &'a Value) -> u64 {
        let Value::Object(entries) = schema else {
            return 1;
        };
        if has_merging_parts(entries) {
            let Merged { alternatives, size } = self.merged(schema);
            return alternatives.saturating_mul(size);
        }
        let mut size: u64 = 1;
        for (keyword, value) in entries {
            let part = match Part::of(keyword, value) {
                Part::All(schemas) => self.alone_each(schemas),
                Part::Any(options) => self.alone_each(options),
                Part::Reference(reference) => {
                    self.referenced.extend(self.target(reference));
                    1
                }
                Part::Data(size) => size,
            };
            size = size.saturating_add(part);
        }
        size
    }

    fn alone_each(&mut self, schemas: impl IntoIterator<Item = &'a Value>) -> u64 {
        schemas
            .into_iter()
            .map(|schema| self.alone(schema))
            .fold(0, u64::saturating_add)
    }

    fn merged(&mut self, schema: &'a Value) -> Merged {
        let Value::Object(entries) = schema else {
            return Merged::LEAF;
        };
        let key = ptr::from_ref(schema);
        if let Some(&known) = self.merged.get(&key) {
            return known;
        }
        // A schema that contains itself is not merged into itself without end: the compiler refuses that.
        if !self.open.insert(key) {
            return Merged::LEAF;
        }
        let mut sum = Merged::LEAF;
        for (keyword, value) in entries {
            let part = match Part::of(keyword, value) {
                Part::All(schemas) => schemas
                    .into_iter()
                    .map(|schema| self.merged(schema))
                    .fold(Merged::LEAF, Merged::both),
                Part::Any(options) => options
                    .iter()
                    .map(|option| self.merged(option))
                    .reduce(Merged::either)
                    .unwrap_or(Merged::LEAF),
                Part::Reference(reference) => match self.target(reference) {
                    Some(target) => self.merged(target),
                    None => Merged::LEAF,
                },
                Part::Data(size) => Merged {
                    alternatives: 1,
                    size,
                },
            };
            sum = sum.both(part);
        }
        self.open.remove(&key);
        self.merged.insert(key, sum);
        sum
    }

    /// The schema that a reference within the document names.
    fn target(&self, reference: &str) -> Option<&'a Value> {
        match reference.strip_prefix('#')? {
            "" | "/" => Some(self.root),
            pointer => self.root.pointer(pointer),
        }
    }
}

/// Whether the compiler merges parts of this schema with one another.
fn has_merging_parts(entries: &Map<String, Value>) -> bool {
    let mut parts = 0;
    let mut has_own = false;
    for (keyword, value) in entries {
        match keyword.as_str() {
            "allOf" => parts += value.as_array().map_or(0, Vec::len),
            "anyOf" | "oneOf" | "$ref" => parts += 1,
            // Merging a type or a constant with others makes nothing larger.
            "type" | "enum" | "const" | "required" | "title" | "description" | "default"
            | "examples" | "$defs" | "definitions" | "$schema" | "$id" | "$comment" => {}
            _ => has_own = true,
        }
    }
    parts + usize::from(has_own) > 1
}

/// Number of values in `value`, itself included.
fn nodes(value: &Value) -> u64 {
    match value {
        Value::Array(values) => 1 + values.iter().map(nodes).sum::<u64>(),
        Value::Object(entries) => 1 + entries.values().map(nodes).sum::<u64>(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_that_merge_nothing_weigh_what_they_have() {
        let shared = json!({
            "type": "object",
            "properties": {
                "a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/x"},
                "c": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]},
            },
            "$defs": {"x": {"type": "string", "enum": ["p", "q"], "description": "a choice"}},
        });
        assert!(weight(&shared) < 60, "{}", weight(&shared));
        let recursive = json!({"properties": {"next": {"$ref": "#"}}});
        assert!(weight(&recursive) < 10);
    }

    #[test]
    fn unions_multiply_what_stands_beside_them() {
        let options: Vec<Value> = (0..100).map(|_| json!({})).collect();
        let properties: Map<String, Value> = (0..100)
            .map(|name| (format!("p{name}"), json!(true)))
            .collect();
        let apart = json!({"items": {"anyOf": options}, "properties": properties});
        assert!(weight(&apart) < 1000);
        let beside = json!({"anyOf": options, "properties": properties});
        assert!(weight(&beside) >= 10_000);
    }

    #[test]
    fn references_that_double_are_followed() {
        let mut definitions = Map::new();
        for level in 0..40 {
            let next = json!({"$ref": format!("#/$defs/a{}", level + 1)});
            definitions.insert(format!("a{level}"), json!({"allOf": [next, next]}));
        }
        definitions.insert("a40".to_owned(), json!({"pattern": "a+"}));
        let schema = json!({"$ref": "#/$defs/a0", "$defs": definitions});
        assert!(weight(&schema) > 1 << 40);
    }
}
