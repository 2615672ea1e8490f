//! A template engine that behaves like the one in transformers.

use std::error::Error as _;

use jiff::Timestamp;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter};

use super::python_json;

/// Steps after which rendering is given up: a template comes from a downloaded file and must not hang a service.
const MAX_STEPS: u64 = 20_000_000;

/// An environment with transformers' options, functions and filters.
/// Source: transformers `utils/chat_template_utils.py`, `_compile_jinja_template`.
pub(super) fn hugging_face() -> Environment<'static> {
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .expect("the default delimiters are valid");
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(print_like_python);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment
}

/// The message of `raise_exception`, when that is why rendering failed.
pub(super) fn raised_message(error: &Error) -> Option<String> {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return Some(message.clone());
        }
        source = inner.source();
    }
    None
}

/// Marks an error as the template's own decision.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, message.clone());
    Err(error.with_source(Raised(message)))
}

/// The time of rendering in UTC, so that a prompt does not depend on the machine's time zone.
fn strftime_now(format: String) -> Result<String, Error> {
    jiff::fmt::strtime::format(&format, Timestamp::now()).map_err(|error| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now({format:?}): {error}"),
        )
    })
}

fn to_json(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    // The only value in use is transformers' default.
    let _ensure_ascii: Option<bool> = arguments.get("ensure_ascii")?;
    arguments.assert_all_used()?;
    let json = python_json::to_string(value, indent)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}")))?;
    Ok(Value::from_safe_string(json))
}

/// `True`, `False` and `None` instead of `true`, `false` and `none`.
fn print_like_python(
    output: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    let text = match bool::try_from(value.clone()) {
        Ok(true) if value.kind() == ValueKind::Bool => "True",
        Ok(false) if value.kind() == ValueKind::Bool => "False",
        _ if value.is_none() => "None",
        _ => return escape_formatter(output, state, value),
    };
    output.write_str(text).map_err(Error::from)
}
