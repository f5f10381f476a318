//! Integers beyond 64 bits in a context and in JSON that a template reads: strings with a mark there
//! ([`exact`](crate::chat::exact)), integers to the template, and integers again in JSON that it writes.

use std::{fmt, sync::Arc};

use minijinja::{
    Environment, tests,
    value::{Object, ObjectRepr, Serde, ValueKind},
};
use serde::{Serialize, Serializer, ser::Error};
use serde_json::{Map, Value, value::RawValue};

use crate::chat::Json;

/// Teaches the tests of numbers that integers have no end.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    let is_large = |value: &minijinja::Value| value.downcast_object_ref::<Digits>().is_some();
    environment.add_test("number", move |value: minijinja::Value| {
        tests::is_number(&value) || is_large(&value)
    });
    environment.add_test("integer", move |value: minijinja::Value| {
        tests::is_integer(&value) || is_large(&value)
    });
}

/// A value of a template from JSON.
pub(super) fn from_json(text: &str) -> Result<minijinja::Value, serde_json::Error> {
    let json: Json = serde_json::from_str(text)?;
    Ok(match json.mark() {
        None => minijinja::Value::from(Serde(json.value())),
        Some(mark) => minijinja::Value::from(Serde(Part {
            value: &json.marked(Some(mark)),
            mark,
        })),
    })
}

/// A value of a template as JSON, for serde_json's own writers.
pub(super) struct Written(pub(super) minijinja::Value);

impl Serialize for Written {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(object) = self.0.as_object() else {
            if self.0.kind() == ValueKind::Invalid {
                return Err(S::Error::custom(&self.0));
            }
            return self.0.serialize(serializer);
        };
        match object.repr() {
            ObjectRepr::Map => {
                let pairs = object.try_iter_pairs().into_iter().flatten();
                serializer.collect_map(pairs.map(|(key, value)| (key, Written(value))))
            }
            ObjectRepr::Seq | ObjectRepr::Iterable => {
                let items = object.try_iter().into_iter().flatten();
                serializer.collect_seq(items.map(Written))
            }
            _ => match object.downcast_ref::<Digits>() {
                Some(Digits(digits)) => RawValue::from_string(digits.clone())
                    .map_err(S::Error::custom)?
                    .serialize(serializer),
                None => self.0.serialize(serializer),
            },
        }
    }
}

/// A context as the template is to see it.
pub(super) struct Unmarked<'a> {
    pub(super) context: &'a Map<String, Value>,
    pub(super) mark: Option<char>,
}

impl Serialize for Unmarked<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.mark {
            None => self.context.serialize(serializer),
            Some(mark) => entries(self.context, mark, serializer),
        }
    }
}

/// One value of such a context.
struct Part<'a> {
    value: &'a Value,
    mark: char,
}

impl Serialize for Part<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mark = self.mark;
        match self.value {
            Value::String(text) => match text.strip_prefix(mark) {
                Some(digits) => integer(digits, serializer),
                None => serializer.serialize_str(text),
            },
            Value::Array(items) => {
                serializer.collect_seq(items.iter().map(|value| Part { value, mark }))
            }
            Value::Object(map) => entries(map, mark, serializer),
            other => other.serialize(serializer),
        }
    }
}

fn entries<S: Serializer>(
    map: &Map<String, Value>,
    mark: char,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(map.iter().map(|(key, value)| (key, Part { value, mark })))
}

fn integer<S: Serializer>(digits: &str, serializer: S) -> Result<S::Ok, S::Error> {
    if let Ok(integer) = digits.parse::<i128>() {
        return serializer.serialize_i128(integer);
    }
    if let Ok(integer) = digits.parse::<u128>() {
        return serializer.serialize_u128(integer);
    }
    minijinja::Value::from_object(Digits(digits.to_owned())).serialize(serializer)
}

/// An integer that the engine of templates has no number for. It can be written and is a number to tests, which is all that templates
/// ask of arguments; they cannot compute with it.
#[derive(Debug)]
pub(super) struct Digits(String);

impl Digits {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Object for Digits {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
