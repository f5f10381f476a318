//! A conversation as plain values: messages, tools and tool calls.
//!
//! The shapes follow what chat clients send, so that saved conversations and tool files can be written by hand or taken
//! from a request log: tools and calls may stand in OpenAI's `{"type": "function", "function": {…}}` wrapping or bare.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// Speaker of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The operator, who sets the rules.
    System,
    /// The system role under another name.
    Developer,
    /// The person who asks.
    User,
    /// The model.
    #[serde(alias = "model")]
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name templates know the role by.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Speaker.
    pub role: Role,
    /// Text of the message; empty where a model only called tools.
    #[serde(default, deserialize_with = "content_text")]
    pub content: String,
    /// Thoughts of the model before it answered; empty where there are none.
    #[serde(
        default,
        alias = "reasoning_content",
        alias = "reasoning",
        deserialize_with = "null_as_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub thinking: String,
    /// Calls the model made, in its order.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub tool_calls: Vec<ToolCall>,
    /// For a tool's result: the call it answers. Without one, results answer the calls before them in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// For a tool's result: the tool, where the call does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of nothing but text.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
            thinking: String::new(),
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Rules of the operator.
    pub fn system(content: impl Into<String>) -> Message {
        Message::new(Role::System, content)
    }

    /// A question or request.
    pub fn user(content: impl Into<String>) -> Message {
        Message::new(Role::User, content)
    }

    /// An answer of the model.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message::new(Role::Assistant, content)
    }

    /// The result of a tool, for the earliest call that has none yet.
    pub fn tool_result(content: impl Into<String>) -> Message {
        Message::new(Role::Tool, content)
    }
}

/// A call the model made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "ToolCallForm")]
pub struct ToolCall {
    /// Name by which a result refers to this call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Tool that is called.
    pub name: String,
    /// An object by name, or the text of one, as OpenAI clients send it.
    pub arguments: Value,
}

impl ToolCall {
    /// The arguments as an object where they are one or spell one, else as they are.
    pub fn parsed_arguments(&self) -> Value {
        match &self.arguments {
            Value::Null => Value::Object(Map::new()),
            Value::String(text) if text.trim().is_empty() => Value::Object(Map::new()),
            Value::String(text) => match serde_json::from_str(text) {
                Ok(object @ Value::Object(_)) => object,
                _ => self.arguments.clone(),
            },
            other => other.clone(),
        }
    }
}

/// A function the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "ToolForm")]
pub struct Tool {
    /// Name the model calls it by.
    pub name: String,
    /// Purpose, in words for the model.
    pub description: String,
    /// A JSON schema of type object; null where the tool takes nothing.
    pub parameters: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ToolForm {
    Wrapped { function: Function },
    Bare(Function),
}

#[derive(Deserialize)]
struct Function {
    name: String,
    #[serde(default, deserialize_with = "null_as_default")]
    description: String,
    #[serde(default)]
    parameters: Value,
}

impl From<ToolForm> for Tool {
    fn from(form: ToolForm) -> Tool {
        let (ToolForm::Wrapped { function } | ToolForm::Bare(function)) = form;
        Tool {
            name: function.name,
            description: function.description,
            parameters: function.parameters,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ToolCallForm {
    Wrapped {
        #[serde(default)]
        id: Option<String>,
        function: CalledFunction,
    },
    Bare {
        #[serde(default)]
        id: Option<String>,
        #[serde(flatten)]
        function: CalledFunction,
    },
}

#[derive(Deserialize)]
struct CalledFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

impl From<ToolCallForm> for ToolCall {
    fn from(form: ToolCallForm) -> ToolCall {
        let (ToolCallForm::Wrapped { id, function } | ToolCallForm::Bare { id, function }) = form;
        ToolCall {
            id,
            name: function.name,
            arguments: function.arguments,
        }
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

/// Content as plain text, or as the list of parts some clients write, whose texts are joined.
fn content_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Content {
        Text(String),
        Parts(Vec<ContentPart>),
    }
    #[derive(Deserialize)]
    struct ContentPart {
        #[serde(rename = "type")]
        kind: String,
        #[serde(default)]
        text: String,
    }
    let parts = match Option::deserialize(deserializer)? {
        None => return Ok(String::new()),
        Some(Content::Text(text)) => return Ok(text),
        Some(Content::Parts(parts)) => parts,
    };
    if let Some(part) = parts.iter().find(|part| part.kind != "text") {
        let problem = format!(
            "content of type `{}` is not supported; only text is",
            part.kind
        );
        return Err(serde::de::Error::custom(problem));
    }
    Ok(parts.into_iter().map(|part| part.text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_saved_message_reads_back_the_same() {
        let mut message = Message::assistant("Sunny.");
        message.thinking = "Look it up.".to_owned();
        message.tool_calls = vec![ToolCall {
            id: Some("c1".to_owned()),
            name: "get_weather".to_owned(),
            arguments: json!({"city": "Paris"}),
        }];
        let saved = serde_json::to_string(&message).unwrap();
        assert_eq!(serde_json::from_str::<Message>(&saved).unwrap(), message);
    }

    #[test]
    fn plain_messages_are_saved_without_empty_fields() {
        let saved = serde_json::to_value(Message::user("Hi")).unwrap();
        assert_eq!(saved, json!({"role": "user", "content": "Hi"}));
    }

    #[test]
    fn messages_of_openai_clients_are_understood() {
        let message: Message = serde_json::from_value(json!({
            "role": "assistant", "content": null, "reasoning_content": "hm", "refusal": null,
            "tool_calls": [{"id": "c", "type": "function",
                            "function": {"name": "f", "arguments": "{\"a\": 1}"}}]
        }))
        .unwrap();
        assert_eq!(message.content, "");
        assert_eq!(message.thinking, "hm");
        assert_eq!(message.tool_calls[0].id.as_deref(), Some("c"));
        assert_eq!(message.tool_calls[0].parsed_arguments(), json!({"a": 1}));
    }

    #[test]
    fn tools_may_be_wrapped_or_bare() {
        let bare = json!({"name": "f", "description": "does f", "parameters": {"type": "object"}});
        let wrapped = json!({"type": "function", "function": bare.clone()});
        let read = |value| serde_json::from_value::<Tool>(value).unwrap();
        assert_eq!(read(bare), read(wrapped));
        assert_eq!(read(json!({"name": "g"})).parameters, Value::Null);
    }

    #[test]
    fn arguments_that_spell_no_object_stay_as_they_are() {
        let call = |arguments| ToolCall {
            id: None,
            name: "f".to_owned(),
            arguments,
        };
        assert_eq!(call(json!("{broken")).parsed_arguments(), json!("{broken"));
        assert_eq!(call(json!("")).parsed_arguments(), json!({}));
        assert_eq!(call(Value::Null).parsed_arguments(), json!({}));
        assert_eq!(call(json!({"a": []})).parsed_arguments(), json!({"a": []}));
    }

    #[test]
    fn content_may_come_in_parts_of_text() {
        let parts = json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        let message: Message = serde_json::from_value(parts).unwrap();
        assert_eq!(message.content, "ab");
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
        let error = serde_json::from_value::<Message>(image)
            .unwrap_err()
            .to_string();
        assert!(error.contains("`image_url` is not supported"), "{error}");
    }
}
