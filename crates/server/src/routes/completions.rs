//! `POST /v1/completions`: text that goes on, without a template.

use std::sync::Arc;

use carat_engine::chat::Token;
use carat_text::{TokenId, Tokenizer};
use http::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    chat::{self, Guided, StreamOptions, WireSampling},
    wire::{self, OneOrMany},
};
use crate::{
    answer::{Finished, Output},
    ask::{self, Ask, Ends, Prompt, Text},
    attend::Sign,
    body::Body,
    error::{ApiError, Dialect},
    http::Call,
    ids,
    stream::{self, Encoder},
};

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    #[serde(default)]
    model: Option<String>,
    prompt: WirePrompt,
    #[serde(default)]
    suffix: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    #[serde(default)]
    max_tokens: Option<i64>,
    #[serde(skip)]
    sampling: WireSampling,
    #[serde(default)]
    stop: Option<OneOrMany>,
    #[serde(default)]
    n: Option<u64>,
    #[serde(default)]
    best_of: Option<u64>,
    #[serde(default)]
    logprobs: Option<u64>,
    #[serde(default)]
    echo: Option<bool>,
    #[serde(default)]
    response_format: Option<Value>,
    #[serde(skip)]
    guided: Guided,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    ignore_eos: Option<bool>,
    #[serde(default)]
    draft: Option<bool>,
    #[serde(default)]
    cache_salt: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum WirePrompt {
    Text(String),
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<TokenId>>),
}

impl WirePrompt {
    fn texts(self) -> Vec<Text> {
        match self {
            WirePrompt::Text(text) => vec![Text::Plain(text)],
            WirePrompt::Tokens(tokens) => vec![Text::Tokens(tokens)],
            WirePrompt::Texts(texts) => texts.into_iter().map(Text::Plain).collect(),
            WirePrompt::TokenLists(lists) => lists.into_iter().map(Text::Tokens).collect(),
        }
    }
}

/// Tokens where a request does not say, as OpenAI has it.
const USUAL_TOKENS: usize = 16;

impl CompletionRequest {
    /// The request as every dialect's.
    fn ask(self) -> Result<Ask, ApiError> {
        if self.suffix.as_deref().is_some_and(|s| !s.is_empty()) {
            return Err(ApiError::invalid(
                "suffix",
                "suffix is not supported: this model continues text and does not fill gaps",
            ));
        }
        let n = ask::choices(self.n)?;
        if self.best_of.is_some_and(|best| best != n as u64) {
            return Err(ApiError::invalid(
                "best_of",
                format!("best_of must equal n, which is {n}: answers are not ranked here"),
            ));
        }
        let echo = self.echo.unwrap_or(false);
        let logprobs = ask::top_logprobs("logprobs", self.logprobs)?;
        if echo && logprobs.is_some() && self.stream == Some(true) {
            return Err(ApiError::invalid(
                "stream",
                "echo with logprobs comes in one piece; leave stream out",
            ));
        }
        let format = wire::format(self.response_format.as_ref(), "response_format")?;
        let max_tokens = ask::max_tokens("max_tokens", self.max_tokens)?;
        // Who measures a text, as lm-eval does, counts on one token behind it, whatever that is.
        let measures = echo && logprobs.is_some() && max_tokens == Some(1) && format.is_none();
        Ok(Ask {
            n,
            sampling: self.sampling.ask()?,
            max_tokens: max_tokens.or(self.max_tokens.is_none().then_some(USUAL_TOKENS)),
            stop: OneOrMany::into_vec(self.stop),
            logprobs,
            prompt_logprobs: logprobs.filter(|_| echo),
            ends: if measures {
                Ends::Shown
            } else {
                Ends::ignored(self.ignore_eos)
            },
            draft: self.draft.unwrap_or(true),
            format: self.guided.format(format)?,
            user: self.user,
            cache_salt: self.cache_salt,
            ..Ask::new(Prompt::Texts(self.prompt.texts()))
        })
    }
}

pub(super) async fn completions(call: Call) -> Result<Response<Body>, ApiError> {
    let request = CompletionRequest {
        sampling: call.json()?,
        guided: call.json()?,
        ..call.json()?
    };
    let echo = request.echo.unwrap_or(false);
    let streams = request.stream.unwrap_or(false);
    let options = request.stream_options.unwrap_or_default();
    let named = request.model.clone();
    let ask = request.ask()?;
    let n = ask.n;
    let sign = streams.then_some(Sign::Comment);
    let served = call.model(named.as_deref(), sign).await?;
    let tokenizer = Arc::clone(served.model.chat.tokenizer());
    let Prompt::Texts(texts) = &ask.prompt else {
        unreachable!("a completion continues text");
    };
    let echoed: Vec<String> = if echo {
        texts.iter().map(|text| echo_of(text, &tokenizer)).collect()
    } else {
        Vec::new()
    };
    let firsts: Vec<Option<TokenId>> = texts.iter().map(|text| first(text, &tokenizer)).collect();
    let (answer, notes) = call.app.answer(&served, ask, &call, "call_").await?;
    let info = &served.model.info;
    let head = json!({
        "id": ids::id("cmpl-"),
        "object": "text_completion",
        "created": ids::unix_time(),
        "model": info.name,
        "system_fingerprint": info.fingerprint,
    });
    let mut response = if streams {
        let choices = answer.choices();
        let encoder = Chunks {
            head,
            options,
            tokenizer,
            echoed: echoed
                .into_iter()
                .flat_map(|text| std::iter::repeat_n(text, n))
                .collect(),
            offsets: vec![0; choices],
            finished: vec![None; choices],
            n,
        };
        stream::stream(&call.app, answer, encoder).await?
    } else {
        let choices = stream::collect(answer).await?;
        let each = choices.iter().enumerate().map(|(index, choice)| {
            let mut text = echoed.get(index / n).cloned().unwrap_or_default();
            let (mut offset, tokens) = if choice.finished.prompt.is_empty() {
                (text.len(), choice.tokens.clone())
            } else {
                // Nothing stands before the first token, so nothing is said of it.
                let first = firsts[index / n].map(|id| Token {
                    id,
                    logprob: None,
                    top: Vec::new(),
                });
                let prompt = choice.finished.prompt.iter().cloned();
                let shown = choice.tokens.iter();
                let answer = shown.chain(&choice.finished.unshown).cloned();
                (0, first.into_iter().chain(prompt).chain(answer).collect())
            };
            text.push_str(&choice.text());
            json!({
                "index": index,
                "text": text,
                "logprobs": lists(&tokens, &tokenizer, &mut offset),
                "finish_reason": chat::finish_reason(&choice.finished),
            })
        });
        let mut whole = head;
        whole["choices"] = each.collect();
        whole["usage"] = usage(choices.iter().map(|c| &c.finished), n);
        if let Some(first) = choices.first() {
            whole["timings"] = chat::timings(&first.finished.usage);
        }
        Body::json(&whole)
    };
    chat::note(&mut response, &notes);
    Ok(response)
}

