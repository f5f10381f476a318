//! From Ollama's requests to everybody's.

use carat_engine::chat::Conversation;
use carat_grammar::Format;
use carat_text::{Json, Message};
use serde::Deserialize;
use serde_json::Value;

use super::super::wire::{self, OneOrMany, Thought, WireMessage, shown};
use crate::{
    ask::{self, Ask, Prompt, SamplingAsk, Text},
    error::ApiError,
    ids,
};

#[derive(Debug, Deserialize)]
pub(super) struct ChatRequest {
    #[serde(default)]
    pub(super) model: Option<String>,
    #[serde(default)]
    pub(super) messages: Vec<WireMessage>,
    #[serde(default)]
    pub(super) stream: Option<bool>,
    #[serde(default)]
    format: Value,
    #[serde(default)]
    options: Option<Options>,
    #[serde(default)]
    think: Value,
    #[serde(default)]
    tools: Option<Vec<Json>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct GenerateRequest {
    #[serde(default)]
    pub(super) model: Option<String>,
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    system: Option<String>,
    #[serde(default)]
    suffix: Option<String>,
    #[serde(default)]
    template: Option<String>,
    #[serde(default)]
    images: Option<Vec<Value>>,
    #[serde(default)]
    raw: Option<bool>,
    #[serde(default)]
    pub(super) stream: Option<bool>,
    #[serde(default)]
    format: Value,
    #[serde(default)]
    options: Option<Options>,
    #[serde(default)]
    think: Value,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Options {
    #[serde(default)]
    num_predict: Option<i64>,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_k: Option<i64>,
    #[serde(default)]
    top_p: Option<f32>,
    #[serde(default)]
    min_p: Option<f32>,
    #[serde(default)]
    seed: Option<i64>,
    #[serde(default)]
    stop: Option<OneOrMany>,
    #[serde(default)]
    repeat_penalty: Option<f32>,
    #[serde(default)]
    presence_penalty: Option<f32>,
    #[serde(default)]
    frequency_penalty: Option<f32>,
    #[serde(default)]
    num_ctx: Option<Value>,
}

impl Options {
    /// Tells the log what is passed over: a context has its size from the start of the server.
    fn note(this: Option<&Options>, request_id: &str) {
        if let Some(asked) = this.and_then(|options| options.num_ctx.as_ref()) {
            tracing::debug!(request = request_id, num_ctx = %asked, "num_ctx is ignored; --context sets it");
        }
    }

    fn ask(self, prompt: Prompt) -> Result<Ask, ApiError> {
        // -2 fills the context, which is the most there can be.
        let most = self.num_predict.filter(|most| *most != -2);
        Ok(Ask {
            sampling: SamplingAsk {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                repeat_penalty: self.repeat_penalty,
                presence_penalty: self.presence_penalty,
                frequency_penalty: self.frequency_penalty,
                seed: self.seed.filter(|seed| *seed != -1).map(|seed| seed as u64),
                ..SamplingAsk::default()
            },
            max_tokens: ask::max_tokens("options.num_predict", most)?,
            stop: OneOrMany::into_vec(self.stop),
            ..Ask::new(prompt)
        })
    }
}

impl ChatRequest {
    pub(super) fn note(&self, request_id: &str) {
        Options::note(self.options.as_ref(), request_id);
    }

    /// The request as every dialect's.
    pub(super) fn ask(self) -> Result<Ask, ApiError> {
        let thought = thought(&self.think)?;
        let format = format(&self.format)?;
        let conversation = Conversation {
            messages: wire::messages(self.messages)?,
            tools: wire::tools(&self.tools.unwrap_or_default(), "tools")?,
            thinking: thought.on,
            unix_time: i64::try_from(ids::unix_time()).ok(),
            continues: false,
        };
        Ok(Ask {
            format,
            thinking_budget: thought.budget,
            ..self
                .options
                .unwrap_or_default()
                .ask(Prompt::Chat(conversation))?
        })
    }
}

impl GenerateRequest {
    pub(super) fn note(&self, request_id: &str) {
        Options::note(self.options.as_ref(), request_id);
    }

    /// Nothing is asked.
    pub(super) fn is_empty(&self) -> bool {
        self.prompt.as_ref().is_none_or(String::is_empty)
    }

    /// The request as every dialect's: a conversation of one question, or bare text.
    pub(super) fn ask(self) -> Result<Ask, ApiError> {
        let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let refused = [
            (
                "suffix",
                given(&self.suffix),
                "suffix is not supported: this model continues text and does not fill gaps",
            ),
            (
                "template",
                given(&self.template),
                "template is not supported: the model's own is used, or none if `raw` is true",
            ),
            (
                "images",
                self.images.is_some_and(|images| !images.is_empty()),
                "images are not supported here; only text is",
            ),
        ];
        for (param, is_given, why) in refused {
            if is_given {
                return Err(ApiError::invalid(param, why));
            }
        }
        let format = format(&self.format)?;
        let prompt = self.prompt.unwrap_or_default();
        if self.raw == Some(true) {
            let prompt = Prompt::Texts(vec![Text::Plain(prompt)]);
            return Ok(Ask {
                format,
                ..self.options.unwrap_or_default().ask(prompt)?
            });
        }
        let thought = thought(&self.think)?;
        let system = self.system.filter(|system| !system.is_empty());
        let mut messages: Vec<Message> = system.map(Message::system).into_iter().collect();
        messages.push(Message::user(prompt));
        let conversation = Conversation {
            messages,
            thinking: thought.on,
            unix_time: i64::try_from(ids::unix_time()).ok(),
            ..Conversation::default()
        };
        Ok(Ask {
            format,
            thinking_budget: thought.budget,
            ..self
                .options
                .unwrap_or_default()
                .ask(Prompt::Chat(conversation))?
        })
    }
}

fn thought(think: &Value) -> Result<Thought, ApiError> {
    match think {
        Value::Null => Ok(Thought::default()),
        Value::Bool(on) => Ok(Thought {
            on: *on,
            budget: None,
        }),
        Value::String(level) => wire::effort(level, "think"),
        _ => Err(ApiError::invalid(
            "think",
            "think must be true, false or a level such as \"low\"",
        )),
    }
}

fn format(format: &Value) -> Result<Option<Format>, ApiError> {
    match format {
        Value::Null => Ok(None),
        Value::String(word) => match word.as_str() {
            "" => Ok(None),
            "json" => Ok(Some(Format::JsonObject)),
            other => Err(ApiError::invalid(
                "format",
                format!("`{}` is no format; use \"json\" or a schema", shown(other)),
            )),
        },
        Value::Object(_) => Ok(Some(wire::schema_format(format, false))),
        _ => Err(ApiError::invalid(
            "format",
            "format must be \"json\" or a JSON schema",
        )),
    }
}
