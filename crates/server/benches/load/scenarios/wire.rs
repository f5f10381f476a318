//! Requests that scenarios send.

use serde_json::{Value, json};

/// OpenAI's chat, of so many tokens whatever the model would like.
pub(super) fn chat(content: &str, max_tokens: usize, stream: bool) -> Value {
    json!({
        "model": "pip",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": true,
        "stream": stream,
    })
}

/// With more fields.
pub(super) fn with(mut body: Value, more: &Value) -> Value {
    if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
        body.extend(more.clone());
    }
    body
}
