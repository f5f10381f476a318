//! A conversation in the form templates expect.
//!
//! Templates speak OpenAI's message format with some Gemma in it, and their generations differ: newer ones read a
//! tool's result as a message of its own, older ones as a list on the assistant's message. What a template understands
//! is told from its text.

use serde_json::{Map, Value, json};

use crate::{Message, Role, Tool, ToolCall, ToolResponse};

/// Forms of a conversation that a template understands.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "habits have nothing to do with each other"
)]
pub(super) struct Habits {
    /// Reads results from `tool_responses` of the assistant's message and has no notion of tool messages.
    folded_results: bool,
    /// Knows the developer role; others get it as system.
    developer_role: bool,
    /// Reads content that comes in parts; others get it joined.
    content_parts: bool,
    /// Ends the prompt in an empty thought where the model is not to think.
    pub(super) empty_thought: bool,
}

impl Habits {
    pub(super) fn of(source: &str) -> Habits {
        Habits {
            // A template that reads tool messages has to connect them with their calls.
            folded_results: source.contains("tool_responses") && !source.contains("tool_call_id"),
            developer_role: source.contains("developer"),
            content_parts: source.contains("['content'] is sequence")
                || source.contains("content is sequence"),
            empty_thought: source.contains(r"'<|channel>thought\n<channel|>'"),
        }
    }
}

/// The variables `messages` and `tools`. With a mark, integers beyond 64 bits in calls, results and schemas are strings of it and
/// their digits.
pub(super) fn context(
    messages: &[Message],
    tools: &[Tool],
    habits: Habits,
    mark: Option<char>,
) -> Map<String, Value> {
    let mut messages = message_values(messages, habits, mark);
    if habits.folded_results {
        messages = fold_results(messages);
    }
    let tools = match tools {
        [] => Value::Null,
        tools => tools.iter().map(|tool| tool_value(tool, mark)).collect(),
    };
    Map::from_iter([
        (
            "messages".to_owned(),
            messages.into_iter().map(Value::Object).collect(),
        ),
        ("tools".to_owned(), tools),
    ])
}

fn message_values(
    messages: &[Message],
    habits: Habits,
    mark: Option<char>,
) -> Vec<Map<String, Value>> {
    let mut open_calls = OpenCalls::default();
    messages
        .iter()
        .enumerate()
        .map(|(index, message)| {
            let role = match message.role {
                Role::Developer if !habits.developer_role => Role::System,
                role => role,
            };
            let mut value = Map::new();
            value.insert("role".to_owned(), role.name().into());
            value.insert("content".to_owned(), content(message, role, habits));
            match role {
                Role::Assistant => {
                    if !message.thinking.is_empty() {
                        value.insert("reasoning".to_owned(), message.thinking.clone().into());
                        value.insert(
                            "reasoning_content".to_owned(),
                            message.thinking.clone().into(),
                        );
                    }
                    if !message.tool_calls.is_empty() {
                        open_calls = OpenCalls::of(index, &message.tool_calls);
                        value.insert(
                            "tool_calls".to_owned(),
                            open_calls.values(&message.tool_calls, mark),
                        );
                    }
                    if !message.tool_responses.is_empty() {
                        let responses = message.tool_responses.iter();
                        value.insert(
                            "tool_responses".to_owned(),
                            responses.map(|one| response_value(one, mark)).collect(),
                        );
                    }
                }
                Role::Tool => {
                    let (id, name) = open_calls.answered_by(message);
                    value.extend(id.map(|id| ("tool_call_id".to_owned(), id.into())));
                    value.extend(name.map(|name| ("name".to_owned(), name.into())));
                }
                Role::System | Role::Developer | Role::User => {
                    value.extend(
                        message
                            .name
                            .clone()
                            .map(|name| ("name".to_owned(), name.into())),
                    );
                }
            }
            value
        })
        .collect()
}

/// Text, or its parts where there are several and the template goes through them.
fn content(message: &Message, role: Role, habits: Habits) -> Value {
    let own = |text: &str| match role {
        Role::Assistant => match without_thoughts(text) {
            // Templates ask whether there is content before they strip it, and close the turn by that.
            stripped if stripped.is_empty() && !text.is_empty() => " ".to_owned(),
            stripped => stripped,
        },
        _ => text.to_owned(),
    };
    // The first system message is written as it is, and a tool's parts are joined by every template.
    let in_parts = matches!(role, Role::User | Role::Assistant) && habits.content_parts;
    if in_parts && message.content_parts.len() > 1 {
        let part = |text: &String| json!({"type": "text", "text": own(text)});
        return message.content_parts.iter().map(part).collect();
    }
    own(&message.content).into()
}

