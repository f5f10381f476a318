//! Python for chat templates: methods of strings and dicts, and the functions Hugging Face adds.

use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, Value,
    value::{Kwargs, Serde, ValueKind},
};
use serde::Serialize;

use super::{date, meter};

/// The variable that carries the time to `strftime_now`.
pub(super) const UNIX_TIME: &str = "unix_time";

/// Words of a template that refuses a conversation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refusal(pub(super) String);

pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_formatter(write_value);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment.add_filter("fromjson", from_json);
    environment.add_function("fromjson", from_json);
}

/// The engine writes values as Python does, except very large and very small floats. All that a template writes comes
/// through here, into the prompt or into a value.
fn write_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let is_escaped = *state.auto_escape() != AutoEscape::None;
    let meter = meter::meter(state)?;
    let bytes = meter.printed(value)?;
    meter.spend(if is_escaped {
        bytes.saturating_mul(6)
    } else {
        bytes
    })?;
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
    // The longest name of a field takes nine bytes for two.
    meter::meter(state)?.spend(8 * format.len() as u64)?;
    Ok(date::strftime(unix_time, format))
}

fn from_json(state: &mut State, text: &str) -> Result<Value, Error> {
    // `[[[` is three lists, once as JSON and once as values.
    meter::meter(state)?.spend(64 * text.len() as u64)?;
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
fn to_json(state: &mut State, value: &Value, options: Kwargs) -> Result<String, Error> {
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::InvalidOperation, "tojson failed").with_source(error)
    };
    let indent: Option<usize> = options.get("indent")?;
    // Accepted because templates pass them; keys keep their order and text stays as it is.
    let _: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let meter = meter::meter(state)?;
    meter.read(value)?;
    let mut json = Bounded {
        written: Vec::new(),
        left: meter.left(),
    };
    let outcome = match indent {
        // More than anyone indents by.
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
    };
    match outcome {
        // The price of what did not fit is more than there is.
        Err(error) if error.is_io() => meter.spend(u64::MAX)?,
        outcome => outcome.map_err(failed)?,
    }
    meter.spend(json.written.len() as u64)?;
    Ok(String::from_utf8_lossy(&json.written).into_owned())
}

/// Bytes up to a limit; an error past it.
struct Bounded {
    written: Vec<u8>,
    left: u64,
}

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.left = self
            .left
            .checked_sub(bytes.len() as u64)
            .ok_or(std::io::ErrorKind::StorageFull)?;
        self.written.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
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
