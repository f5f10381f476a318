//! `POST /v1/responses`, OpenAI's interface of items and events. Nothing is kept between requests.
//!
//! An answer is a list of items: thoughts, messages, calls. A stream announces each, adds to it and repeats it whole; the last
//! event has all of them, and a buffered answer is the response in that event.

mod convert;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use carat_engine::chat::{ChatFinish, Token};
use carat_text::{Json, Tokenizer, ToolCall};
use http::Response;
use serde_json::{Value, json};

use self::convert::ResponsesRequest;
use super::chat;
use crate::{
    answer::{Finished, Output},
    attend::Sign,
    body::Body,
    error::ApiError,
    http::Call,
    ids,
    models::Served,
    stream::{self, Encoder},
};

pub(super) async fn create(call: Call) -> Result<Response<Body>, ApiError> {
    let request: ResponsesRequest = call.json()?;
    let (ask, ignored) = request.ask()?;
    let sign = request.stream.unwrap_or(false).then_some(Sign::Comment);
    let served = call.model(request.model.as_deref(), sign).await?;
    let logprobs = ask.logprobs.is_some();
    let (answer, mut notes) = call.app.answer(&served, ask, &call, "call_").await?;
    notes.ignored.extend(ignored);
    let mut encoder = Events {
        tokenizer: logprobs.then(|| Arc::clone(served.model.chat.tokenizer())),
        ..Events::new(&request, frame(&request, &served))
    };
    let mut response = if request.stream.unwrap_or(false) {
        stream::stream(&call.app, answer, encoder).await?
    } else {
        stream::drive(answer, &mut encoder).await?;
        Body::json(&encoder.response())
    };
    chat::note(&mut response, &notes);
    Ok(response)
}

/// The response but for what the model makes of it.
fn frame(request: &ResponsesRequest, served: &Served) -> Value {
    let sampling = &served.model.sampling;
    let reasoning = request.reasoning.clone().unwrap_or_default();
    let text = request.text.as_ref().and_then(|text| text.format.clone());
    let or = |value: &Value, default: Value| {
        if value.is_null() {
            default
        } else {
            value.clone()
        }
    };
    json!({
        "id": ids::id("resp_"),
        "object": "response",
        "created_at": ids::unix_time(),
        "status": "in_progress",
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": or(&request.metadata, json!({})),
        "model": served.model.info.name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
        "previous_response_id": null,
        "reasoning": { "effort": reasoning.effort, "summary": reasoning.summary },
        "store": false,
        "temperature": request.temperature.unwrap_or(sampling.temperature),
        "text": { "format": text.unwrap_or_else(|| json!({ "type": "text" })) },
        "tool_choice": request.tool_choice.clone().unwrap_or_else(|| json!("auto")),
        "tools": request.tools.iter().flatten().map(Json::value).collect::<Vec<_>>(),
        "top_p": request.top_p.unwrap_or(sampling.top_p),
        "truncation": "disabled",
        "usage": null,
        "user": request.user,
    })
}

/// Streams by the events of items.
struct Events {
    frame: Value,
    /// Of the next event.
    sequence: u64,
    /// Items that are done.
    items: Vec<Value>,
    open: Option<Open>,
    /// The call that is being written, and its arguments so far.
    call: Option<(Value, String)>,
    finished: Option<Finished>,
    error: Option<Value>,
    /// Thoughts come as summaries.
    summary: bool,
    /// Thoughts come sealed, too.
    sealed: bool,
    /// Names tokens, if their log-probabilities were asked for.
    tokenizer: Option<Arc<Tokenizer>>,
}

/// The item that is being written.
struct Open {
    kind: OpenKind,
    id: String,
    text: String,
    logprobs: Vec<Value>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpenKind {
    Message,
    Reasoning,
}

impl Events {
    fn new(request: &ResponsesRequest, frame: Value) -> Events {
        Events {
            frame,
            sequence: 0,
            items: Vec::new(),
            open: None,
            call: None,
            finished: None,
            error: None,
            summary: request.wants_summary(),
            sealed: request.includes("reasoning.encrypted_content"),
            tokenizer: None,
        }
    }

    /// All there is so far.
    fn response(&self) -> Value {
        let mut response = self.frame.clone();
        response["output"] = json!(self.items);
        if let Some(error) = &self.error {
            response["status"] = "failed".into();
            response["error"] = error.clone();
        } else if let Some(finished) = &self.finished {
            response["status"] = status(finished).into();
            if finished.reason == ChatFinish::Length {
                response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
            }
            response["usage"] = usage(finished);
        }
        response
    }

