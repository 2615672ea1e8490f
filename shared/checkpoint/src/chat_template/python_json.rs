//! JSON in the spelling of Python's `json.dumps(value, ensure_ascii=False)`: `", "` and `": "` as separators.

use std::io;

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// `value` on one line, or with `indent` spaces a level.
pub(super) fn to_string(
    value: &impl Serialize,
    indent: Option<usize>,
) -> Result<String, serde_json::Error> {
    let mut text = Vec::new();
    match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut text, OneLine))?,
        Some(width) => {
            let spaces = " ".repeat(width.min(16));
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut text, formatter))?;
        }
    }
    String::from_utf8(text).map_err(serde::ser::Error::custom)
}

struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        separate(writer, first)
    }

    fn begin_object_key<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        separate(writer, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

fn separate<W: io::Write + ?Sized>(writer: &mut W, first: bool) -> io::Result<()> {
    if first {
        Ok(())
    } else {
        writer.write_all(b", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelled_like_python() {
        let value = serde_json::json!({"a": [1, "é<b>"], "c": {}, "d": null});
        assert_eq!(
            to_string(&value, None).unwrap(),
            r#"{"a": [1, "é<b>"], "c": {}, "d": null}"#
        );
        assert_eq!(
            to_string(&serde_json::json!([1]), Some(2)).unwrap(),
            "[\n  1\n]"
        );
    }
}
