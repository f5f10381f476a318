//! `POST /v1/messages` and its counter, as Anthropic's clients speak them.
//!
//! An answer is a list of blocks. A stream opens one, adds to it and closes it before the next; a buffered answer is what the
//! stream adds up to. Every event has its `event:` line: clients see nothing of one without.

mod convert;
#[cfg(test)]
mod tests;

use carat_engine::chat::ChatFinish;
use carat_text::ToolCall;
use http::Response;
use serde_json::{Value, json};

use self::convert::MessagesRequest;
use super::{
    chat,
    raw::{self, WithRaw},
};
use crate::{
    answer::{Finished, Output},
    ask::Prompt,
    attend::Sign,
    body::Body,
    error::{ApiError, Dialect},
    http::Call,
    ids,
    stream::{self, Encoder},
};

pub(super) async fn create(call: Call) -> Result<Response<Body>, ApiError> {
    call.check_messages()?;
    let request: MessagesRequest = call.json()?;
    if request.max_tokens.is_none() {
        return Err(ApiError::invalid(
            "max_tokens",
            "max_tokens is required: the most tokens of the answer",
        ));
    }
    let streams = request.stream.unwrap_or(false);
    let named = request.model.clone();
    let (ask, ignored) = request.ask()?;
    // Not its own kind of ping, which has its place after the first event.
    let sign = streams.then_some(Sign::Comment);
    let served = call.model(named.as_deref(), sign).await?;
    let (answer, mut notes) = call.app.answer(&served, ask, &call, "toolu_").await?;
    notes.ignored.extend(ignored);
    let mut encoder = Events {
        id: ids::id("msg_"),
        model: served.model.info.name.clone(),
        request_id: call.request_id.clone(),
        prompt_tokens: answer.prompt_tokens,
        content: Vec::new(),
        open: None,
        finished: None,
    };
    let mut response = if streams {
        stream::stream(&call.app, answer, encoder).await?
    } else {
        stream::drive(answer, &mut encoder).await?;
        Body::json(&WithRaw {
            value: &encoder.message(),
            key: "input",
        })
    };
    chat::note(&mut response, &notes);
    Ok(response)
}

/// Counts the tokens of the very prompt that would be answered.
pub(super) async fn count_tokens(call: Call) -> Result<Response<Body>, ApiError> {
    call.check_messages()?;
    let request: MessagesRequest = call.json()?;
    let named = request.model.clone();
    let (ask, _) = request.ask()?;
    ask.check()?;
    let served = call.model(named.as_deref(), None).await?;
    let Prompt::Chat(conversation) = ask.prompt else {
        unreachable!("messages are a conversation");
    };
    let _permit = call.app.counting.acquire().await;
    let tokens = call
        .app
        .compute(move || served.model.chat.prompt(&conversation))
        .await??;
    Ok(Body::json(&json!({ "input_tokens": tokens.len() })))
}

/// Given back with every thought, for clients that insist on one. Any comes back as good.
const SIGNATURE: &str = "carat";

/// Streams by Anthropic's events.
struct Events {
    id: String,
    model: String,
    request_id: String,
    prompt_tokens: usize,
    /// Blocks that are closed.
    content: Vec<Value>,
    open: Option<Open>,
    finished: Option<Finished>,
}

/// The block that is being written.
enum Open {
    Text(String),
    Thinking(String),
    /// As it was begun, without input.
    Call(Value),
}

