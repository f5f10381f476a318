//! Wire types that several dialects share: messages, tools, stop strings, thinking.

use carat_grammar::{Format, ToolChoice};
use carat_text::{Json, Message, Role, Tool, ToolCall, ToolResponse, chat::deserialize_arguments};
use serde::Deserialize;
use serde_json::Value;

use crate::{ask, error::ApiError};

/// One string or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(super) fn into_vec(this: Option<OneOrMany>) -> Vec<String> {
        match this {
            None => Vec::new(),
            Some(OneOrMany::One(one)) => vec![one],
            Some(OneOrMany::Many(many)) => many,
        }
    }
}

/// A message as OpenAI's and Ollama's clients write it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct WireMessage {
    role: String,
    #[serde(default)]
    content: Value,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    thinking: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<WireCall>>,
    #[serde(default)]
    function_call: Option<WireFunction>,
    /// Results beside the calls that asked for them, as Gemma's own format has it.
    #[serde(default)]
    tool_responses: Option<Vec<ToolResponse>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    tool_name: Option<String>,
    /// Beside the content, as Ollama's clients send them.
    #[serde(default)]
    images: Option<Vec<Value>>,
}

#[derive(Clone, Debug, Deserialize)]
struct WireCall {
    #[serde(default)]
    id: Option<String>,
    function: WireFunction,
}

#[derive(Clone, Debug, Deserialize)]
struct WireFunction {
    name: String,
    #[serde(default, deserialize_with = "deserialize_arguments")]
    arguments: Value,
}

/// Checks and translates OpenAI's messages.
pub(super) fn messages(wire: Vec<WireMessage>) -> Result<Vec<Message>, ApiError> {
    ask::at_most("messages", wire.len(), ask::MAX_MESSAGES)?;
    let mut messages: Vec<Message> = Vec::with_capacity(wire.len());
    for (n, message) in wire.into_iter().enumerate() {
        let path = |field: &str| format!("messages[{n}].{field}");
        let role = match message.role.as_str() {
            "system" => Role::System,
            "developer" => Role::Developer,
            "user" => Role::User,
            "assistant" | "model" => Role::Assistant,
            "tool" | "function" => Role::Tool,
            other => {
                let shown: String = other.chars().take(40).collect();
                return Err(ApiError::invalid(
                    path("role"),
                    format!(
                        "`{}` is no role; use system, developer, user, assistant or tool",
                        shown.escape_debug()
                    ),
                ));
            }
        };
        if message.images.is_some_and(|images| !images.is_empty()) {
            return Err(ApiError::invalid(
                path("images"),
                "images are not supported here; only text is",
            ));
        }
        let parts = match message.content {
            Value::String(text) => vec![text],
            other => parts(&other, &path("content"))?,
        };
        let mut calls: Vec<ToolCall> = message
            .tool_calls
            .unwrap_or_default()
            .into_iter()
            .map(|call| ToolCall {
                id: call.id,
                name: call.function.name,
                arguments: call.function.arguments,
            })
            .collect();
        calls.extend(message.function_call.map(|function| ToolCall {
            id: None,
            name: function.name,
            arguments: function.arguments,
        }));
        for (c, call) in calls.iter().enumerate() {
            if !call.parsed_arguments().is_object() {
                return Err(ApiError::invalid(
                    path(&format!("tool_calls[{c}].function.arguments")),
                    "arguments must be a JSON object, or the text of one",
                ));
            }
        }
        if let Some(id) = &message.tool_call_id
            && role == Role::Tool
        {
            called(&messages, id, &path("tool_call_id"))?;
        }
        // Clients that know several names send the same text under each, or nothing under all but one.
        let thoughts = [
            message.reasoning_content,
            message.reasoning,
            message.thinking,
        ];
        let thinking = thoughts.into_iter().flatten().find(|t| !t.is_empty());
        messages.push(Message {
            thinking: thinking.unwrap_or_default(),
            tool_calls: calls,
            tool_responses: message.tool_responses.unwrap_or_default(),
            tool_call_id: message.tool_call_id,
            name: message.name.or(message.tool_name),
            ..Message::of_parts(role, parts)
        });
    }
    Ok(messages)
}

