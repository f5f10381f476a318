//! A conversation as plain values: messages, tools and tool calls.
//!
//! The shapes follow what chat clients send, so that saved conversations and tool files can be written by hand or taken
//! from a request log: tools and calls may stand in OpenAI's `{"type": "function", "function": {…}}` wrapping or bare.

pub(crate) mod exact;
mod wire;

pub use exact::{Json, deserialize_arguments};

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, value::RawValue};

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
#[serde(try_from = "wire::MessageForm")]
pub struct Message {
    /// Speaker.
    pub role: Role,
    /// Text of the message; empty where a model only called tools.
    pub content: String,
    /// The pieces that `content` came in, where there were several. Templates trim them one by one. Whoever changes the content
    /// leaves this empty.
    #[serde(skip_serializing)]
    pub content_parts: Vec<String>,
    /// Thoughts of the model before it answered; empty where there are none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub thinking: String,
    /// Calls the model made, in its order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Results on the message that asked for them, as Gemma's own format has it; otherwise they are messages of their own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_responses: Vec<ToolResponse>,
    /// For a tool's result: the call it answers. Without one, results answer the calls before them in order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// For a tool's result: the tool, where the call does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// The result of a call, on the message that made it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(expecting = "an object with `name` and `response`")]
pub struct ToolResponse {
    /// Tool that was called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// An object, or anything else, which is then the result's one value.
    #[serde(default)]
    pub response: Json,
}

impl Message {
    /// A message of nothing but text.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
            content_parts: Vec::new(),
            thinking: String::new(),
            tool_calls: Vec::new(),
            tool_responses: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// A message whose text came in pieces.
    pub fn of_parts(role: Role, mut parts: Vec<String>) -> Message {
        let content = parts.concat();
        if parts.len() < 2 {
            parts.clear();
        }
        Message {
            content_parts: parts,
            ..Message::new(role, content)
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

    /// Whether a call or a result on this message holds an integer beyond 64 bits.
    pub(crate) fn holds_large_integers(&self) -> bool {
        let mut responses = self.tool_responses.iter();
        self.tool_calls.iter().any(ToolCall::holds_large_integers)
            || responses.any(|one| one.response.holds_large_integers())
    }
}

/// A call the model made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Box<RawValue>")]
pub struct ToolCall {
    /// Name by which a result refers to this call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Tool that is called.
    pub name: String,
    /// An object by name, or the text of one, as OpenAI clients send it. Always the text where it holds an integer beyond 64 bits, of
    /// which a value would keep no more than the first digits.
    pub arguments: Value,
}

impl ToolCall {
    /// The arguments as an object where they are one or spell one, else as they are. Integers beyond 64 bits are floats in it, and
    /// those beyond floats strings.
    pub fn parsed_arguments(&self) -> Value {
        let parsed = self.parsed(None);
        let parsed = parsed.or_else(|| self.parsed(Some("")));
        parsed.unwrap_or_else(|| self.arguments.clone())
    }

    /// The arguments as an object, if they are one or spell one; with a mark, large integers in their text become strings.
    fn parsed(&self, mark: Option<&str>) -> Option<Value> {
        match &self.arguments {
            Value::Null => Some(Value::Object(Map::new())),
            Value::String(text) if text.trim().is_empty() => Some(Value::Object(Map::new())),
            Value::String(text) => {
                let json = mark.map_or(Cow::Borrowed(text.as_str()), |m| exact::marked(text, m));
                serde_json::from_str(&json).ok().filter(Value::is_object)
            }
            other => Some(other.clone()),
        }
    }

    /// The arguments as JSON, with every digit of their integers.
    pub fn arguments_json(&self) -> String {
        match &self.arguments {
            Value::String(text) if self.holds_large_integers() => text.clone(),
            _ => self.parsed_arguments().to_string(),
        }
    }

    /// Whether the arguments are text for the sake of an integer beyond 64 bits.
    pub fn holds_large_integers(&self) -> bool {
        matches!(&self.arguments, Value::String(text) if exact::holds_large(text))
    }

    /// The arguments like [`ToolCall::parsed_arguments`], with marked strings for integers beyond 64 bits.
    pub(crate) fn marked_arguments(&self, mark: char) -> Value {
        let marked = self.parsed(Some(&mark.to_string()));
        marked.unwrap_or_else(|| self.arguments.clone())
    }
}

/// A function the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Json")]
pub struct Tool {
    /// Name the model calls it by.
    pub name: String,
    /// Purpose, in words for the model.
    pub description: String,
    /// A JSON schema of type object; null where the tool takes nothing.
    pub parameters: Json,
    /// A JSON schema of what it returns; null where nothing is said of that.
    #[serde(skip_serializing_if = "is_null")]
    pub response: Json,
}

fn is_null(json: &Json) -> bool {
    json.value().is_null()
}

impl Tool {
    /// A tool of which nothing is said about its results.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        parameters: impl Into<Json>,
    ) -> Tool {
        Tool {
            name: name.into(),
            description: description.into(),
            parameters: parameters.into(),
            response: Json::default(),
        }
    }

    /// Whether a schema of the tool holds an integer beyond 64 bits.
    pub(crate) fn holds_large_integers(&self) -> bool {
        self.parameters.holds_large_integers() || self.response.holds_large_integers()
    }
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
    fn thoughts_may_go_by_several_names_at_once() {
        for (reasoning, content) in [("\"hm\"", "\"hm\""), ("null", "\"hm\""), ("\"hm\"", "null")] {
            let text = format!(
                r#"{{"role": "assistant", "content": "x", "reasoning": {reasoning}, "reasoning_content": {content}}}"#
            );
            assert_eq!(
                serde_json::from_str::<Message>(&text).unwrap().thinking,
                "hm"
            );
        }
    }

    #[test]
    fn results_and_their_schemas_are_kept() {
        let message = json!({"role": "assistant", "content": "", "tool_responses": [{"name": "f", "response": {"t": 1}}]});
        let read: Message = serde_json::from_value(message.clone()).unwrap();
        assert_eq!(*read.tool_responses[0].response.value(), json!({"t": 1}));
        assert_eq!(serde_json::to_value(read).unwrap(), message);
        let tool = json!({"function": {"name": "f", "response": {"type": "object"}}});
        let read: Tool = serde_json::from_value(tool).unwrap();
        assert_eq!(*read.response.value(), json!({"type": "object"}));
    }

    #[test]
    fn numbers_keep_their_last_digit() {
        let text = r#"{"name": "f", "arguments": {"x": 2.9393722140683574}}"#;
        let call: ToolCall = serde_json::from_str(text).unwrap();
        assert_eq!(call.arguments.to_string(), r#"{"x":2.9393722140683574}"#);
    }

    #[test]
    fn integers_beyond_64_bits_keep_every_digit() {
        let arguments = r#"{"n": 12345678901234567890123, "s": "99999999999999999999"}"#;
        for text in [
            format!(r#"{{"name": "f", "arguments": {arguments}}}"#),
            format!(r#"{{"function": {{"name": "f", "arguments": {arguments}}}}}"#),
            format!(
                r#"{{"name": "f", "arguments": {}}}"#,
                Value::from(arguments)
            ),
        ] {
            let call: ToolCall = serde_json::from_str(&text).unwrap();
            assert_eq!(call.arguments_json(), arguments);
            let parsed = call.parsed_arguments();
            assert_eq!(parsed["n"], 12345678901234567890123_f64);
            assert_eq!(parsed["s"], "99999999999999999999");
            // As it is saved and read again.
            let saved = serde_json::to_string(&call).unwrap();
            assert_eq!(serde_json::from_str::<ToolCall>(&saved).unwrap(), call);
        }
        let digits = format!("1{}", "0".repeat(400));
        let text = format!(r#"{{"name": "f", "arguments": {{"n": {digits}}}}}"#);
        let call: ToolCall = serde_json::from_str(&text).unwrap();
        assert_eq!(call.parsed_arguments()["n"], digits);
    }

    #[test]
    fn schemas_and_results_keep_every_digit() {
        let schema = r#"{"properties":{"n":{"enum":[12345678901234567890123]}}}"#;
        for text in [
            format!(r#"{{"name":"f","description":"","parameters":{schema}}}"#),
            format!(r#"{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}"#),
        ] {
            let tool: Tool = serde_json::from_str(&text).unwrap();
            assert!(tool.holds_large_integers());
            let saved = serde_json::to_string(&tool).unwrap();
            assert!(saved.contains(schema), "{saved}");
            assert_eq!(serde_json::from_str::<Tool>(&saved).unwrap(), tool);
        }
        // What is wrong beside such an integer is said as always.
        let wrong = r#"{"name": "f", "parameters": {"minimum": 12345678901234567890123, "required": "ab"}}"#;
        let error = serde_json::from_str::<Tool>(wrong).unwrap_err().to_string();
        assert!(error.contains("`required` is a text"), "{error}");
        // A result that is text is not taken for the JSON that it spells.
        for response in [
            r#"{"n":12345678901234567890123}"#,
            r#""{\"n\":12345678901234567890123}""#,
        ] {
            let text = format!(
                r#"{{"role":"assistant","content":"","tool_responses":[{{"name":"f","response":{response}}}]}}"#
            );
            let message: Message = serde_json::from_str(&text).unwrap();
            assert_eq!(serde_json::to_string(&message).unwrap(), text);
            assert_eq!(message.holds_large_integers(), response.starts_with('{'));
        }
    }

    #[test]
    fn what_was_expected_is_said() {
        let said = |text: &str| {
            serde_json::from_str::<Message>(text)
                .unwrap_err()
                .to_string()
        };
        let content = said(r#"{"role": "tool", "content": {"t": 15}}"#);
        assert!(
            content.contains("`content` is an object; a text is expected"),
            "{content}"
        );
        let tool = |text: &str| serde_json::from_str::<Tool>(text).unwrap_err().to_string();
        let required = tool(r#"{"name": "f", "parameters": {"type": "object", "required": "ab"}}"#);
        assert!(
            required.contains("`required` is a text; a list of names"),
            "{required}"
        );
        let nested = tool(
            r#"{"name": "f", "parameters": {"properties": {"x": {"properties": {"y": {"required": 1}}}}}}"#,
        );
        assert!(
            nested.contains("in `x`, in `y`, `required` is a number"),
            "{nested}"
        );
        assert!(tool("{}").contains("no `name`"), "{}", tool("{}"));
        assert!(tool("3").contains("a tool is a number"), "{}", tool("3"));
    }

    #[test]
    fn tools_may_be_wrapped_or_bare() {
        let bare = json!({"name": "f", "description": "does f", "parameters": {"type": "object"}});
        let wrapped = json!({"type": "function", "function": bare.clone()});
        let read = |value| serde_json::from_value::<Tool>(value).unwrap();
        assert_eq!(read(bare), read(wrapped));
        assert_eq!(read(json!({"name": "g"})).parameters, Json::default());
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
        assert_eq!(message.content_parts, ["a", "b"]);
        let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
        let error = serde_json::from_value::<Message>(image)
            .unwrap_err()
            .to_string();
        assert!(error.contains("`image_url` is not supported"), "{error}");
    }
}
