//! Errors, as each dialect says them: a status, a type, a sentence that names the value and the way out.

use std::time::Duration;

use carat_engine::{EngineError, Rejected, chat::ChatError};
use carat_text::TextError;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use crate::{app::App, body::Body};

/// The family of clients a route is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Dialect {
    /// Routes that do not exist speak a dialect too.
    pub(crate) fn of_path(path: &str) -> Dialect {
        if path.starts_with("/v1/messages") {
            Dialect::Anthropic
        } else if path.starts_with("/api/") {
            Dialect::Ollama
        } else {
            Dialect::OpenAi
        }
    }
}

/// Kind of failure. Decides the status and the types that clients look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    InvalidValue,
    ContextLength,
    UnsupportedSchema,
    WrongKey,
    Forbidden,
    UnknownRoute,
    UnknownModel,
    WrongMethod,
    HeadTooLarge,
    BodyTooLarge,
    MediaType,
    QueueFull,
    Loading,
    LoadFailed,
    OverBudget,
    Draining,
    QueueTimeout,
    EngineFailed,
    NotSupported,
}

impl Kind {
    pub(crate) fn status(self, dialect: Dialect) -> StatusCode {
        match self {
            Kind::InvalidValue | Kind::ContextLength | Kind::UnsupportedSchema => {
                StatusCode::BAD_REQUEST
            }
            Kind::WrongKey => StatusCode::UNAUTHORIZED,
            Kind::Forbidden => StatusCode::FORBIDDEN,
            Kind::UnknownRoute | Kind::UnknownModel => StatusCode::NOT_FOUND,
            Kind::WrongMethod => StatusCode::METHOD_NOT_ALLOWED,
            Kind::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Kind::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            // Anthropic's own status for it, which its clients retry.
            Kind::QueueFull if dialect == Dialect::Anthropic => {
                StatusCode::from_u16(529).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
            }
            Kind::QueueFull => StatusCode::TOO_MANY_REQUESTS,
            Kind::Loading
            | Kind::LoadFailed
            | Kind::OverBudget
            | Kind::Draining
            | Kind::QueueTimeout => StatusCode::SERVICE_UNAVAILABLE,
            Kind::EngineFailed => StatusCode::INTERNAL_SERVER_ERROR,
            Kind::NotSupported => StatusCode::NOT_IMPLEMENTED,
        }
    }

    /// OpenAI's type and code.
    fn openai(self) -> (&'static str, Option<&'static str>) {
        let invalid = "invalid_request_error";
        match self {
            Kind::InvalidValue => (invalid, Some("invalid_value")),
            Kind::ContextLength => (invalid, Some("context_length_exceeded")),
            Kind::UnsupportedSchema => (invalid, Some("unsupported_schema")),
            Kind::WrongKey => ("authentication_error", Some("invalid_api_key")),
            Kind::Forbidden => ("permission_error", None),
            Kind::UnknownRoute => ("not_found_error", None),
            Kind::UnknownModel => ("not_found_error", Some("model_not_found")),
            Kind::WrongMethod | Kind::MediaType | Kind::HeadTooLarge => (invalid, None),
            Kind::BodyTooLarge => (invalid, Some("body_too_large")),
            Kind::QueueFull => ("rate_limit_error", Some("queue_full")),
            Kind::Loading => ("unavailable_error", Some("model_loading")),
            Kind::LoadFailed => ("unavailable_error", Some("model_load_failed")),
            Kind::OverBudget => ("unavailable_error", Some("model_over_budget")),
            Kind::Draining => ("unavailable_error", Some("draining")),
            Kind::QueueTimeout => ("unavailable_error", Some("queue_timeout")),
            Kind::EngineFailed => ("server_error", Some("engine_failed")),
            Kind::NotSupported => ("not_supported_error", None),
        }
    }

    fn anthropic(self) -> &'static str {
        match self {
            Kind::InvalidValue
            | Kind::ContextLength
            | Kind::UnsupportedSchema
            | Kind::WrongMethod
            | Kind::MediaType => "invalid_request_error",
            Kind::WrongKey => "authentication_error",
            Kind::Forbidden => "permission_error",
            Kind::UnknownRoute | Kind::UnknownModel => "not_found_error",
            Kind::HeadTooLarge | Kind::BodyTooLarge => "request_too_large",
            Kind::QueueFull => "overloaded_error",
            Kind::Loading
            | Kind::LoadFailed
            | Kind::OverBudget
            | Kind::Draining
            | Kind::QueueTimeout
            | Kind::EngineFailed
            | Kind::NotSupported => "api_error",
        }
    }
}

