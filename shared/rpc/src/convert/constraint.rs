use treespec_grammar::{GrammarError, GrammarKind, GrammarSource};

use crate::{
    ServiceError,
    proto::verify::v1::{Choices, Constraint, SamplingParams, constraint::Kind},
};

/// What else a request says about the ending and the tokens of an answer, as far as a constraint has a say in it.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConstraintCompany<'a> {
    /// End-of-sequence tokens do not end the answer.
    pub ignore_eos: bool,
    /// Least length of the answer.
    pub min_tokens: u32,
    /// How tokens are chosen.
    pub sampling: Option<&'a SamplingParams>,
}

/// What an answer must follow; `None` where it is free.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] for a constraint of no kind, and for company that could leave it no token.
pub fn constraint_from_proto(
    message: Option<&Constraint>,
    company: ConstraintCompany<'_>,
) -> Result<Option<GrammarSource>, ServiceError> {
    let Some(message) = message else {
        return Ok(None);
    };
    let source = match &message.kind {
        Some(Kind::JsonSchema(schema)) => GrammarSource::JsonSchema(schema.clone()),
        Some(Kind::Regex(regex)) => GrammarSource::Regex(regex.clone()),
        Some(Kind::Choices(Choices { options })) => GrammarSource::Choices(options.clone()),
        Some(Kind::Lark(grammar)) => GrammarSource::Lark(grammar.clone()),
        None => {
            return Err(ServiceError::invalid(
                "constraint.kind",
                "is missing: set json_schema, regex, choices or lark",
            ));
        }
    };
    company.check()?;
    Ok(Some(source))
}

impl ConstraintCompany<'_> {
    fn check(&self) -> Result<(), ServiceError> {
        let listed = |list: fn(&SamplingParams) -> &Vec<u32>| {
            self.sampling
                .is_some_and(|sampling| !list(sampling).is_empty())
        };
        let conflicts = [
            ("ignore_eos", self.ignore_eos),
            ("min_tokens", self.min_tokens > 0),
            (
                "sampling.allowed_token_ids",
                listed(|sampling| &sampling.allowed_token_ids),
            ),
            (
                "sampling.banned_token_ids",
                listed(|sampling| &sampling.banned_token_ids),
            ),
        ];
        match conflicts.iter().find(|(_, conflicts)| *conflicts) {
            None => Ok(()),
            Some((field, _)) => Err(ServiceError::invalid(
                *field,
                "conflicts with constraint, which decides what may come next and where the answer ends",
            )),
        }
    }
}

/// A constraint that cannot be compiled or followed, as its request is told.
pub fn constraint_error(kind: GrammarKind, error: &GrammarError) -> ServiceError {
    let field = match kind {
        GrammarKind::JsonSchema => "constraint.json_schema",
        GrammarKind::Regex => "constraint.regex",
        GrammarKind::Choices => "constraint.choices.options",
        GrammarKind::Lark => "constraint.lark",
    };
    match error {
        // Not the request's fault.
        GrammarError::NoEnd
        | GrammarError::EndOutsideVocabulary { .. }
        | GrammarError::VocabularyTooLarge { .. } => {
            ServiceError::precondition("constraint", error.to_string())
        }
        // Tokens come from the masks.
        GrammarError::Thread { .. }
        | GrammarError::Refused { .. }
        | GrammarError::Finished { .. } => ServiceError::internal(error.to_string()),
        error => ServiceError::invalid(field, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_and_none_is_refused() {
        let read =
            |kind| constraint_from_proto(Some(&Constraint { kind }), ConstraintCompany::default());
        assert_eq!(
            constraint_from_proto(None, ConstraintCompany::default()),
            Ok(None)
        );
        assert_eq!(
            read(Some(Kind::Regex("a+".into()))),
            Ok(Some(GrammarSource::Regex("a+".into())))
        );
        let options = vec!["yes".to_owned(), "no".to_owned()];
        assert_eq!(
            read(Some(Kind::Choices(Choices {
                options: options.clone()
            }))),
            Ok(Some(GrammarSource::Choices(options)))
        );
        let error = read(None).unwrap_err().to_string();
        assert!(error.contains("constraint.kind"), "{error}");
    }

    #[test]
    fn conflicting_company_is_named() {
        let banning = SamplingParams {
            banned_token_ids: vec![1],
            ..SamplingParams::default()
        };
        let cases = [
            (
                ConstraintCompany {
                    ignore_eos: true,
                    ..Default::default()
                },
                "ignore_eos",
            ),
            (
                ConstraintCompany {
                    min_tokens: 3,
                    ..Default::default()
                },
                "min_tokens",
            ),
            (
                ConstraintCompany {
                    sampling: Some(&banning),
                    ..Default::default()
                },
                "sampling.banned_token_ids",
            ),
        ];
        let constraint = Constraint {
            kind: Some(Kind::Regex("a+".into())),
        };
        for (company, expected) in cases {
            let error = constraint_from_proto(Some(&constraint), company).unwrap_err();
            assert!(
                matches!(&error, ServiceError::InvalidArgument { field, .. } if field == expected),
                "{error:?}"
            );
            assert_eq!(constraint_from_proto(None, company), Ok(None));
        }
    }
}
