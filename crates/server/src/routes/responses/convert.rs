//! From the items of OpenAI's request to everybody's conversation.

use base64::{Engine, prelude::BASE64_STANDARD};
use carat_engine::chat::Conversation;
use carat_grammar::ToolChoice;
use carat_text::{Json, Message, Role, Tool, ToolCall};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::wire::{self, Thought, shown};
use crate::{
    ask::{self, Ask, Prompt, SamplingAsk},
    error::ApiError,
    ids,
};

/// Request; fields that are echoed in the answer stay as they came.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ResponsesRequest {
    #[serde(default)]
    pub(super) model: Option<String>,
    #[serde(default)]
    input: Value,
    #[serde(default)]
    pub(super) instructions: Option<String>,
    #[serde(default)]
    previous_response_id: Option<String>,
    #[serde(default)]
    conversation: Value,
    #[serde(default)]
    background: Option<bool>,
    #[serde(default)]
    pub(super) stream: Option<bool>,
    #[serde(default)]
    pub(super) max_output_tokens: Option<i64>,
    #[serde(default)]
    pub(super) temperature: Option<f32>,
    #[serde(default)]
    pub(super) top_p: Option<f32>,
    #[serde(default)]
    top_k: Option<i64>,
    #[serde(default)]
    min_p: Option<f32>,
    #[serde(default)]
    seed: Option<i64>,
    #[serde(default)]
    top_logprobs: Option<u64>,
    #[serde(default)]
    pub(super) tools: Option<Vec<Json>>,
    #[serde(default)]
    pub(super) tool_choice: Option<Value>,
    #[serde(default)]
    pub(super) parallel_tool_calls: Option<bool>,
    #[serde(default)]
    pub(super) reasoning: Option<WireReasoning>,
    #[serde(default)]
    pub(super) text: Option<WireText>,
    #[serde(default)]
    include: Option<Vec<String>>,
    #[serde(default)]
    pub(super) metadata: Value,
    #[serde(default)]
    pub(super) user: Option<String>,
    #[serde(default)]
    safety_identifier: Option<String>,
    #[serde(default)]
    prompt_cache_key: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct WireReasoning {
    #[serde(default)]
    pub(super) effort: Option<String>,
    #[serde(default)]
    pub(super) summary: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct WireText {
    #[serde(default)]
    pub(super) format: Option<Value>,
}

impl ResponsesRequest {
    /// Thoughts come as summaries, which is where some clients look for them.
    pub(super) fn wants_summary(&self) -> bool {
        let reasoning = self.reasoning.as_ref();
        reasoning.is_some_and(|reasoning| reasoning.summary.is_some())
    }

    /// Something that is not there unless it is asked for.
    pub(super) fn includes(&self, what: &str) -> bool {
        self.include.iter().flatten().any(|asked| asked == what)
    }

    /// The request as every dialect's, and the tools that were left out.
    pub(super) fn ask(&self) -> Result<(Ask, Vec<String>), ApiError> {
        self.check_state()?;
        let thought = match self.reasoning.as_ref().and_then(|r| r.effort.as_deref()) {
            Some(effort) => wire::effort(effort, "reasoning.effort")?,
            None => Thought::default(),
        };
        let (mut tools, ignored) = tools(self.tools.as_deref().unwrap_or_default())?;
        let tool_choice = tool_choice(self.tool_choice.as_ref(), &mut tools)?;
        let format = self.text.as_ref().and_then(|text| text.format.as_ref());
        let wants_logprobs = self.includes("message.output_text.logprobs");
        let top = ask::top_logprobs("top_logprobs", self.top_logprobs)?;
        let conversation = Conversation {
            messages: messages(self.instructions.as_deref(), &self.input)?,
            tools,
            thinking: thought.on,
            unix_time: i64::try_from(ids::unix_time()).ok(),
            continues: false,
        };
        let names = [&self.prompt_cache_key, &self.safety_identifier, &self.user];
        let ask = Ask {
            sampling: SamplingAsk {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                min_p: self.min_p,
                seed: self.seed.filter(|seed| *seed != -1).map(|seed| seed as u64),
                ..SamplingAsk::default()
            },
            max_tokens: ask::max_tokens("max_output_tokens", self.max_output_tokens)?,
            logprobs: wants_logprobs.then_some(top.unwrap_or(0)),
            format: wire::format(format, "text.format")?,
            tool_choice,
            parallel_calls: self.parallel_tool_calls.unwrap_or(true),
            thinking_budget: thought.budget,
            user: names.into_iter().flatten().next().cloned(),
            ..Ask::new(Prompt::Chat(conversation))
        };
        Ok((ask, ignored))
    }

    /// Nothing is kept from one request to the next.
    fn check_state(&self) -> Result<(), ApiError> {
        let refused = [
            (
                "previous_response_id",
                self.previous_response_id.is_some(),
                "this server keeps no responses; send the whole conversation as `input`",
            ),
            (
                "conversation",
                !self.conversation.is_null(),
                "this server keeps no conversations; send all of it as `input`",
            ),
            (
                "background",
                self.background == Some(true),
                "this server keeps no responses to be fetched later; leave `background` out",
            ),
        ];
        for (param, is_asked, why) in refused {
            if is_asked {
                return Err(ApiError::invalid(param, why));
            }
        }
        Ok(())
    }
}

fn messages(instructions: Option<&str>, input: &Value) -> Result<Vec<Message>, ApiError> {
    let mut messages: Vec<Message> = instructions.map(Message::system).into_iter().collect();
    match input {
        Value::String(text) => messages.push(Message::user(text.as_str())),
        Value::Array(items) => {
            for (n, item) in items.iter().enumerate() {
                add(item, &format!("input[{n}]"), &mut messages)?;
            }
        }
        _ => {
            return Err(ApiError::invalid(
                "input",
                "input must be a string or an array of items",
            ));
        }
    }
    Ok(messages)
}

/// Adds an item. Thought, text and calls that follow each other are one message of the model.
fn add(item: &Value, path: &str, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let string = |key: &str| {
        item.get(key).and_then(Value::as_str).ok_or_else(|| {
            let path = format!("{path}.{key}");
            let message = format!("{path} must be a string");
            ApiError::invalid(path, message)
        })
    };
    let kind = item.get("type").and_then(Value::as_str);
    match kind.unwrap_or("message") {
        "message" => {
            let content = item.get("content").unwrap_or(&Value::Null);
            let parts = wire::parts(content, &format!("{path}.content"))?;
            let role = match string("role")? {
                "user" => Role::User,
                "system" => Role::System,
                "developer" => Role::Developer,
                "assistant" => {
                    let said = Message::of_parts(Role::Assistant, parts);
                    let message = models(messages, |m| {
                        m.content.is_empty() && m.tool_calls.is_empty()
                    });
                    message.content = said.content;
                    message.content_parts = said.content_parts;
                    return Ok(());
                }
                other => {
                    return Err(ApiError::invalid(
                        format!("{path}.role"),
                        format!(
                            "`{}` is no role; use system, developer, user or assistant",
                            shown(other)
                        ),
                    ));
                }
            };
            messages.push(Message::of_parts(role, parts));
        }
        "reasoning" => {
            let thought = thought(item, path)?;
            models(messages, |m| m.content.is_empty())
                .thinking
                .push_str(&thought);
        }
        "function_call" => {
            let call = ToolCall {
                id: Some(string("call_id")?.to_owned()),
                name: string("name")?.to_owned(),
                arguments: string("arguments")?.into(),
            };
            if !call.parsed_arguments().is_object() {
                return Err(ApiError::invalid(
                    format!("{path}.arguments"),
                    "arguments must be the text of a JSON object",
                ));
            }
            models(messages, |_| true).tool_calls.push(call);
        }
        "function_call_output" => {
            let id = string("call_id")?;
            wire::called(messages, id, &format!("{path}.call_id"))?;
            let output = item.get("output").unwrap_or(&Value::Null);
            let output = wire::content(output, &format!("{path}.output"))?;
            messages.push(Message {
                tool_call_id: Some(id.to_owned()),
                ..Message::tool_result(output)
            });
        }
        "item_reference" => {
            return Err(ApiError::invalid(
                format!("{path}.type"),
                "this server keeps no items to refer to; send the item itself",
            ));
        }
        other => {
            return Err(ApiError::invalid(
                format!("{path}.type"),
                format!(
                    "items of type `{}` are not supported; use message, function_call, function_call_output or reasoning",
                    shown(other)
                ),
            ));
        }
    }
    Ok(())
}

/// The model's message that an item belongs to: the last, if it is one and has room for it, or a new one.
fn models(messages: &mut Vec<Message>, has_room: impl Fn(&Message) -> bool) -> &mut Message {
    let fits = |m: &Message| m.role == Role::Assistant && has_room(m);
    if !messages.last().is_some_and(fits) {
        messages.push(Message::assistant(""));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// The text of a thought: plain, or as [`sealed`] had it.
fn thought(item: &Value, path: &str) -> Result<String, ApiError> {
    let parts = |key: &str| {
        let parts = item.get(key).and_then(Value::as_array);
        let texts = parts
            .into_iter()
            .flatten()
            .filter_map(|part| part.get("text"));
        texts.filter_map(Value::as_str).collect::<String>()
    };
    let plain = parts("content");
    if !plain.is_empty() {
        return Ok(plain);
    }
    let Some(sealed) = item.get("encrypted_content").and_then(Value::as_str) else {
        return Ok(parts("summary"));
    };
    let bytes = BASE64_STANDARD.decode(sealed).ok();
    let text = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
    text.ok_or_else(|| {
        ApiError::invalid(
            format!("{path}.encrypted_content"),
            "this thought is not one of this server's; leave the item out",
        )
    })
}

/// A thought as clients carry it about without looking into it.
pub(super) fn sealed(thought: &str) -> String {
    BASE64_STANDARD.encode(thought)
}

/// Functions, and the types of the tools that are none.
fn tools(wire: &[Json]) -> Result<(Vec<Tool>, Vec<String>), ApiError> {
    let (mut tools, mut ignored) = (Vec::new(), Vec::new());
    for (n, value) in wire.iter().enumerate() {
        let kind = value.value().get("type").and_then(Value::as_str);
        match kind.unwrap_or("function") {
            "function" => tools.push(wire::tool(value, &format!("tools[{n}]"))?),
            other => ignored.push(shown(other)),
        }
    }
    Ok((tools, ignored))
}

/// As in chat, with two more forms: some of the tools, and tools that are not here.
fn tool_choice(choice: Option<&Value>, tools: &mut Vec<Tool>) -> Result<ToolChoice, ApiError> {
    let kind = choice.and_then(|choice| choice.get("type"));
    match kind.and_then(Value::as_str) {
        None | Some("function") => wire::tool_choice(choice, tools),
        Some("allowed_tools") => {
            let allowed = choice.and_then(|choice| choice.get("tools"));
            let allowed = allowed.and_then(Value::as_array);
            let names: Vec<&Value> = allowed
                .into_iter()
                .flatten()
                .filter_map(|tool| tool.get("name"))
                .collect();
            for name in &names {
                wire::tool_choice(Some(&json!({ "name": name })), tools)?;
            }
            tools.retain(|tool| names.iter().any(|name| **name == tool.name.as_str()));
            wire::tool_choice(choice.and_then(|choice| choice.get("mode")), tools)
        }
        Some(other) => Err(ApiError::invalid(
            "tool_choice",
            format!(
                "tool_choice asks for a tool of type `{}`; only functions can be called here",
                shown(other)
            ),
        )),
    }
}
