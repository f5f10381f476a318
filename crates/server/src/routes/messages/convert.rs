//! From Anthropic's request to everybody's.

use carat_engine::chat::Conversation;
use carat_grammar::ToolChoice;
use carat_text::{Json, Message, Role, Tool, ToolCall, chat::deserialize_arguments};
use serde::{Deserialize, Deserializer, de::Error};
use serde_json::{Value, json, value::RawValue};

use super::super::{
    chat::ThinkingSwitch,
    wire::{self, Thought, shown},
};
use crate::{
    ask::{self, Ask, Prompt, SamplingAsk},
    error::ApiError,
    ids,
};

/// The body of both routes; counting needs no `max_tokens`.
#[derive(Debug, Deserialize)]
pub(super) struct MessagesRequest {
    #[serde(default)]
    pub(super) model: Option<String>,
    messages: Vec<WireMessage>,
    #[serde(default)]
    system: Value,
    #[serde(default)]
    pub(super) max_tokens: Option<i64>,
    #[serde(default)]
    pub(super) stream: Option<bool>,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_p: Option<f32>,
    #[serde(default)]
    top_k: Option<i64>,
    #[serde(default)]
    stop_sequences: Option<Vec<String>>,
    #[serde(default)]
    thinking: Option<ThinkingSwitch>,
    #[serde(default)]
    tools: Option<Vec<Json>>,
    #[serde(default)]
    tool_choice: Option<WireChoice>,
    #[serde(default)]
    output_config: Option<OutputConfig>,
    #[serde(default)]
    metadata: Option<Metadata>,
}

#[derive(Debug, Deserialize)]
struct WireMessage {
    role: String,
    #[serde(deserialize_with = "content")]
    content: Value,
}

/// A block, as far as its integers matter.
#[derive(Deserialize)]
struct WireInput {
    #[serde(default, deserialize_with = "deserialize_arguments")]
    input: Value,
}

/// Content with the text of an input in place of the input where that holds an integer beyond 64 bits.
fn content<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Value, D::Error> {
    let raw = Box::<RawValue>::deserialize(deserializer)?;
    let mut content: Value = serde_json::from_str(raw.get()).map_err(Error::custom)?;
    if let Value::Array(blocks) = &mut content
        && blocks.iter().any(|block| kind(block) == "tool_use")
        && let Ok(inputs) = serde_json::from_str::<Vec<WireInput>>(raw.get())
    {
        for (block, exact) in blocks.iter_mut().zip(inputs) {
            if exact.input.is_string() {
                block["input"] = exact.input;
            }
        }
    }
    Ok(content)
}

#[derive(Debug, Deserialize)]
struct WireTool {
    name: String,
    #[serde(default)]
    description: Option<String>,
    input_schema: Json,
}

#[derive(Debug, Deserialize)]
struct WireChoice {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct OutputConfig {
    #[serde(default)]
    format: Option<Value>,
    #[serde(default)]
    effort: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Metadata {
    #[serde(default)]
    user_id: Option<String>,
}

impl MessagesRequest {
    /// The request as every dialect's, and the tools that were left out.
    pub(super) fn ask(self) -> Result<(Ask, Vec<String>), ApiError> {
        let thought = self.thought()?;
        let (tools, ignored) = tools(self.tools.as_deref().unwrap_or_default())?;
        let tool_choice = tool_choice(self.tool_choice.as_ref(), &tools)?;
        let messages = messages(&self.system, &self.messages)?;
        // Anthropic's way to put words into the model's mouth.
        let continues = messages
            .last()
            .is_some_and(|m| m.role == Role::Assistant && m.tool_calls.is_empty());
        let conversation = Conversation {
            messages,
            tools,
            thinking: thought.on,
            unix_time: i64::try_from(ids::unix_time()).ok(),
            continues,
        };
        let format = self.output_config.as_ref().and_then(|c| c.format.as_ref());
        let parallel = self.tool_choice.as_ref();
        let ask = Ask {
            sampling: SamplingAsk {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                ..SamplingAsk::default()
            },
            max_tokens: max_tokens(self.max_tokens)?,
            stop: self.stop_sequences.unwrap_or_default(),
            format: wire::format(format, "output_config.format")?,
            tool_choice,
            parallel_calls: parallel.and_then(|c| c.disable_parallel_tool_use) != Some(true),
            thinking_budget: thought.budget,
            user: self.metadata.and_then(|m| m.user_id),
            ..Ask::new(Prompt::Chat(conversation))
        };
        Ok((ask, ignored))
    }