impl Events {
    /// All there is so far.
    fn message(&self) -> Value {
        let finished = self.finished.as_ref();
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.content,
            "stop_reason": finished.map(stop_reason),
            "stop_sequence": finished.and_then(stop_sequence),
            "usage": self.usage(),
        })
    }

    /// Cached tokens are counted apart from the others; clients add them up.
    fn usage(&self) -> Value {
        let counts = self.finished.as_ref().map(|f| f.usage.counts);
        let prompt = counts.map_or(self.prompt_tokens, |c| c.prompt_tokens);
        let cached = counts.map_or(0, |c| c.cached_tokens);
        json!({
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts.map_or(0, |c| c.generated_tokens),
        })
    }

    fn start(&self, block: &Value, out: &mut Vec<u8>) {
        let name = "content_block_start";
        let index = self.content.len();
        let start = json!({ "type": name, "index": index, "content_block": block });
        stream::event(out, name, &start);
    }

    fn delta(&self, delta: &Value, out: &mut Vec<u8>) {
        let name = "content_block_delta";
        let index = self.content.len();
        let delta = json!({ "type": name, "index": index, "delta": delta });
        stream::event(out, name, &delta);
    }

    fn stop(&mut self, block: Value, out: &mut Vec<u8>) {
        let name = "content_block_stop";
        let stop = json!({ "type": name, "index": self.content.len() });
        stream::event(out, name, &stop);
        self.content.push(block);
    }

    /// Ends the block that is being written, if there is one.
    fn close(&mut self, out: &mut Vec<u8>) {
        match self.open.take() {
            None => {}
            Some(Open::Text(text)) => self.stop(json!({ "type": "text", "text": text }), out),
            Some(Open::Thinking(thinking)) => {
                let signature = json!({ "type": "signature_delta", "signature": SIGNATURE });
                self.delta(&signature, out);
                let block = json!({
                    "type": "thinking", "thinking": thinking, "signature": SIGNATURE,
                });
                self.stop(block, out);
            }
            // It broke off; the client has what there is of its input.
            Some(Open::Call(block)) => self.stop(block, out),
        }
    }

    fn text(&mut self, piece: &str, out: &mut Vec<u8>) {
        if !matches!(self.open, Some(Open::Text(_))) {
            self.close(out);
            self.start(&json!({ "type": "text", "text": "" }), out);
            self.open = Some(Open::Text(String::new()));
        }
        if let Some(Open::Text(text)) = &mut self.open {
            text.push_str(piece);
        }
        self.delta(&json!({ "type": "text_delta", "text": piece }), out);
    }

    fn thinking(&mut self, piece: &str, out: &mut Vec<u8>) {
        if !matches!(self.open, Some(Open::Thinking(_))) {
            self.close(out);
            let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
            self.start(&block, out);
            self.open = Some(Open::Thinking(String::new()));
        }
        if let Some(Open::Thinking(thinking)) = &mut self.open {
            thinking.push_str(piece);
        }
        let delta = json!({ "type": "thinking_delta", "thinking": piece });
        self.delta(&delta, out);
    }

    fn call_started(&mut self, id: &str, name: &str, out: &mut Vec<u8>) {
        self.close(out);
        let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
        self.start(&block, out);
        self.open = Some(Open::Call(block));
        self.call_input("", out);
    }

    fn call_input(&self, json: &str, out: &mut Vec<u8>) {
        let delta = json!({ "type": "input_json_delta", "partial_json": json });
        self.delta(&delta, out);
    }

    fn call(&mut self, call: &ToolCall, out: &mut Vec<u8>) {
        if !matches!(self.open, Some(Open::Call(_))) {
            let id = call.id.as_deref().unwrap_or_default();
            self.call_started(id, &call.name, out);
            self.call_input(&chat::arguments(call), out);
        }
        if let Some(Open::Call(block)) = &mut self.open {
            block["input"] = raw::arguments(call);
        }
        self.close(out);
    }
}

impl Encoder for Events {
    const CONTENT_TYPE: &'static str = stream::SSE;
    const STREAMS_CALLS: bool = true;

    fn begin(&mut self, out: &mut Vec<u8>) {
        let start = json!({ "type": "message_start", "message": self.message() });
        stream::event(out, "message_start", &start);
        self.ping(out);
    }

    fn output(&mut self, _choice: usize, output: Output, out: &mut Vec<u8>) {
        match output {
            Output::Content { text, .. } => self.text(&text, out),
            Output::Thinking(text) => self.thinking(&text, out),
            Output::CallStarted { id, name } => self.call_started(&id, &name, out),
            Output::CallArguments(json) => self.call_input(&json, out),
            Output::Call(call) => self.call(&call, out),
            Output::InvalidCall(_) if matches!(self.open, Some(Open::Call(_))) => self.close(out),
            // As the model wrote it, so that nothing is lost.
            Output::InvalidCall(call) => self.text(&call.raw, out),
            Output::Finished(finished) => {
                self.close(out);
                self.finished = Some(finished);
            }
            Output::Failed(error) => self.fail(&error, out),
        }
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        let finished = self.finished.as_ref();
        let delta = json!({
            "type": "message_delta",
            "delta": {
                "stop_reason": finished.map(stop_reason),
                "stop_sequence": finished.and_then(stop_sequence),
            },
            "usage": self.usage(),
        });
        stream::event(out, "message_delta", &delta);
        stream::event(out, "message_stop", &json!({ "type": "message_stop" }));
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        let body = error.body(Dialect::Anthropic, &self.request_id);
        stream::event(out, "error", &body);
    }

    fn ping(&mut self, out: &mut Vec<u8>) {
        stream::event(out, "ping", &json!({ "type": "ping" }));
    }
}

fn stop_reason(finished: &Finished) -> &'static str {
    match finished.reason {
        ChatFinish::ToolCalls => "tool_use",
        ChatFinish::Length | ChatFinish::Deadline => "max_tokens",
        ChatFinish::Stop | ChatFinish::Cancelled if finished.stop.is_some() => "stop_sequence",
        ChatFinish::Stop | ChatFinish::Cancelled => "end_turn",
    }
}

/// Named only where it is the reason.
fn stop_sequence(finished: &Finished) -> Option<&str> {
    let is_reason = stop_reason(finished) == "stop_sequence";
    finished.stop.as_deref().filter(|_| is_reason)
}