    fn send(&mut self, name: &str, fields: Value, out: &mut Vec<u8>) {
        let mut event = json!({ "type": name, "sequence_number": self.sequence });
        if let (Value::Object(event), Value::Object(fields)) = (&mut event, fields) {
            event.extend(fields);
        }
        self.sequence += 1;
        stream::event(out, name, &event);
    }

    /// One about the whole response.
    fn send_response(&mut self, name: &str, out: &mut Vec<u8>) {
        let response = self.response();
        self.send(name, json!({ "response": response }), out);
    }

    /// One about the item that comes next in the list.
    fn send_item(&mut self, name: &str, item: &Value, out: &mut Vec<u8>) {
        let index = self.items.len();
        self.send(name, json!({ "output_index": index, "item": item }), out);
    }

    /// One about the only part of an item.
    fn send_part(&mut self, name: &str, id: &str, fields: Value, out: &mut Vec<u8>) {
        let index_name = if name.contains("summary") {
            "summary_index"
        } else {
            "content_index"
        };
        let mut part = json!({
            "item_id": id, "output_index": self.items.len(), index_name: 0,
        });
        if let (Value::Object(part), Value::Object(fields)) = (&mut part, fields) {
            part.extend(fields);
        }
        self.send(name, part, out);
    }

    fn names(&self, kind: OpenKind) -> &'static Names {
        match kind {
            OpenKind::Message => &MESSAGE,
            OpenKind::Reasoning if self.summary => &SUMMARY,
            OpenKind::Reasoning => &REASONING,
        }
    }

    /// An item with what it has of its text; without, when it is new.
    fn item(&self, open: &Open, status: &str, part: Option<Value>) -> Value {
        let parts: Vec<Value> = part.into_iter().collect();
        match open.kind {
            OpenKind::Message => json!({
                "id": open.id, "type": "message", "status": status, "role": "assistant",
                "content": parts,
            }),
            OpenKind::Reasoning => {
                let mut item = json!({
                    "id": open.id, "type": "reasoning", "status": status,
                    "summary": [], "content": [],
                });
                item[if self.summary { "summary" } else { "content" }] = parts.into();
                if self.sealed && !open.text.is_empty() {
                    item["encrypted_content"] = convert::sealed(&open.text).into();
                }
                item
            }
        }
    }

    fn piece(&mut self, kind: OpenKind, text: &str, tokens: &[Token], out: &mut Vec<u8>) {
        if self.open.as_ref().is_some_and(|open| open.kind != kind) {
            self.close("completed", out);
        }
        let names = self.names(kind);
        let mut open = if let Some(open) = self.open.take() {
            open
        } else {
            let open = Open {
                kind,
                id: ids::id(names.prefix),
                text: String::new(),
                logprobs: Vec::new(),
            };
            let item = self.item(&open, "in_progress", None);
            self.send_item("response.output_item.added", &item, out);
            let part = json!({ "part": names.part("", &[]) });
            self.send_part(names.part_added, &open.id, part, out);
            open
        };
        let mut delta = json!({ "delta": text });
        if kind == OpenKind::Message {
            let logprobs = self.tokenizer.as_ref().map_or_else(Vec::new, |tokenizer| {
                chat::token_logprobs(tokens, tokenizer)
            });
            delta["logprobs"] = json!(logprobs);
            open.logprobs.extend(logprobs);
        }
        self.send_part(names.delta, &open.id, delta, out);
        open.text.push_str(text);
        self.open = Some(open);
    }

    /// Ends the item that is being written, if there is one.
    fn close(&mut self, status: &str, out: &mut Vec<u8>) {
        let Some(open) = self.open.take() else {
            return;
        };
        let names = self.names(open.kind);
        let mut done = json!({ "text": open.text });
        if open.kind == OpenKind::Message {
            done["logprobs"] = json!(open.logprobs);
        }
        self.send_part(names.text_done, &open.id, done, out);
        let part = names.part(&open.text, &open.logprobs);
        self.send_part(names.part_done, &open.id, json!({ "part": part }), out);
        let item = self.item(&open, status, Some(part));
        self.send_item("response.output_item.done", &item, out);
        self.items.push(item);
    }

    fn call_started(&mut self, call_id: &str, name: &str, out: &mut Vec<u8>) {
        self.close("completed", out);
        let item = json!({
            "id": ids::id("fc_"), "type": "function_call", "status": "in_progress",
            "call_id": call_id, "name": name, "arguments": "",
        });
        self.send_item("response.output_item.added", &item, out);
        self.call = Some((item, String::new()));
    }

    fn call_arguments(&mut self, json: &str, out: &mut Vec<u8>) {
        let Some((item, arguments)) = &mut self.call else {
            return;
        };
        arguments.push_str(json);
        let delta = json!({
            "item_id": item["id"], "output_index": self.items.len(), "delta": json,
        });
        self.send("response.function_call_arguments.delta", delta, out);
    }