    fn thought(&self) -> Result<Thought, ApiError> {
        let Some(thinking) = &self.thinking else {
            return Ok(Thought::default());
        };
        match thinking.kind.as_deref() {
            Some("disabled") => Ok(Thought::default()),
            Some("enabled") => match thinking.budget_tokens {
                Some(tokens) => Ok(wire::budget(tokens)),
                None => Err(ApiError::invalid(
                    "thinking.budget_tokens",
                    "thinking of type enabled needs budget_tokens",
                )),
            },
            Some("adaptive") => {
                let config = self.output_config.as_ref();
                match config.and_then(|c| c.effort.as_deref()) {
                    Some(effort) => wire::effort(effort, "output_config.effort"),
                    None => Ok(Thought {
                        on: true,
                        budget: None,
                    }),
                }
            }
            other => Err(ApiError::invalid(
                "thinking.type",
                format!(
                    "`{}` is no way to think; use disabled, enabled or adaptive",
                    shown(other.unwrap_or(""))
                ),
            )),
        }
    }
}

/// No word for "as many as fit" here.
fn max_tokens(most: Option<i64>) -> Result<Option<usize>, ApiError> {
    ask::max_tokens("max_tokens", most.map(|most| most.max(0)))
}

fn messages(system: &Value, wire: &[WireMessage]) -> Result<Vec<Message>, ApiError> {
    ask::at_most("messages", wire.len(), ask::MAX_MESSAGES)?;
    let mut messages = Vec::with_capacity(wire.len() + 1);
    let system = wire::content(system, "system")?;
    if !system.is_empty() {
        messages.push(Message::system(system));
    }
    for (n, message) in wire.iter().enumerate() {
        let path = format!("messages[{n}]");
        let content = &message.content;
        match message.role.as_str() {
            "user" => user(content, &format!("{path}.content"), &mut messages)?,
            "assistant" => messages.push(assistant(content, &format!("{path}.content"))?),
            // Agents add instructions in the middle of a conversation.
            "system" => {
                let content = wire::content(content, &format!("{path}.content"))?;
                messages.push(Message::system(content));
            }
            other => {
                return Err(ApiError::invalid(
                    format!("{path}.role"),
                    format!(
                        "`{}` is no role; use user, assistant or system",
                        shown(other)
                    ),
                ));
            }
        }
    }
    Ok(messages)
}

/// A user's text, and the results of tools that it stands between.
fn user(content: &Value, path: &str, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let Value::Array(blocks) = content else {
        messages.push(Message::of_parts(Role::User, wire::parts(content, path)?));
        return Ok(());
    };
    let mut texts = Vec::new();
    let before = messages.len();
    for (n, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{n}]");
        if kind(block) != "tool_result" {
            texts.push(wire::part_text(block, &path)?.to_owned());
            continue;
        }
        if texts.iter().any(|text| !text.is_empty()) {
            messages.push(Message::of_parts(Role::User, std::mem::take(&mut texts)));
        }
        let id = string(block, "tool_use_id", &path)?;
        wire::called(messages, id, &format!("{path}.tool_use_id"))?;
        let result = block.get("content").unwrap_or(&Value::Null);
        let result = wire::content(result, &format!("{path}.content"))?;
        let failed = block.get("is_error").and_then(Value::as_bool) == Some(true);
        messages.push(Message {
            tool_call_id: Some(id.to_owned()),
            ..Message::tool_result(if failed {
                format!("error: {result}")
            } else {
                result
            })
        });
    }
    if texts.iter().any(|text| !text.is_empty()) || messages.len() == before {
        messages.push(Message::of_parts(Role::User, texts));
    }
    Ok(())
}

fn assistant(content: &Value, path: &str) -> Result<Message, ApiError> {
    let Value::Array(blocks) = content else {
        return Ok(Message::assistant(wire::content(content, path)?));
    };
    let mut message = Message::assistant("");
    let mut texts = Vec::new();
    for (n, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{n}]");
        match kind(block) {
            "thinking" => message.thinking.push_str(string(block, "thinking", &path)?),
            // Another server's secret: it says nothing to this model.
            "redacted_thinking" => {}
            "tool_use" => {
                let call = ToolCall {
                    id: Some(string(block, "id", &path)?.to_owned()),
                    name: string(block, "name", &path)?.to_owned(),
                    arguments: block.get("input").cloned().unwrap_or_default(),
                };
                if !call.arguments.is_object() && !call.holds_large_integers() {
                    return Err(ApiError::invalid(
                        format!("{path}.input"),
                        format!("{path}.input must be an object"),
                    ));
                }
                message.tool_calls.push(call);
            }
            _ => texts.push(wire::part_text(block, &path)?.to_owned()),
        }
    }
    let said = Message::of_parts(Role::Assistant, texts);
    message.content = said.content;
    message.content_parts = said.content_parts;
    Ok(message)
}

fn kind(block: &Value) -> &str {
    block.get("type").and_then(Value::as_str).unwrap_or("")
}

fn string<'a>(block: &'a Value, key: &str, path: &str) -> Result<&'a str, ApiError> {
    block.get(key).and_then(Value::as_str).ok_or_else(|| {
        ApiError::invalid(
            format!("{path}.{key}"),
            format!("{path}.{key} must be a string"),
        )
    })
}

/// The client's own tools, and the types of those that only Anthropic runs.
fn tools(wire: &[Json]) -> Result<(Vec<Tool>, Vec<String>), ApiError> {
    let (mut tools, mut ignored) = (Vec::new(), Vec::new());
    for (n, value) in wire.iter().enumerate() {
        match value.value().get("type").and_then(Value::as_str) {
            None | Some("custom") => {}
            Some(other) => {
                ignored.push(shown(other));
                continue;
            }
        }
        let tool: WireTool = value.read().map_err(|error| {
            ApiError::invalid(
                format!("tools[{n}]"),
                format!("tools[{n}] is no tool, which has a `name` and an `input_schema`: {error}"),
            )
        })?;
        tools.push(Tool::new(
            tool.name,
            tool.description.unwrap_or_default(),
            tool.input_schema,
        ));
    }
    Ok((tools, ignored))
}

fn tool_choice(choice: Option<&WireChoice>, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    let Some(choice) = choice else {
        return Ok(ToolChoice::Auto);
    };
    let asked = match (choice.kind.as_str(), &choice.name) {
        (word @ ("auto" | "any" | "none"), _) => json!(word),
        ("tool", Some(name)) => json!({ "name": name }),
        ("tool", None) => {
            return Err(ApiError::invalid(
                "tool_choice.name",
                "tool_choice of type tool needs the name of one",
            ));
        }
        (other, _) => {
            return Err(ApiError::invalid(
                "tool_choice.type",
                format!(
                    "`{}` is no tool_choice; use auto, any, tool or none",
                    shown(other)
                ),
            ));
        }
    };
    wire::tool_choice(Some(&asked), tools)
}