/// A result answers a call that was made.
pub(super) fn called(messages: &[Message], id: &str, path: &str) -> Result<(), ApiError> {
    let mut calls = messages.iter().flat_map(|m| &m.tool_calls);
    if calls.any(|call| call.id.as_deref() == Some(id)) {
        return Ok(());
    }
    Err(ApiError::invalid(
        path,
        format!("no call before this has the id `{}`", shown(id)),
    ))
}

/// As much of a client's word as an error repeats.
pub(super) fn shown(word: &str) -> String {
    let start: String = word.chars().take(80).collect();
    start.escape_debug().to_string()
}

/// Text, nothing, or parts of text, all together.
pub(super) fn content(content: &Value, path: &str) -> Result<String, ApiError> {
    parts(content, path).map(|parts| parts.concat())
}

/// The same one by one: templates trim each part.
pub(super) fn parts(content: &Value, path: &str) -> Result<Vec<String>, ApiError> {
    match content {
        Value::Null => Ok(Vec::new()),
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Array(parts) => {
            let text = |(n, part)| part_text(part, &format!("{path}[{n}]")).map(str::to_owned);
            parts.iter().enumerate().map(text).collect()
        }
        _ => Err(ApiError::invalid(
            path,
            format!("{path} must be a string, null or an array of parts"),
        )),
    }
}

/// The text of a content part; other kinds are refused by name, never dropped.
pub(super) fn part_text<'a>(part: &'a Value, path: &str) -> Result<&'a str, ApiError> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or("");
    let key = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        _ => {
            let shown: String = kind.chars().take(40).collect();
            return Err(ApiError::invalid(
                format!("{path}.type"),
                format!(
                    "content of type `{}` is not supported here; only text is",
                    shown.escape_debug()
                ),
            ));
        }
    };
    part.get(key).and_then(Value::as_str).ok_or_else(|| {
        ApiError::invalid(
            format!("{path}.{key}"),
            format!("{path}.{key} must be a string"),
        )
    })
}

/// A tool as OpenAI's clients describe it, wrapped or bare.
pub(super) fn tools(wire: &[Json], path: &str) -> Result<Vec<Tool>, ApiError> {
    wire.iter()
        .enumerate()
        .map(|(n, value)| {
            let kind = value
                .value()
                .get("type")
                .and_then(Value::as_str)
                .unwrap_or("function");
            if kind != "function" {
                let shown: String = kind.chars().take(40).collect();
                return Err(ApiError::invalid(
                    format!("{path}[{n}].type"),
                    format!(
                        "tools of type `{}` are not supported; only functions are",
                        shown.escape_debug()
                    ),
                ));
            }
            tool(value, &format!("{path}[{n}]"))
        })
        .collect()
}

/// One function, wrapped or bare.
pub(super) fn tool(value: &Json, path: &str) -> Result<Tool, ApiError> {
    Tool::try_from(value).map_err(|problem| {
        ApiError::invalid(
            path,
            format!("{path} is no tool, which has a `name`, and may have a `description` and `parameters`: {problem}"),
        )
    })
}

/// OpenAI's `tool_choice`.
pub(super) fn tool_choice(choice: Option<&Value>, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    let named = |name: &str| {
        if tools.iter().any(|tool| tool.name == name) {
            return Ok(ToolChoice::Named(name.to_owned()));
        }
        let shown: String = name.chars().take(80).collect();
        Err(ApiError::invalid(
            "tool_choice",
            format!(
                "tool_choice names `{}`, which is none of the tools",
                shown.escape_debug()
            ),
        ))
    };
    let required = || {
        if tools.is_empty() {
            return Err(ApiError::invalid(
                "tool_choice",
                "tool_choice asks for a call, but there are no tools",
            ));
        }
        Ok(ToolChoice::Required)
    };
    match choice {
        None | Some(Value::Null) => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" | "any" => required(),
            name => named(name),
        },
        Some(object) => {
            let name = object
                .pointer("/function/name")
                .or_else(|| object.get("name"))
                .and_then(Value::as_str);
            match name {
                Some(name) => named(name),
                None => Err(ApiError::invalid(
                    "tool_choice",
                    "tool_choice must be auto, none, required or the name of a function",
                )),
            }
        }
    }
}