fn response_value(response: &ToolResponse, mark: Option<char>) -> Value {
    let mut value = Map::new();
    value.extend(
        response
            .name
            .clone()
            .map(|name| ("name".to_owned(), name.into())),
    );
    value.insert("response".to_owned(), response.response.marked(mark));
    Value::Object(value)
}

/// The calls of the latest assistant message, with an id each: templates compare ids, and two absent ones are equal.
#[derive(Default)]
struct OpenCalls {
    calls: Vec<(String, String)>,
    results: usize,
}

impl OpenCalls {
    fn of(message: usize, calls: &[ToolCall]) -> OpenCalls {
        let identify = |(place, call): (usize, &ToolCall)| {
            let id = call
                .id
                .clone()
                .unwrap_or_else(|| format!("call_{message}_{place}"));
            (id, call.name.clone())
        };
        OpenCalls {
            calls: calls.iter().enumerate().map(identify).collect(),
            results: 0,
        }
    }

    fn values(&self, calls: &[ToolCall], mark: Option<char>) -> Value {
        let value = |((id, name), call): (&(String, String), &ToolCall)| {
            let arguments = match mark {
                Some(mark) => call.marked_arguments(mark),
                None => call.parsed_arguments(),
            };
            json!({
                "id": id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            })
        };
        self.calls.iter().zip(calls).map(value).collect()
    }

    /// The id and tool name a result belongs to: by its id, else by order.
    fn answered_by(&mut self, message: &Message) -> (Option<String>, Option<String>) {
        let place = self.results;
        self.results += 1;
        let call = match &message.tool_call_id {
            Some(wanted) => self.calls.iter().find(|(id, _)| id == wanted),
            None => self.calls.get(place),
        };
        let id = message
            .tool_call_id
            .clone()
            .or_else(|| call.map(|(id, _)| id.clone()));
        let name = call
            .map(|(_, name)| name.clone())
            .or_else(|| message.name.clone());
        (id, name)
    }
}

/// Moves tool messages into `tool_responses` of the assistant's message before them, and the text that answers the
/// results into the same message: to such a template that is one turn.
fn fold_results(messages: Vec<Map<String, Value>>) -> Vec<Map<String, Value>> {
    let mut folded: Vec<Map<String, Value>> = Vec::with_capacity(messages.len());
    for mut message in messages {
        let Some(last) = folded
            .last_mut()
            .filter(|last| last.contains_key("tool_calls"))
        else {
            folded.push(message);
            continue;
        };
        let role = message.get("role").and_then(Value::as_str);
        if role == Some(Role::Tool.name()) {
            let response = json!({
                "name": message.get("name"),
                "response": message.get("content"),
            });
            let responses = last.entry("tool_responses").or_insert_with(|| json!([]));
            responses
                .as_array_mut()
                .into_iter()
                .for_each(|list| list.push(response.clone()));
        } else if role == Some(Role::Assistant.name())
            && !message.contains_key("tool_calls")
            && last.contains_key("tool_responses")
            && last.get("content").and_then(Value::as_str) == Some("")
        {
            last.insert(
                "content".to_owned(),
                message.remove("content").unwrap_or_default(),
            );
        } else {
            folded.push(message);
        }
    }
    folded
}

/// An answer without the thoughts in it, also an unfinished one. Templates do this themselves, but here the text is
/// about to be guarded, and then they could not.
fn without_thoughts(text: &str) -> String {
    text.split("<channel|>")
        .filter_map(|part| part.split("<|channel>").next())
        .collect()
}

fn tool_value(tool: &Tool, mark: Option<char>) -> Value {
    let mut parameters = tool.parameters.marked(mark);
    single_types(&mut parameters);
    let mut function = json!({
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
    });
    if !tool.response.value().is_null() {
        function["response"] = tool.response.marked(mark);
    }
    json!({"type": "function", "function": function})
}

/// JSON schema allows `"type": ["string", "null"]`; templates know one type and `nullable`.
fn single_types(schema: &mut Value) {
    match schema {
        Value::Array(values) => values.iter_mut().for_each(single_types),
        Value::Object(map) => {
            map.values_mut().for_each(single_types);
            let Some(Value::Array(types)) = map.get("type") else {
                return;
            };
            let first = types.iter().find(|t| *t != "null").or(types.first());
            let (first, nullable) = (
                first.cloned().unwrap_or_default(),
                types.iter().any(|t| t == "null"),
            );
            map.insert("type".to_owned(), first);
            if nullable {
                map.insert("nullable".to_owned(), true.into());
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
