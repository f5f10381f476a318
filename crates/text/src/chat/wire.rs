//! Reads messages, tools and calls as clients write them, and says what is wrong with those that are none.
//!
//! Read by hand, since what a derived reader says of a form with several shapes names types of this program and not what was
//! expected.

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, value::RawValue};

use super::{
    Message, Role, Tool, ToolCall, ToolResponse,
    exact::{self, Json},
};

/// A message with every name that its fields go by.
#[derive(Deserialize)]
#[serde(expecting = "a message, which is an object with `role` and `content`")]
pub(super) struct MessageForm {
    role: Role,
    #[serde(default)]
    content: Value,
    #[serde(default)]
    thinking: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    tool_calls: Vec<ToolCall>,
    #[serde(default, deserialize_with = "null_as_default")]
    tool_responses: Vec<ToolResponse>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
}

impl TryFrom<MessageForm> for Message {
    type Error = String;

    fn try_from(form: MessageForm) -> Result<Message, String> {
        // Clients that know several names send the same text under each, or null under all but one.
        let thinking = [form.thinking, form.reasoning, form.reasoning_content]
            .into_iter()
            .flatten()
            .find(|text| !text.is_empty());
        Ok(Message {
            thinking: thinking.unwrap_or_default(),
            tool_calls: form.tool_calls,
            tool_responses: form.tool_responses,
            tool_call_id: form.tool_call_id,
            name: form.name,
            ..Message::of_parts(form.role, content_parts(form.content)?)
        })
    }
}

/// Content as plain text, or as the list of parts some clients write.
fn content_parts(content: Value) -> Result<Vec<String>, String> {
    let parts = match content {
        Value::Null => return Ok(Vec::new()),
        Value::String(text) => return Ok(vec![text]),
        Value::Array(parts) => parts,
        other => {
            return Err(format!(
                "`content` is {}; a text is expected, or a list of parts such as {{\"type\": \"text\", \"text\": \"...\"}}",
                kind(&other)
            ));
        }
    };
    parts.into_iter().map(part_text).collect()
}

fn part_text(part: Value) -> Result<String, String> {
    let Value::Object(mut part) = part else {
        return Err(format!(
            "a part of `content` is {}; an object such as {{\"type\": \"text\", \"text\": \"...\"}} is expected",
            kind(&part)
        ));
    };
    match part.get("type").and_then(Value::as_str) {
        Some("text") => {}
        Some(other) => {
            return Err(format!(
                "content of type `{other}` is not supported; only text is"
            ));
        }
        None => {
            return Err("a part of `content` has no `type`; \"text\" is expected".to_owned());
        }
    }
    match part.remove("text") {
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) => Ok(String::new()),
        Some(other) => Err(format!(
            "`text` of a part of `content` is {}; a text is expected",
            kind(&other)
        )),
    }
}

impl TryFrom<Value> for Tool {
    type Error = String;

    /// The tool that a value without lost digits describes.
    fn try_from(value: Value) -> Result<Tool, String> {
        let mut function = unwrapped(value, "a tool", "`name`, `description` and `parameters`")?;
        let name = required_text(&mut function, "name", "a tool")?;
        let description = match function.remove("description") {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text,
            Some(other) => {
                return Err(format!(
                    "`description` of the tool `{name}` is {}; a text is expected",
                    kind(&other)
                ));
            }
        };
        let mut schema = |key: &str| -> Result<Value, String> {
            let schema = function.remove(key).unwrap_or_default();
            match &schema {
                Value::Null | Value::Bool(_) => {}
                Value::Object(_) => check_schema(&schema)
                    .map_err(|problem| format!("`{key}` of the tool `{name}`: {problem}"))?,
                other => {
                    return Err(format!(
                        "`{key}` of the tool `{name}` is {}; a JSON schema is expected, which is an object",
                        kind(other)
                    ));
                }
            }
            Ok(schema)
        };
        Ok(Tool {
            parameters: schema("parameters")?.into(),
            response: schema("response")?.into(),
            name,
            description,
        })
    }
}

impl TryFrom<Json> for Tool {
    type Error = String;

    fn try_from(json: Json) -> Result<Tool, String> {
        Tool::try_from(&json)
    }
}

/// The schemas of a tool as they are written, wrapped or bare.
#[derive(Deserialize)]
struct SchemasForm<'a> {
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<&'a RawValue>,
    #[serde(borrow)]
    function: Option<Box<SchemasForm<'a>>>,
}

impl TryFrom<&Json> for Tool {
    type Error = String;