/// OpenAI's `response_format`, and `text.format` of its other interface, which leaves out one level.
pub(super) fn format(format: Option<&Value>, path: &str) -> Result<Option<Format>, ApiError> {
    let Some(format) = format.filter(|f| !f.is_null()) else {
        return Ok(None);
    };
    let kind = format.get("type").and_then(Value::as_str).unwrap_or("");
    match kind {
        "text" => Ok(None),
        "json_object" => match format.get("schema") {
            // llama.cpp's way to give a schema.
            Some(schema) => Ok(Some(schema_format(schema, false))),
            None => Ok(Some(Format::JsonObject)),
        },
        "json_schema" => {
            let inner = format.get("json_schema").unwrap_or(format);
            let schema = inner.get("schema").ok_or_else(|| {
                ApiError::invalid(
                    format!("{path}.json_schema"),
                    "json_schema needs a `schema`",
                )
            })?;
            let strict = inner.get("strict").and_then(Value::as_bool) == Some(true);
            Ok(Some(schema_format(schema, strict)))
        }
        "regex" => {
            let pattern = format.get("pattern").or_else(|| format.get("regex"));
            let pattern = pattern.and_then(Value::as_str).ok_or_else(|| {
                ApiError::invalid(path, "a format of type regex needs a `pattern`")
            })?;
            Ok(Some(Format::Regex(pattern.to_owned())))
        }
        "grammar" => {
            let grammar = format.get("grammar").and_then(Value::as_str);
            let grammar = grammar.ok_or_else(|| {
                ApiError::invalid(path, "a format of type grammar needs a `grammar`")
            })?;
            Ok(Some(grammar_format(grammar)))
        }
        other => {
            let shown: String = other.chars().take(40).collect();
            Err(ApiError::invalid(
                format!("{path}.type"),
                format!(
                    "`{}` is no format; use text, json_object, json_schema, regex or grammar",
                    shown.escape_debug()
                ),
            ))
        }
    }
}

pub(super) fn schema_format(schema: &Value, strict: bool) -> Format {
    Format::JsonSchema {
        schema: schema.clone(),
        strict,
    }
}

/// Lark, or llama.cpp's GBNF: the one writes `name: …`, the other `name ::= …`.
pub(super) fn grammar_format(grammar: &str) -> Format {
    if grammar.contains("::=") {
        Format::Gbnf(grammar.to_owned())
    } else {
        Format::Lark(grammar.to_owned())
    }
}

/// Amount of thought asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Thought {
    pub(super) on: bool,
    pub(super) budget: Option<usize>,
}

/// A level of effort by its name. Budgets are this server's choice; nobody has published others.
pub(super) fn effort(name: &str, path: &str) -> Result<Thought, ApiError> {
    let budget = match name {
        "none" | "minimal" => return Ok(Thought::default()),
        "low" => Some(1024),
        "medium" => Some(4096),
        "high" => Some(16_384),
        "xhigh" | "max" => None,
        other => {
            let shown: String = other.chars().take(40).collect();
            return Err(ApiError::invalid(
                path,
                format!(
                    "`{}` is no effort; use none, minimal, low, medium, high, xhigh or max",
                    shown.escape_debug()
                ),
            ));
        }
    };
    Ok(Thought { on: true, budget })
}

/// A budget given in tokens.
pub(super) fn budget(tokens: u64) -> Thought {
    Thought {
        on: tokens > 0,
        budget: Some(tokens as usize),
    }
}
