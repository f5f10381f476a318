//! Bounds on a conversation and on what rendering it may cost.
//!
//! A template comes with the model file and is a program: it can loop, and it can double a string forty times. What it
//! may spend grows in proportion to the conversation, never faster, so that a long chat is not taken for an attack and
//! a short one cannot be made into a long bill.

use serde_json::Value;

use crate::{Message, TextError, Tool, chat::Json};

/// Most messages of a conversation.
pub const MAX_MESSAGES: usize = 10_000;

/// Most bytes of text in a conversation and its tools together, field names included.
pub const MAX_INPUT_BYTES: usize = 16 << 20;

/// Bounds for one rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateLimits {
    /// Instructions of the compiled template.
    pub steps: u64,
    /// Bytes that all values made on the way may take, counted as they are made and never given back.
    pub work_bytes: u64,
    /// Bytes of the prompt.
    pub output_bytes: usize,
}

impl TemplateLimits {
    /// The bounds for a conversation, or an error where it is itself out of range.
    pub fn for_conversation(
        messages: &[Message],
        tools: &[Tool],
    ) -> Result<TemplateLimits, TextError> {
        if messages.len() > MAX_MESSAGES {
            return Err(TextError::TooManyMessages {
                found: messages.len(),
            });
        }
        let bytes = conversation_bytes(messages, tools);
        if bytes > MAX_INPUT_BYTES {
            return Err(TextError::ConversationTooLarge { bytes });
        }
        Ok(TemplateLimits::for_input(
            messages.len() + tools.len(),
            bytes,
        ))
    }

    /// The hungriest published template looks at every pair of messages, twice, and must be able to render the longest
    /// conversation. Arguments of tools are the dearest text: five steps and sixty bytes of work per byte.
    fn for_input(messages: usize, bytes: usize) -> TemplateLimits {
        let (messages, bytes) = (messages as u64, bytes as u64);
        TemplateLimits {
            steps: 4_000_000 + 96_000 * messages + 16 * bytes,
            work_bytes: (64 << 20) + 4_096 * messages + 64 * bytes,
            output_bytes: (1 << 20) + 4 * (1024 * messages + bytes) as usize,
        }
    }
}

/// Bytes of text in a conversation and its tools, with something for each value that is no text.
pub fn conversation_bytes(messages: &[Message], tools: &[Tool]) -> usize {
    let messages = messages.iter().map(|message| {
        let calls = message.tool_calls.iter().map(|call| {
            optional_bytes(call.id.as_ref()) + call.name.len() + json_bytes(&call.arguments)
        });
        let responses = message.tool_responses.iter();
        let responses =
            responses.map(|r| optional_bytes(r.name.as_ref()) + exact_bytes(&r.response));
        message.content.len()
            + message.thinking.len()
            + optional_bytes(message.tool_call_id.as_ref())
            + optional_bytes(message.name.as_ref())
            + calls.sum::<usize>()
            + responses.sum::<usize>()
    });
    let tools = tools.iter().map(|tool| {
        let schemas = exact_bytes(&tool.parameters) + exact_bytes(&tool.response);
        tool.name.len() + tool.description.len() + schemas
    });
    messages.sum::<usize>() + tools.sum::<usize>()
}

fn optional_bytes(text: Option<&String>) -> usize {
    text.map_or(0, String::len)
}

/// The same where integers have digits that the value has not.
fn exact_bytes(json: &Json) -> usize {
    json_bytes(json.value()) + json.text().map_or(0, str::len)
}

fn json_bytes(value: &Value) -> usize {
    /// Of a number, or the braces around and the comma after a value.
    const OTHER: usize = 8;
    OTHER
        + match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(json_bytes).sum(),
            Value::Object(entries) => entries
                .iter()
                .map(|(key, value)| key.len() + json_bytes(value))
                .sum(),
        }
}
