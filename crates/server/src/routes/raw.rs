//! Arguments of calls that an answer holds as an object, with every digit of their integers.
//!
//! A [`Value`] has no integers beyond 64 bits, so an answer that is made of values has the text of such arguments in their place, and
//! here that text becomes part of the JSON. Arguments are an object otherwise, so a string there is nothing else.

use carat_text::ToolCall;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, value::RawValue};

/// The arguments of a call as an object, or as text that [`WithRaw`] puts in.
pub(super) fn arguments(call: &ToolCall) -> Value {
    if call.holds_large_integers() {
        call.arguments_json().into()
    } else {
        call.parsed_arguments()
    }
}

/// An answer whose entries under `key` are arguments.
pub(super) struct WithRaw<'a> {
    pub(super) value: &'a Value,
    pub(super) key: &'static str,
}

impl Serialize for WithRaw<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let key = self.key;
        match self.value {
            Value::Array(items) => {
                serializer.collect_seq(items.iter().map(|value| WithRaw { value, key }))
            }
            Value::Object(map) => entries(map, key, serializer),
            other => other.serialize(serializer),
        }
    }
}

fn entries<S: Serializer>(
    map: &Map<String, Value>,
    key: &'static str,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let entries = map.iter().map(|(name, value)| {
        let value = if name == key {
            Entry::Arguments(value)
        } else {
            Entry::Other(WithRaw { value, key })
        };
        (name, value)
    });
    serializer.collect_map(entries)
}

enum Entry<'a> {
    /// Nothing in them is looked at: keys there are anybody's.
    Arguments(&'a Value),
    Other(WithRaw<'a>),
}

impl Serialize for Entry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Entry::Arguments(Value::String(text)) => {
                match RawValue::from_string(text.clone()) {
                    Ok(raw) => raw.serialize(serializer),
                    // No JSON after all.
                    Err(_) => text.serialize(serializer),
                }
            }
            Entry::Arguments(value) => value.serialize(serializer),
            Entry::Other(value) => value.serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_of_arguments_becomes_part_of_the_answer() {
        let call = |arguments: Value| ToolCall {
            id: None,
            name: "f".to_owned(),
            arguments,
        };
        let large = r#"{"n":12345678901234567890123,"input":"{}"}"#;
        let answer = json!({
            "text": large,
            "content": [
                {"name": "f", "input": arguments(&call(large.into()))},
                {"name": "f", "input": arguments(&call(json!({"input": "{}"})))},
            ],
        });
        let value = WithRaw {
            value: &answer,
            key: "input",
        };
        assert_eq!(
            serde_json::to_string(&value).unwrap(),
            format!(
                r#"{{"text":{},"content":[{{"name":"f","input":{large}}},{{"name":"f","input":{{"input":"{{}}"}}}}]}}"#,
                Value::from(large)
            )
        );
    }
}