/// A failure on its way to a client.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) kind: Kind,
    pub(crate) message: String,
    /// Place in the request: a JSON path.
    pub(crate) param: Option<String>,
    pub(crate) retry_after: Option<Duration>,
    /// More fields of OpenAI's object.
    pub(crate) extra: Vec<(&'static str, Value)>,
}

impl ApiError {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> ApiError {
        let waits = matches!(
            kind,
            Kind::QueueFull | Kind::Loading | Kind::Draining | Kind::QueueTimeout
        );
        ApiError {
            kind,
            message: message.into(),
            param: None,
            retry_after: waits.then(|| Duration::from_secs(1)),
            extra: Vec::new(),
        }
    }

    /// A value that cannot be.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError {
            param: Some(param.into()),
            ..ApiError::new(Kind::InvalidValue, message)
        }
    }

    /// Remembers it where it is this side's fault.
    pub(crate) fn note(&self, app: &App) {
        if matches!(self.kind, Kind::EngineFailed | Kind::LoadFailed) {
            app.watch.fault(&self.message);
        }
    }

    /// The error as the dialect's JSON.
    pub(crate) fn body(&self, dialect: Dialect, request_id: &str) -> Value {
        match dialect {
            Dialect::OpenAi => {
                let (kind, code) = self.kind.openai();
                let mut error = json!({
                    "message": self.message,
                    "type": kind,
                    "param": self.param,
                    "code": code,
                });
                if let Value::Object(error) = &mut error {
                    let extra = self.extra.iter().cloned();
                    error.extend(extra.map(|(key, value)| (key.to_owned(), value)));
                }
                json!({ "error": error })
            }
            Dialect::Anthropic => json!({
                "type": "error",
                "error": { "type": self.kind.anthropic(), "message": self.located() },
                "request_id": request_id,
            }),
            Dialect::Ollama => json!({ "error": self.located() }),
        }
    }

    /// The message, with the place in the request for dialects that have no field for it.
    fn located(&self) -> String {
        match &self.param {
            Some(param)
                if matches!(self.kind, Kind::InvalidValue | Kind::UnsupportedSchema)
                    && !self.message.contains(param.as_str()) =>
            {
                format!("{param}: {}", self.message)
            }
            _ => self.message.clone(),
        }
    }

    pub(crate) fn response(&self, dialect: Dialect, request_id: &str) -> Response<Body> {
        let mut response = Body::json(&self.body(dialect, request_id));
        *response.status_mut() = self.kind.status(dialect);
        let headers = response.headers_mut();
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_secs().clamp(1, 60);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            headers.insert("retry-after-ms", HeaderValue::from(seconds * 1000));
        }
        if matches!(self.kind, Kind::EngineFailed | Kind::OverBudget) {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if self.kind == Kind::WrongKey {
            let scheme = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

/// A prompt that leaves no room. The words "maximum context length" and "prompt is too long" are what clients look for.
pub(crate) fn too_long(prompt: usize, context: usize) -> ApiError {
    ApiError {
        extra: vec![
            ("n_prompt_tokens", prompt.into()),
            ("n_ctx", context.into()),
        ],
        param: Some("messages".to_owned()),
        ..ApiError::new(
            Kind::ContextLength,
            format!(
                "prompt is too long: {prompt} tokens > {} maximum; this model's maximum context length is {context} tokens, one of \
                 which is for the answer. Shorten the prompt, or start the server with a larger --context",
                context - 1
            ),
        )
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> ApiError {
        ApiError::invalid("messages", chain(&error))
    }
}

impl From<Rejected> for ApiError {
    fn from(rejected: Rejected) -> ApiError {
        match rejected {
            Rejected::Busy { .. } => ApiError::new(Kind::QueueFull, rejected.to_string()),
            Rejected::Stopped => ApiError::new(Kind::EngineFailed, rejected.to_string()),
            Rejected::OverContext {
                prompt, context, ..
            } => too_long(prompt, context),
            Rejected::OverPages { prompt, room, .. } => too_long(prompt, room),
            _ => ApiError::new(Kind::InvalidValue, rejected.to_string()),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        ApiError::new(Kind::EngineFailed, chain(&error))
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> ApiError {
        match error {
            ChatError::Text(error) => error.into(),
            ChatError::Rejected(rejected) => rejected.into(),
            ChatError::Engine(error) => error.into(),
        }
    }
}

/// An error and all its causes, as one sentence.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text.push_str(": ");
        text.push_str(&source.to_string());
        cause = source.source();
    }
    text
}