fn echo_of(text: &Text, tokenizer: &Tokenizer) -> String {
    match text {
        Text::Plain(text) => text.clone(),
        Text::Tokens(tokens) => tokenizer.decode(tokens),
    }
}

/// The first token of a prompt.
fn first(text: &Text, tokenizer: &Tokenizer) -> Option<TokenId> {
    match text {
        Text::Plain(_) => Some(tokenizer.vocab().bos()),
        Text::Tokens(tokens) => tokens.first().copied(),
    }
}

/// Of several prompts with `n` answers each.
fn usage<'a>(finished: impl Iterator<Item = &'a Finished>, n: usize) -> Value {
    let all: Vec<_> = finished.collect();
    let mut prompt = 0;
    let mut cached = 0;
    for first in all.iter().step_by(n) {
        prompt += first.usage.counts.prompt_tokens;
        cached += first.usage.counts.cached_tokens;
    }
    let generated: usize = all.iter().map(|f| f.usage.counts.generated_tokens).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

struct Chunks {
    head: Value,
    options: StreamOptions,
    tokenizer: Arc<Tokenizer>,
    echoed: Vec<String>,
    offsets: Vec<usize>,
    finished: Vec<Option<Finished>>,
    /// Answers to each prompt.
    n: usize,
}

impl Chunks {
    fn send(&self, choices: Value, out: &mut Vec<u8>) {
        let mut chunk = self.head.clone();
        chunk["choices"] = choices;
        stream::data(out, &chunk);
    }

    fn text(&mut self, index: usize, text: &str, tokens: &[Token], out: &mut Vec<u8>) {
        let logprobs = lists(tokens, &self.tokenizer, &mut self.offsets[index]);
        let choice = json!({
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": null,
        });
        self.send(json!([choice]), out);
    }
}

impl Encoder for Chunks {
    const CONTENT_TYPE: &'static str = stream::SSE;

    fn begin(&mut self, out: &mut Vec<u8>) {
        for (index, text) in std::mem::take(&mut self.echoed).into_iter().enumerate() {
            self.offsets[index] = text.len();
            self.text(index, &text, &[], out);
        }
    }

    fn output(&mut self, index: usize, output: Output, out: &mut Vec<u8>) {
        match output {
            Output::Content { text, tokens } => self.text(index, &text, &tokens, out),
            Output::Finished(finished) => {
                let choice = json!({
                    "index": index, "text": "", "logprobs": null,
                    "finish_reason": chat::finish_reason(&finished),
                });
                self.finished[index] = Some(finished);
                self.send(json!([choice]), out);
            }
            Output::Failed(error) => self.fail(&error, out),
            // Plain text has neither thoughts nor calls.
            Output::Thinking(_)
            | Output::CallStarted { .. }
            | Output::CallArguments(_)
            | Output::Call(_)
            | Output::InvalidCall(_) => {}
        }
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        if self.options.include_usage == Some(true) {
            let mut chunk = self.head.clone();
            chunk["choices"] = json!([]);
            chunk["usage"] = usage(self.finished.iter().flatten(), self.n);
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

/// Log-probabilities as four lists of one length.
fn lists(tokens: &[Token], tokenizer: &Tokenizer, offset: &mut usize) -> Value {
    if tokens.is_empty() {
        return Value::Null;
    }
    let text = |id: TokenId| String::from_utf8_lossy(&tokenizer.vocab().bytes(id)).into_owned();
    let mut names = Vec::new();
    let mut values = Vec::new();
    let mut tops = Vec::new();
    let mut offsets = Vec::new();
    for token in tokens {
        let name = text(token.id);
        offsets.push(*offset);
        *offset += name.len();
        names.push(name);
        values.push(token.logprob);
        let mut top = Map::new();
        for (id, logprob) in &token.top {
            // Best first: of two tokens with one text the likelier stays.
            top.entry(text(*id)).or_insert_with(|| json!(logprob));
        }
        tops.push(token.logprob.map(|_| top));
    }
    json!({
        "tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets,
    })
}
