//! `/api/*`, as Ollama's clients speak it: a line of JSON per piece, streamed unless the request says otherwise.

mod convert;
mod models;
#[cfg(test)]
mod tests;

use std::time::Instant;

use carat_engine::chat::ChatFinish;
use carat_text::ToolCall;
use http::Response;
use serde_json::{Map, Value, json};

use self::convert::{ChatRequest, GenerateRequest};
pub(super) use self::models::{ps, show, tags, version};
use super::{
    chat as openai,
    models::rfc3339,
    raw::{self, WithRaw},
};
use crate::{
    answer::{Finished, Output},
    ask::Ask,
    attend::Sign,
    body::Body,
    error::{ApiError, Dialect},
    http::Call,
    ids,
    models::{Served, Use},
    stream::{self, Collected, Encoder},
};

pub(super) async fn chat(call: Call) -> Result<Response<Body>, ApiError> {
    call.check_messages()?;
    let request: ChatRequest = call.json()?;
    let streams = request.stream.unwrap_or(true);
    let named = request.model.as_deref();
    let sign = streams.then(|| Endpoint::Chat.sign(named.unwrap_or("")));
    let served = call.model(named, sign).await?;
    let lines = Lines::new(Endpoint::Chat, &served, call.arrived);
    request.note(&call.request_id);
    if request.messages.is_empty() {
        return Ok(lines.loaded());
    }
    answer(&call, &served, request.ask()?, lines, streams).await
}

pub(super) async fn generate(call: Call) -> Result<Response<Body>, ApiError> {
    let request: GenerateRequest = call.json()?;
    let streams = request.stream.unwrap_or(true);
    let named = request.model.as_deref();
    let sign = streams.then(|| Endpoint::Generate.sign(named.unwrap_or("")));
    let served = call.model(named, sign).await?;
    let lines = Lines::new(Endpoint::Generate, &served, call.arrived);
    request.note(&call.request_id);
    if request.is_empty() {
        return Ok(lines.loaded());
    }
    answer(&call, &served, request.ask()?, lines, streams).await
}

async fn answer(
    call: &Call,
    served: &Use,
    ask: Ask,
    lines: Lines,
    streams: bool,
) -> Result<Response<Body>, ApiError> {
    let (answer, notes) = call.app.answer(served, ask, call, "call_").await?;
    let mut response = if streams {
        stream::stream(&call.app, answer, lines).await?
    } else {
        let choices = stream::collect(answer).await?;
        let whole = choices.first().map(|choice| lines.whole(choice));
        Body::json(&whole.as_ref().map(with_raw))
    };
    openai::note(&mut response, &notes);
    Ok(response)
}

/// The routes' two ways to name the same.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Endpoint {
    Chat,
    Generate,
}

impl Endpoint {
    /// Sign of life of a stream while its model is loaded.
    fn sign(self, model: &str) -> Sign {
        let model: String = model.chars().take(128).collect();
        let lines = Lines {
            endpoint: self,
            model: models::tagged(&model),
            arrived: Instant::now(),
        };
        let mut line = Vec::new();
        lines.write("", "", &[], &mut line);
        Sign::Line(line)
    }
}

/// Streams by lines.
struct Lines {
    endpoint: Endpoint,
    model: String,
    arrived: Instant,
}

impl Lines {
    fn new(endpoint: Endpoint, served: &Served, arrived: Instant) -> Lines {
        Lines {
            endpoint,
            model: models::tagged(&served.model.info.name),
            arrived,
        }
    }

    fn line(&self, content: &str, thinking: &str, calls: &[ToolCall]) -> Value {
        let mut line = json!({ "model": self.model, "created_at": rfc3339(ids::unix_time()) });
        let mut said = Map::new();
        match self.endpoint {
            Endpoint::Chat => {
                said.insert("role".to_owned(), "assistant".into());
                said.insert("content".to_owned(), content.into());
            }
            Endpoint::Generate => {
                said.insert("response".to_owned(), content.into());
            }
        }
        if !thinking.is_empty() {
            said.insert("thinking".to_owned(), thinking.into());
        }
        if !calls.is_empty() {
            let calls = calls.iter().map(|call| {
                json!({
                    "id": call.id,
                    "function": { "name": call.name, "arguments": raw::arguments(call) },
                })
            });
            said.insert("tool_calls".to_owned(), calls.collect());
        }
        match (self.endpoint, &mut line) {
            (Endpoint::Generate, Value::Object(line)) => line.extend(said),
            _ => line["message"] = said.into(),
        }
        line["done"] = false.into();
        line
    }

    fn write(&self, content: &str, thinking: &str, calls: &[ToolCall], out: &mut Vec<u8>) {
        let line = self.line(content, thinking, calls);
        stream::line(out, &with_raw(&line));
    }

    /// Makes a line the last, with what it all took.
    fn finish(&self, line: &mut Value, finished: &Finished) {
        let (usage, counts) = (&finished.usage, &finished.usage.counts);
        let nanos = |d: std::time::Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        line["done"] = true.into();
        line["done_reason"] = done_reason(finished).into();
        line["total_duration"] = nanos(self.arrived.elapsed()).into();
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = counts.prompt_tokens.into();
        line["prompt_eval_duration"] = nanos(usage.prefill).into();
        line["eval_count"] = counts.generated_tokens.into();
        line["eval_duration"] = nanos(usage.decode).into();
    }

    fn whole(&self, choice: &Collected) -> Value {
        let mut line = self.line(&choice.text(), &choice.thinking, &choice.calls);
        self.finish(&mut line, &choice.finished);
        line
    }

    /// A request without words asks for the model to be in memory, where it is.
    fn loaded(&self) -> Response<Body> {
        let mut line = self.line("", "", &[]);
        line["done"] = true.into();
        line["done_reason"] = "load".into();
        Body::json(&line)
    }
}

impl Encoder for Lines {
    const CONTENT_TYPE: &'static str = stream::NDJSON;

    fn begin(&mut self, _out: &mut Vec<u8>) {}

    fn output(&mut self, _choice: usize, output: Output, out: &mut Vec<u8>) {
        match output {
            Output::Content { text, .. } => self.write(&text, "", &[], out),
            Output::Thinking(text) => self.write("", &text, &[], out),
            // The dialect has whole calls only.
            Output::CallStarted { .. } | Output::CallArguments(_) => {}
            Output::Call(call) => self.write("", "", &[call], out),
            // As the model wrote it, so that nothing is lost.
            Output::InvalidCall(call) => self.write(&call.raw, "", &[], out),
            Output::Finished(finished) => {
                let mut line = self.line("", "", &[]);
                self.finish(&mut line, &finished);
                stream::line(out, &line);
            }
            Output::Failed(error) => self.fail(&error, out),
        }
    }

    fn end(&mut self, _out: &mut Vec<u8>) {}

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        stream::line(out, &error.body(Dialect::Ollama, ""));
    }

    /// A line that says nothing: there are no comments, and clients take every line for JSON.
    fn ping(&mut self, out: &mut Vec<u8>) {
        self.write("", "", &[], out);
    }
}

/// A line in which the text of arguments is part of the JSON.
fn with_raw(line: &Value) -> WithRaw<'_> {
    WithRaw {
        value: line,
        key: "arguments",
    }
}

/// Calls have no reason of their own here.
fn done_reason(finished: &Finished) -> &'static str {
    match finished.reason {
        ChatFinish::Length | ChatFinish::Deadline => "length",
        ChatFinish::Stop | ChatFinish::ToolCalls | ChatFinish::Cancelled => "stop",
    }
}
