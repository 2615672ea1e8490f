//! Under which conditions answers are compared.

use treespec_rpc::proto::verify::v1::{Constraint, SamplingParams, constraint::Kind};

/// An object whose answers are short at every temperature, with every kind of value.
const SCHEMA: &str = include_str!("person.schema.json");

/// How tokens are chosen, under a name.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Condition {
    pub(super) name: String,
    /// Without a seed.
    pub(super) sampling: SamplingParams,
    pub(super) constraint: Option<Constraint>,
}

impl Condition {
    /// Temperature and nothing else.
    pub(super) fn plain(temperature: f32) -> Self {
        Self {
            name: format!("T {temperature}"),
            sampling: SamplingParams {
                temperature: Some(temperature),
                ..SamplingParams::default()
            },
            constraint: None,
        }
    }

    fn with(temperature: f32, what: &str, edit: impl FnOnce(&mut Self)) -> Self {
        let mut condition = Self::plain(temperature);
        condition.name = format!("{} {what}", condition.name);
        edit(&mut condition);
        condition
    }

    /// Whether the ranking of drafts makes a difference.
    pub(super) fn draws(&self) -> bool {
        self.sampling.temperature() > 0.0
    }
}

/// Every temperature alone, and each with filters, penalties and a JSON schema.
pub(super) fn all(temperatures: &[f32]) -> Vec<Condition> {
    let mut all: Vec<Condition> = temperatures.iter().copied().map(Condition::plain).collect();
    for &temperature in temperatures {
        if temperature > 0.0 {
            all.push(Condition::with(temperature, "top-p 0.9", |c| {
                c.sampling.top_p = Some(0.9);
            }));
            all.push(Condition::with(temperature, "min-p 0.05", |c| {
                c.sampling.min_p = Some(0.05);
            }));
        }
        all.push(Condition::with(temperature, "penalties", |c| {
            c.sampling.repetition_penalty = Some(1.15);
            c.sampling.presence_penalty = Some(0.4);
            c.sampling.frequency_penalty = Some(0.3);
        }));
        all.push(Condition::with(temperature, "JSON schema", |c| {
            c.constraint = Some(Constraint {
                kind: Some(Kind::JsonSchema(SCHEMA.to_owned())),
            });
        }));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_temperature_meets_every_rule() {
        let names: Vec<String> = all(&[0.0, 0.7]).into_iter().map(|c| c.name).collect();
        assert_eq!(
            names,
            [
                "T 0",
                "T 0.7",
                "T 0 penalties",
                "T 0 JSON schema",
                "T 0.7 top-p 0.9",
                "T 0.7 min-p 0.05",
                "T 0.7 penalties",
                "T 0.7 JSON schema",
            ]
        );
        assert!(serde_json::from_str::<serde_json::Value>(SCHEMA).is_ok());
    }
}
