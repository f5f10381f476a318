//! `POST /v1/chat/completions`, as OpenAI's clients speak it.

use carat_engine::{
    DraftCounts, Usage,
    chat::{ChatFinish, Conversation, Token},
};
use carat_text::{Json, Tokenizer, ToolCall};
use http::{HeaderValue, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::{mem, sync::Arc};

use super::wire::{self, OneOrMany, Thought, WireMessage};
use crate::{
    answer::{Finished, Output},
    app::Notes,
    ask::{self, Ask, Ends, Prompt, SamplingAsk},
    attend::Sign,
    body::Body,
    cache::{self, CacheNote},
    error::{ApiError, Dialect},
    http::Call,
    ids,
    stream::{self, Collected, Encoder},
};

#[derive(Debug, Deserialize)]
pub(super) struct ChatRequest {
    #[serde(default)]
    pub(super) model: Option<String>,
    messages: Vec<WireMessage>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    #[serde(default)]
    max_tokens: Option<i64>,
    #[serde(default)]
    max_completion_tokens: Option<i64>,
    #[serde(skip)]
    sampling: WireSampling,
    #[serde(default)]
    stop: Option<OneOrMany>,
    #[serde(default)]
    n: Option<u64>,
    #[serde(default)]
    logprobs: Option<bool>,
    #[serde(default)]
    top_logprobs: Option<u64>,
    #[serde(default)]
    response_format: Option<Value>,
    #[serde(skip)]
    guided: Guided,
    #[serde(default)]
    tools: Option<Vec<Json>>,
    #[serde(default)]
    functions: Option<Vec<Json>>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    function_call: Option<Value>,
    #[serde(default)]
    parallel_tool_calls: Option<bool>,
    #[serde(default)]
    reasoning_effort: Option<String>,
    #[serde(default)]
    reasoning: Option<Reasoning>,
    #[serde(default)]
    thinking: Option<ThinkingSwitch>,
    #[serde(default)]
    think: Option<bool>,
    #[serde(default)]
    chat_template_kwargs: Option<TemplateSettings>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    safety_identifier: Option<String>,
    #[serde(default)]
    prompt_cache_key: Option<String>,
    #[serde(default)]
    ignore_eos: Option<bool>,
    #[serde(default)]
    draft: Option<bool>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    explain: Option<bool>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct StreamOptions {
    #[serde(default)]
    pub(super) include_usage: Option<bool>,
    #[serde(default)]
    pub(super) continuous_usage_stats: Option<bool>,
}

/// Sampling fields, as OpenAI, vLLM and llama.cpp name them.
#[derive(Debug, Default, Deserialize)]
pub(super) struct WireSampling {
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_p: Option<f32>,
    #[serde(default)]
    top_k: Option<i64>,
    #[serde(default)]
    min_p: Option<f32>,
    #[serde(default)]
    seed: Option<i64>,
    #[serde(default)]
    presence_penalty: Option<f32>,
    #[serde(default)]
    frequency_penalty: Option<f32>,
    #[serde(default)]
    repetition_penalty: Option<f32>,
    #[serde(default)]
    repeat_penalty: Option<f32>,
    #[serde(default)]
    logit_bias: Option<Map<String, Value>>,
}

impl WireSampling {
    pub(super) fn ask(&self) -> Result<SamplingAsk, ApiError> {
        let bias = self.logit_bias.as_ref();
        Ok(SamplingAsk {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repetition_penalty.or(self.repeat_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_window: None,
            logit_bias: bias.map(ask::logit_bias).transpose()?.unwrap_or_default(),
            // -1 asks for a random one in some clients.
            seed: self.seed.filter(|seed| *seed != -1).map(|seed| seed as u64),
        })
    }
}

/// Structured output under the names of other servers.
#[derive(Debug, Default, Deserialize)]
#[expect(clippy::struct_field_names, reason = "vLLM's names")]
pub(super) struct Guided {
    #[serde(default)]
    guided_json: Option<Value>,
    #[serde(default)]
    guided_regex: Option<String>,
    #[serde(default)]
    guided_choice: Option<Vec<String>>,
    #[serde(default)]
    guided_grammar: Option<String>,
    #[serde(default)]
    json_schema: Option<Value>,
    #[serde(default)]
    grammar: Option<String>,
    #[serde(default)]
    structured_outputs: Option<StructuredOutputs>,
}

#[derive(Debug, Default, Deserialize)]
struct StructuredOutputs {
    #[serde(default)]
    json: Option<Value>,
    #[serde(default)]
    regex: Option<String>,
    #[serde(default)]
    choice: Option<Vec<String>>,
    #[serde(default)]
    grammar: Option<String>,
    #[serde(default)]
    json_object: Option<bool>,
}

impl Guided {
    /// The one that is given; two contradict each other.
    pub(super) fn format(
        self,
        response_format: Option<carat_grammar::Format>,
    ) -> Result<Option<carat_grammar::Format>, ApiError> {
        use carat_grammar::Format;
        let structured = self.structured_outputs.unwrap_or_default();
        let schema = |text: Value| match text {
            // Some clients send the schema's text.
            Value::String(text) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
            other => other,
        };
        let asked: Vec<Format> = [
            response_format,
            self.guided_json
                .map(|s| wire::schema_format(&schema(s), false)),
            self.json_schema
                .map(|s| wire::schema_format(&schema(s), false)),
            structured
                .json
                .map(|s| wire::schema_format(&schema(s), false)),
            self.guided_regex.map(Format::Regex),
            structured.regex.map(Format::Regex),
            self.guided_choice.map(Format::Choice),
            structured.choice.map(Format::Choice),
            self.guided_grammar.map(|g| wire::grammar_format(&g)),
            self.grammar
                .filter(|g| !g.is_empty())
                .map(|g| wire::grammar_format(&g)),
            structured.grammar.map(|g| wire::grammar_format(&g)),
            structured
                .json_object
                .filter(|on| *on)
                .map(|_| Format::JsonObject),
        ]
        .into_iter()
        .flatten()
        .collect();
        if asked.len() > 1 {
            return Err(ApiError::invalid(
                "response_format",
                "more than one format is asked for; give one",
            ));
        }
        Ok(asked.into_iter().next())
    }
}

#[derive(Debug, Deserialize)]
struct Reasoning {
    #[serde(default)]
    effort: Option<String>,
    #[serde(default)]
    max_tokens: Option<u64>,
    #[serde(default)]
    enabled: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(super) struct ThinkingSwitch {
    #[serde(rename = "type", default)]
    pub(super) kind: Option<String>,
    #[serde(default)]
    pub(super) budget_tokens: Option<u64>,
}

/// The template's settings that a request may choose; it sees no others.
#[derive(Debug, Deserialize)]
struct TemplateSettings {
    #[serde(default)]
    enable_thinking: Option<bool>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
}

impl ChatRequest {
    /// The body is read once for each group of fields: what is flattened into another struct loses the path that errors name.
    pub(super) fn read(call: &Call) -> Result<ChatRequest, ApiError> {
        call.check_messages()?;
        let request: ChatRequest = call.json()?;
        Ok(ChatRequest {
            sampling: call.json()?,
            guided: call.json()?,
            ..request
        })
    }

    /// An explicit budget wins over an effort, an effort over a switch.
    fn thought(&self) -> Result<Thought, ApiError> {
        let budget = self
            .thinking
            .as_ref()
            .filter(|t| t.kind.as_deref() != Some("disabled"))
            .and_then(|t| t.budget_tokens)
            .or_else(|| self.reasoning.as_ref().and_then(|r| r.max_tokens));
        if let Some(budget) = budget {
            return Ok(wire::budget(budget));
        }
        let effort = self
            .reasoning_effort
            .as_deref()
            .or_else(|| self.reasoning.as_ref().and_then(|r| r.effort.as_deref()));
        if let Some(effort) = effort {
            return wire::effort(effort, "reasoning_effort");
        }
        let switches = [
            self.think,
            self.reasoning.as_ref().and_then(|r| r.enabled),
            self.thinking
                .as_ref()
                .map(|t| t.kind.as_deref() != Some("disabled")),
            self.chat_template_kwargs
                .as_ref()
                .and_then(|k| k.enable_thinking),
        ];
        Ok(Thought {
            on: switches.into_iter().flatten().next().unwrap_or(false),
            budget: None,
        })
    }

    /// The request as every dialect's.
    pub(super) fn ask(self) -> Result<Ask, ApiError> {
        let thought = self.thought()?;
        let tools = match (&self.tools, &self.functions) {
            (Some(tools), _) => wire::tools(tools, "tools")?,
            (None, Some(functions)) => wire::tools(functions, "functions")?,
            (None, None) => Vec::new(),
        };
        let choice = self.tool_choice.as_ref().or(self.function_call.as_ref());
        let tool_choice = wire::tool_choice(choice, &tools)?;
        let top = ask::top_logprobs("top_logprobs", self.top_logprobs)?;
        let logprobs = match (self.logprobs, top) {
            (Some(true), top) => Some(top.unwrap_or(0)),
            (_, Some(_)) => {
                return Err(ApiError::invalid(
                    "top_logprobs",
                    "top_logprobs needs logprobs to be true",
                ));
            }
            _ => None,
        };
        let (param, most) = match (self.max_completion_tokens, self.max_tokens) {
            (Some(most), _) => ("max_completion_tokens", Some(most)),
            (None, most) => ("max_tokens", most),
        };
        let format = wire::format(self.response_format.as_ref(), "response_format")?;
        let adds_prompt = self.add_generation_prompt.or_else(|| {
            let settings = self.chat_template_kwargs.as_ref();
            settings.and_then(|settings| settings.add_generation_prompt)
        });
        let messages = wire::messages(self.messages)?;
        let continues = adds_prompt == Some(false);
        if continues
            && messages
                .last()
                .is_none_or(|m| m.role != carat_text::Role::Assistant)
        {
            return Err(ApiError::invalid(
                "add_generation_prompt",
                "add_generation_prompt is false, but the last message is not an assistant's to go on with",
            ));
        }
        let conversation = Conversation {
            messages,
            tools,
            thinking: thought.on,
            unix_time: i64::try_from(ids::unix_time()).ok(),
            continues,
        };
        Ok(Ask {
            n: ask::choices(self.n)?,
            sampling: self.sampling.ask()?,
            max_tokens: ask::max_tokens(param, most)?,
            stop: OneOrMany::into_vec(self.stop),
            logprobs,
            ends: Ends::ignored(self.ignore_eos),
            draft: self.draft.unwrap_or(true),
            format: self.guided.format(format)?,
            tool_choice,
            parallel_calls: self.parallel_tool_calls.unwrap_or(true),
            thinking_budget: thought.budget,
            user: self
                .prompt_cache_key
                .or(self.safety_identifier)
                .or(self.user),
            cache_salt: self.cache_salt,
            ..Ask::new(Prompt::Chat(conversation))
        })
    }
}

pub(super) async fn completions(call: Call) -> Result<Response<Body>, ApiError> {
    let request = ChatRequest::read(&call)?;
    let streams = request.stream.unwrap_or(false);
    let options = request.stream_options.unwrap_or_default();
    let explain = request.explain.unwrap_or(false);
    let named = request.model.clone();
    let ask = request.ask()?;
    let n = ask.n;
    let sign = streams.then_some(Sign::Comment);
    let served = call.model(named.as_deref(), sign).await?;
    let (answer, notes) = call.app.answer(&served, ask, &call, "call_").await?;
    let info = &served.model.info;
    let head = Head {
        id: ids::id("chatcmpl-"),
        created: ids::unix_time(),
        model: info.name.clone(),
        fingerprint: info.fingerprint.clone(),
    };
    let extras = Extras {
        explain,
        seed: answer.seed,
        cache: call.cache.clone(),
    };
    let mut response = if streams {
        let encoder = Chunks {
            head,
            options,
            extras,
            tokenizer: Arc::clone(served.model.chat.tokenizer()),
            choices: vec![ChunkState::default(); n],
            prompt_tokens: answer.prompt_tokens,
        };
        stream::stream(&call.app, answer, encoder).await?
    } else {
        let choices = stream::collect(answer).await?;
        Body::json(&whole(
            &head,
            &choices,
            &extras,
            served.model.chat.tokenizer(),
        ))
    };
    note(&mut response, &notes);
    Ok(response)
}

/// Adds the headers that tell what was passed over.
pub(super) fn note(response: &mut Response<Body>, notes: &Notes) {
    if notes.ignored.is_empty() {
        return;
    }
    let list: String = notes.ignored.join(", ").chars().take(1000).collect();
    if let Ok(list) = HeaderValue::from_str(&list) {
        response.headers_mut().insert("x-carat-ignored", list);
    }
}

/// The common part of all chunks of an answer.
struct Head {
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
}

struct Extras {
    explain: bool,
    seed: u64,
    cache: CacheNote,
}

/// Streams by OpenAI's chunks.
struct Chunks {
    head: Head,
    options: StreamOptions,
    extras: Extras,
    tokenizer: Arc<Tokenizer>,
    choices: Vec<ChunkState>,
    prompt_tokens: usize,
}

#[derive(Clone, Default)]
struct ChunkState {
    calls: usize,
    /// The last of the calls is being written.
    in_call: bool,
    tokens: usize,
    invalid: Vec<Value>,
    finished: Option<Finished>,
}

impl Chunks {
    fn chunk(&self, choices: &Value) -> Value {
        let mut chunk = json!({
            "id": self.head.id,
            "object": "chat.completion.chunk",
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": self.head.fingerprint,
            "choices": choices,
        });
        if self.options.continuous_usage_stats == Some(true) {
            let generated: usize = self.choices.iter().map(|c| c.tokens).sum();
            chunk["usage"] = json!({
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": self.prompt_tokens + generated,
            });
        }
        chunk
    }

    fn delta(&self, choice: usize, delta: &Value, out: &mut Vec<u8>) {
        let choice = json!({ "index": choice, "delta": delta, "finish_reason": null });
        stream::data(out, &self.chunk(&json!([choice])));
    }

    fn call_started(&mut self, choice: usize, id: &str, name: &str, out: &mut Vec<u8>) {
        let state = &mut self.choices[choice];
        state.in_call = true;
        state.calls += 1;
        let head = json!({ "tool_calls": [{
            "index": state.calls - 1, "id": id, "type": "function",
            "function": { "name": name, "arguments": "" },
        }]});
        self.delta(choice, &head, out);
    }

    fn call_arguments(&self, choice: usize, json: &str, out: &mut Vec<u8>) {
        let piece = json!({ "tool_calls": [{
            "index": self.choices[choice].calls - 1,
            "function": { "arguments": json },
        }]});
        self.delta(choice, &piece, out);
    }
}

impl Encoder for Chunks {
    const CONTENT_TYPE: &'static str = stream::SSE;
    const STREAMS_CALLS: bool = true;

    /// The roles of all choices come first and once: clients add choices in the order they see them, and join what is said twice.
    fn begin(&mut self, out: &mut Vec<u8>) {
        for choice in 0..self.choices.len() {
            self.delta(choice, &json!({ "role": "assistant", "content": "" }), out);
        }
    }

    fn output(&mut self, choice: usize, output: Output, out: &mut Vec<u8>) {
        self.choices[choice].tokens += 1;
        match output {
            Output::Content { text, tokens } => {
                let mut piece = json!({
                    "index": choice, "delta": { "content": text }, "finish_reason": null,
                });
                if !tokens.is_empty() {
                    piece["logprobs"] = logprobs(&tokens, &self.tokenizer);
                }
                stream::data(out, &self.chunk(&json!([piece])));
            }
            Output::Thinking(text) => {
                self.delta(choice, &json!({ "reasoning_content": text }), out);
            }
            Output::CallStarted { id, name } => self.call_started(choice, &id, &name, out),
            Output::CallArguments(json) => self.call_arguments(choice, &json, out),
            Output::Call(call) => {
                if !mem::take(&mut self.choices[choice].in_call) {
                    let id = call.id.as_deref().unwrap_or_default();
                    self.call_started(choice, id, &call.name, out);
                    self.call_arguments(choice, &arguments(&call), out);
                    self.choices[choice].in_call = false;
                }
            }
            Output::InvalidCall(call) => {
                let state = &mut self.choices[choice];
                state.invalid.push(json!({
                    "text": call.raw, "error": call.error.to_string(),
                }));
                // Of a call that breaks off, the client has what there is.
                if !mem::take(&mut state.in_call) {
                    self.delta(choice, &json!({ "content": call.raw }), out);
                }
            }
            Output::Finished(finished) => {
                let last = json!({
                    "index": choice, "delta": {},
                    "finish_reason": finish_reason(&finished),
                });
                let mut chunk = self.chunk(&json!([last]));
                chunk["timings"] = timings(&finished.usage);
                let state = &mut self.choices[choice];
                if let Some(more) = carat(&self.extras, &finished, &state.invalid, &self.tokenizer)
                {
                    chunk["carat"] = more;
                }
                state.finished = Some(finished);
                stream::data(out, &chunk);
            }
            Output::Failed(error) => self.fail(&error, out),
        }
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        if self.options.include_usage == Some(true) {
            let finished = self.choices.iter().filter_map(|c| c.finished.as_ref());
            let mut chunk = self.chunk(&json!([]));
            chunk["usage"] = usage(finished);
            stream::data(out, &chunk);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        stream::data(out, &error.body(Dialect::OpenAi, ""));
    }

    fn ping(&mut self, out: &mut Vec<u8>) {
        stream::comment(out);
    }
}

fn whole(head: &Head, choices: &[Collected], extras: &Extras, tokenizer: &Tokenizer) -> Value {
    let each = choices.iter().enumerate().map(|(n, choice)| {
        let text = choice.text();
        let has_calls = !choice.calls.is_empty();
        let mut message = json!({
            "role": "assistant",
            "content": if text.is_empty() && has_calls { Value::Null } else { text.into() },
        });
        if !choice.thinking.is_empty() {
            message["reasoning_content"] = choice.thinking.clone().into();
        }
        if has_calls {
            let calls = choice.calls.iter().map(|call| {
                json!({
                    "id": call.id, "type": "function",
                    "function": { "name": call.name, "arguments": arguments(call) },
                })
            });
            message["tool_calls"] = calls.collect();
        }
        json!({
            "index": n,
            "message": message,
            "logprobs": if choice.tokens.is_empty() { Value::Null } else { logprobs(&choice.tokens, tokenizer) },
            "finish_reason": finish_reason(&choice.finished),
        })
    });
    let mut answer = json!({
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": each.collect::<Vec<_>>(),
        "usage": usage(choices.iter().map(|c| &c.finished)),
    });
    if let Some(first) = choices.first() {
        answer["timings"] = timings(&first.finished.usage);
        let invalid: Vec<Value> = choices
            .iter()
            .flat_map(|c| &c.invalid_calls)
            .map(|call| json!({ "text": call.raw, "error": call.error.to_string() }))
            .collect();
        if let Some(more) = carat(extras, &first.finished, &invalid, tokenizer) {
            answer["carat"] = more;
        }
    }
    answer
}

/// Arguments as the text that OpenAI's clients expect.
pub(super) fn arguments(call: &ToolCall) -> String {
    call.arguments_json()
}

pub(super) fn finish_reason(finished: &Finished) -> &'static str {
    match finished.reason {
        ChatFinish::Stop | ChatFinish::Cancelled => "stop",
        // Cut off either way.
        ChatFinish::Length | ChatFinish::Deadline => "length",
        ChatFinish::ToolCalls => "tool_calls",
    }
}

/// Tokens computed for all choices; they share the prompt.
pub(super) fn usage<'a>(finished: impl Iterator<Item = &'a Finished>) -> Value {
    let (mut prompt, mut cached, mut generated, mut thinking) = (0, 0, 0, 0);
    let mut drafts = DraftCounts::default();
    for (n, one) in finished.enumerate() {
        let counts = &one.usage.counts;
        if n == 0 {
            (prompt, cached) = (counts.prompt_tokens, counts.cached_tokens);
        }
        generated += counts.generated_tokens;
        thinking += one.thinking_tokens;
        drafts.add(&counts.drafts);
    }
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": { "cached_tokens": cached },
        "completion_tokens_details": {
            "reasoning_tokens": thinking,
            "accepted_prediction_tokens": drafts.accepted,
            "rejected_prediction_tokens": drafts.drafted - drafts.accepted,
        },
    })
}

/// Speeds under llama.cpp's names.
pub(super) fn timings(usage: &Usage) -> Value {
    let counts = &usage.counts;
    let computed = counts.prompt_tokens - counts.cached_tokens;
    let millis = |d: std::time::Duration| d.as_secs_f64() * 1e3;
    let rate = |tokens: usize, d: std::time::Duration| {
        let seconds = d.as_secs_f64();
        if seconds > 0.0 {
            tokens as f64 / seconds
        } else {
            0.0
        }
    };
    let mut timings = json!({
        "cache_n": counts.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": millis(usage.prefill),
        "prompt_per_second": rate(computed, usage.prefill),
        "predicted_n": counts.generated_tokens,
        "predicted_ms": millis(usage.decode),
        "predicted_per_second": rate(counts.generated_tokens.saturating_sub(1), usage.decode),
    });
    if counts.drafts.drafted > 0 {
        timings["draft_n"] = counts.drafts.drafted.into();
        timings["draft_n_accepted"] = counts.drafts.accepted.into();
        timings["predicted_per_pass"] = counts.drafts.tokens_per_pass().into();
    }
    timings
}

/// Fields that only this server has: if asked, and where something would be lost otherwise.
fn carat(
    extras: &Extras,
    finished: &Finished,
    invalid: &[Value],
    tokenizer: &Tokenizer,
) -> Option<Value> {
    let mut more = Map::new();
    if !invalid.is_empty() {
        more.insert("invalid_calls".to_owned(), invalid.into());
    }
    if extras.explain {
        let counts = &finished.usage.counts;
        more.insert("seed".to_owned(), extras.seed.into());
        let cache = cache::explained(counts, &extras.cache, tokenizer);
        more.insert("cache".to_owned(), cache);
        more.insert(
            "queue_ms".to_owned(),
            (finished.usage.queue.as_secs_f64() * 1e3).into(),
        );
    }
    (!more.is_empty()).then(|| Value::Object(more))
}

fn logprobs(tokens: &[Token], tokenizer: &Tokenizer) -> Value {
    json!({ "content": token_logprobs(tokens, tokenizer), "refusal": null })
}

/// An entry per token, as both of OpenAI's interfaces have them.
pub(super) fn token_logprobs(tokens: &[Token], tokenizer: &Tokenizer) -> Vec<Value> {
    let named = |id: u32, logprob: f32| {
        let bytes = tokenizer.vocab().bytes(id);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        json!({ "token": text, "logprob": logprob, "bytes": bytes })
    };
    let each = tokens.iter().map(|token| {
        // A token that was forced has no probability of its own.
        let mut entry = named(token.id, token.logprob.unwrap_or(0.0));
        let top = token.top.iter().map(|(id, logprob)| named(*id, *logprob));
        entry["top_logprobs"] = top.collect();
        entry
    });
    each.collect()
}
