//! Python for chat templates: methods of strings and dicts, and the functions Hugging Face adds.

use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value,
    value::{Kwargs, Serde, ValueKind},
};
use serde::Serialize;

use super::date;

/// The variable that carries the time to `strftime_now`.
pub(super) const UNIX_TIME: &str = "unix_time";

/// Words of a template that refuses a conversation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refusal(pub(super) String);

pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(write_value);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment.add_filter("fromjson", from_json);
    environment.add_function("fromjson", from_json);
}

/// The engine writes values as Python does, except very large and very small floats.
fn write_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let float = (value.kind() == ValueKind::Number && !value.is_integer())
        .then(|| f64::try_from(value.clone()).ok())
        .flatten()
        .filter(|float| *float != 0.0 && !(1e-4..1e16).contains(&float.abs()) && float.is_finite());
    let Some(float) = float else {
        return minijinja::escape_formatter(out, state, value);
    };
    let shortest = format!("{float:e}");
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    write!(out, "{digits}e{sign}{exponent:0>2}").map_err(Error::from)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
}

fn strftime_now(state: &mut State, format: &str) -> Result<String, Error> {
    let unix_time = state
        .lookup(UNIX_TIME)
        .and_then(|time| i64::try_from(time).ok())
        .ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidOperation,
                "the template asks for the date, but none was given",
            )
        })?;
    Ok(date::strftime(unix_time, format))
}

fn from_json(text: &str) -> Result<Value, Error> {
    serde_json::from_str::<serde_json::Value>(text)
        .map(|value| Value::from(Serde(value)))
        .map_err(|error| {
            Error::new(ErrorKind::InvalidOperation, "fromjson: not valid JSON").with_source(error)
        })
}

/// As Python's `json.dumps` writes it. Unlike the engine's own filter this does not escape `<` and `>` for HTML.
#[expect(
    clippy::needless_pass_by_value,
    reason = "template filters take their options by value"
)]
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::InvalidOperation, "tojson failed").with_source(error)
    };
    let indent: Option<usize> = options.get("indent")?;
    // Accepted because templates pass them; keys keep their order and text stays as it is.
    let _: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let mut json = Vec::new();
    match indent {
        // More than anyone indents by, and little enough that a template cannot ask for gigabytes of it.
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(
                &mut json, formatter,
            ))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(
            &mut json, Spaced,
        )),
    }
    .map_err(failed)?;
    Ok(String::from_utf8_lossy(&json).into_owned())
}

/// `{"a": 1, "b": [2, 3]}`
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