    /// Ends the call that is being written, if there is one.
    fn close_call(&mut self, status: &str, out: &mut Vec<u8>) {
        let Some((mut item, arguments)) = self.call.take() else {
            return;
        };
        let done = json!({
            "item_id": item["id"], "output_index": self.items.len(), "name": item["name"],
            "arguments": arguments,
        });
        self.send("response.function_call_arguments.done", done, out);
        item["status"] = status.into();
        item["arguments"] = arguments.into();
        self.send_item("response.output_item.done", &item, out);
        self.items.push(item);
    }

    fn call(&mut self, call: &ToolCall, out: &mut Vec<u8>) {
        if self.call.is_none() {
            let id = call.id.as_deref().unwrap_or_default();
            self.call_started(id, &call.name, out);
            self.call_arguments(&chat::arguments(call), out);
        }
        self.close_call("completed", out);
    }
}

/// Names of the events of an item with text.
struct Names {
    prefix: &'static str,
    part: &'static str,
    part_added: &'static str,
    delta: &'static str,
    text_done: &'static str,
    part_done: &'static str,
}

const MESSAGE: Names = Names {
    prefix: "msg_",
    part: "output_text",
    part_added: "response.content_part.added",
    delta: "response.output_text.delta",
    text_done: "response.output_text.done",
    part_done: "response.content_part.done",
};

const REASONING: Names = Names {
    prefix: "rs_",
    part: "reasoning_text",
    part_added: "response.content_part.added",
    delta: "response.reasoning_text.delta",
    text_done: "response.reasoning_text.done",
    part_done: "response.content_part.done",
};

const SUMMARY: Names = Names {
    prefix: "rs_",
    part: "summary_text",
    part_added: "response.reasoning_summary_part.added",
    delta: "response.reasoning_summary_text.delta",
    text_done: "response.reasoning_summary_text.done",
    part_done: "response.reasoning_summary_part.done",
};

impl Names {
    fn part(&self, text: &str, logprobs: &[Value]) -> Value {
        let mut part = json!({ "type": self.part, "text": text });
        if self.part == MESSAGE.part {
            part["annotations"] = json!([]);
            part["logprobs"] = json!(logprobs);
        }
        part
    }
}

impl Encoder for Events {
    const CONTENT_TYPE: &'static str = stream::SSE;
    const STREAMS_CALLS: bool = true;

    fn begin(&mut self, out: &mut Vec<u8>) {
        self.send_response("response.created", out);
        self.send_response("response.in_progress", out);
    }

    fn output(&mut self, _choice: usize, output: Output, out: &mut Vec<u8>) {
        match output {
            Output::Content { text, tokens } => {
                self.piece(OpenKind::Message, &text, &tokens, out);
            }
            Output::Thinking(text) => self.piece(OpenKind::Reasoning, &text, &[], out),
            Output::CallStarted { id, name } => self.call_started(&id, &name, out),
            Output::CallArguments(json) => self.call_arguments(&json, out),
            Output::Call(call) => self.call(&call, out),
            // The client has what there is of it.
            Output::InvalidCall(_) if self.call.is_some() => self.close_call("incomplete", out),
            // As the model wrote it, so that nothing is lost.
            Output::InvalidCall(call) => self.piece(OpenKind::Message, &call.raw, &[], out),
            Output::Finished(finished) => {
                self.close(status(&finished), out);
                self.finished = Some(finished);
            }
            Output::Failed(error) => self.fail(&error, out),
        }
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        let name = match self.finished.as_ref().map(status) {
            Some("incomplete") => "response.incomplete",
            _ => "response.completed",
        };
        self.send_response(name, out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.close("incomplete", out);
        self.close_call("incomplete", out);
        self.error = Some(json!({ "code": "server_error", "message": error.message }));
        self.send_response("response.failed", out);
    }

    fn ping(&mut self, out: &mut Vec<u8>) {
        stream::comment(out);
    }
}

fn status(finished: &Finished) -> &'static str {
    match finished.reason {
        ChatFinish::Length | ChatFinish::Deadline => "incomplete",
        ChatFinish::Stop | ChatFinish::ToolCalls | ChatFinish::Cancelled => "completed",
    }
}

fn usage(finished: &Finished) -> Value {
    let counts = &finished.usage.counts;
    json!({
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": counts.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": counts.generated_tokens,
        "output_tokens_details": { "reasoning_tokens": finished.thinking_tokens },
        "total_tokens": counts.prompt_tokens + counts.generated_tokens,
    })
}
