//! Integers beyond 64 bits in a context: strings with a mark there ([`exact`](crate::chat::exact)), integers to the template.

use std::{fmt, sync::Arc};

use minijinja::value::{Object, ObjectRepr};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

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

/// An integer that the engine of templates has no number for. It can be written, which is all that templates do with arguments; as
/// JSON it is a string.
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