    fn try_from(json: &Json) -> Result<Tool, String> {
        let mut tool = Tool::try_from(json.value().clone())?;
        let Some(text) = json.text() else {
            return Ok(tool);
        };
        // The schemas once more, with their digits.
        let said = |error: serde_json::Error| error.to_string();
        let form: SchemasForm<'_> = serde_json::from_str(text).map_err(said)?;
        let (parameters, response) = match form.function {
            Some(function) => (function.parameters, function.response),
            None => (form.parameters, form.response),
        };
        for (schema, raw) in [
            (&mut tool.parameters, parameters),
            (&mut tool.response, response),
        ] {
            if let Some(raw) = raw {
                *schema = Json::try_from(raw).map_err(said)?;
            }
        }
        Ok(tool)
    }
}

/// Checks the parts that templates go through without asking what they are.
fn check_schema(schema: &Value) -> Result<(), String> {
    let Value::Object(schema) = schema else {
        return Ok(());
    };
    match schema.get("required") {
        // Some write true or false into a property, where another draft of the standard had it.
        None | Some(Value::Null | Value::Bool(_)) => {}
        Some(Value::Array(names)) if names.iter().all(Value::is_string) => {}
        Some(Value::Array(_)) => {
            return Err("`required` holds more than names; a list of texts is expected".to_owned());
        }
        Some(other) => {
            return Err(format!(
                "`required` is {}; a list of names is expected, such as [\"city\"]",
                kind(other)
            ));
        }
    }
    match schema.get("properties") {
        None | Some(Value::Null) => {}
        Some(Value::Object(properties)) => {
            for (name, property) in properties {
                check_schema(property).map_err(|problem| format!("in `{name}`, {problem}"))?;
            }
        }
        Some(other) => {
            return Err(format!(
                "`properties` is {}; an object of schemas by name is expected",
                kind(other)
            ));
        }
    }
    schema.get("items").map_or(Ok(()), check_schema)
}

/// The arguments of a call as they are written, wrapped or bare.
#[derive(Deserialize)]
struct ArgumentsForm<'a> {
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    function: Option<Box<ArgumentsForm<'a>>>,
}

impl TryFrom<Box<RawValue>> for ToolCall {
    type Error = String;

    fn try_from(raw: Box<RawValue>) -> Result<ToolCall, String> {
        let json = raw.get();
        let said = |error: serde_json::Error| error.to_string();
        if !exact::holds_large(json) {
            return serde_json::from_str::<Value>(json)
                .map_err(said)?
                .try_into();
        }
        // Large integers as strings: the rest is read, and what is wrong with it said, as always.
        let value: Value = serde_json::from_str(&exact::marked(json, "")).map_err(said)?;
        let mut call = ToolCall::try_from(value)?;
        let form: ArgumentsForm<'_> = serde_json::from_str(json).map_err(said)?;
        let arguments = match form.function {
            Some(function) => function.arguments,
            None => form.arguments,
        };
        if let Some(arguments) = arguments {
            call.arguments = exact::from_text(arguments.get()).map_err(said)?;
        }
        Ok(call)
    }
}

impl TryFrom<Value> for ToolCall {
    type Error = String;

    fn try_from(value: Value) -> Result<ToolCall, String> {
        let id = match value.get("id") {
            None | Some(Value::Null) => None,
            Some(Value::String(id)) => Some(id.clone()),
            Some(other) => {
                return Err(format!(
                    "`id` of a tool call is {}; a text is expected",
                    kind(other)
                ));
            }
        };
        let mut function = unwrapped(value, "a tool call", "`name` and `arguments`")?;
        Ok(ToolCall {
            id,
            name: required_text(&mut function, "name", "a tool call")?,
            arguments: function.remove("arguments").unwrap_or_default(),
        })
    }
}

/// The object itself, or the one under `function`.
fn unwrapped(value: Value, what: &str, fields: &str) -> Result<Map<String, Value>, String> {
    let expected = |found: &Value| {
        Err(format!(
            "{what} is {}; an object with {fields} is expected, or one with that under `function`",
            kind(found)
        ))
    };
    match value {
        Value::Object(mut object) => match object.remove("function") {
            Some(Value::Object(function)) => Ok(function),
            Some(other) => expected(&other),
            None => Ok(object),
        },
        other => expected(&other),
    }
}

fn required_text(object: &mut Map<String, Value>, key: &str, what: &str) -> Result<String, String> {
    match object.remove(key) {
        Some(Value::String(text)) => Ok(text),
        None => Err(format!("{what} has no `{key}`; a text is expected")),
        Some(other) => Err(format!(
            "`{key}` of {what} is {}; a text is expected",
            kind(&other)
        )),
    }
}

/// Words for what a value is.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Clients write `null` where they mean "nothing".
fn null_as_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de> + Default,
    D: Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
