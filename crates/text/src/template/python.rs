//! Python for chat templates: methods of strings and dicts, and the functions Hugging Face adds.
//!
//! Replaces the engine's own where they differ from Python's in what they take for white space or in how they order keys.

use std::borrow::Cow;

use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, Value, filters,
    value::{Kwargs, ValueKind},
};
use serde::Serialize;

use super::{
    date,
    integers::{self, Written},
    meter,
};

/// The variable that carries the time to `strftime_now`.
pub(super) const UNIX_TIME: &str = "unix_time";

/// The variable that carries the two characters that stand for `<` and `>`, where there are such.
pub(super) const GUARD: &str = "guard_characters";

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

/// Characters that Python strips: also the four separators of ASCII, which Unicode does not count as white space.
fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// Python's `strip`, as a filter.
#[expect(
    clippy::needless_pass_by_value,
    reason = "template filters take text by value where any value may stand for one"
)]
pub(super) fn trim(text: Cow<'_, str>, characters: Option<Cow<'_, str>>) -> String {
    let stripped = match characters {
        Some(characters) => text.trim_matches(|c| characters.contains(c)),
        None => text.trim_matches(is_space),
    };
    stripped.to_owned()
}

/// Result of a method that strips white space; `None` for other methods.
pub(super) fn stripped(value: &Value, method: &str, args: &[Value]) -> Option<Value> {
    let text = value.as_str().filter(|_| args.is_empty())?;
    let stripped = match method {
        "strip" => text.trim_matches(is_space),
        "lstrip" => text.trim_start_matches(is_space),
        "rstrip" => text.trim_end_matches(is_space),
        _ => return None,
    };
    Some(stripped.into())
}

/// Pairs of a mapping, ordered by their keys as Python orders them: all letters folded, `<` and `>` in their own places.
pub(super) fn dict_sort(state: &mut State, map: &Value, options: Kwargs) -> Result<Value, Error> {
    let by_value = options.get::<Option<&str>>("by")? == Some("value");
    let keys = if map.kind() == ValueKind::Map && !by_value {
        map.try_iter()?.collect::<Vec<_>>()
    } else {
        Vec::new()
    };
    if keys.is_empty() || keys.iter().any(|key| key.as_str().is_none()) {
        return filters::dictsort(map, options);
    }
    let folds = !options
        .get::<Option<bool>>("case_sensitive")?
        .unwrap_or(false);
    let reverse = options.get::<Option<bool>>("reverse")?.unwrap_or(false);
    options.assert_all_used()?;
    let guard = state.lookup(GUARD);
    let mut guard = guard.as_ref().and_then(Value::as_str).unwrap_or("").chars();
    let (open, close) = (guard.next(), guard.next());
    let written = |key: &Value| -> String {
        let own = |c| match Some(c) {
            c if c == open => '<',
            c if c == close => '>',
            _ => c,
        };
        let text: String = key.as_str().unwrap_or_default().chars().map(own).collect();
        if folds { text.to_lowercase() } else { text }
    };
    let mut pairs: Vec<_> = keys.into_iter().map(|key| (written(&key), key)).collect();
    // Stable both ways, as Python's is: keys that are equal when folded stay in their order.
    pairs.sort_by(|(a, _), (b, _)| if reverse { b.cmp(a) } else { a.cmp(b) });
    let pair = |(_, key): (String, Value)| -> Result<Value, Error> {
        let value = map.get_item(&key)?;
        Ok(Value::from(vec![key, value]))
    };
    pairs.into_iter().map(pair).collect()
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
    integers::from_json(text).map_err(|error| {
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
    let value = Written(value.clone());
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
