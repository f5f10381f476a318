//! Tokens and prompts for those who count them, in the shapes of llama.cpp and vLLM at once.

use std::sync::Arc;

use carat_engine::chat::Conversation;
use carat_text::{Json, Specials, TokenDecoder, TokenId, decoder::SpecialText};
use http::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    chat::ChatRequest,
    wire::{self, WireMessage},
};
use crate::{ask::Prompt, body::Body, error::ApiError, http::Call};

#[derive(Debug, Deserialize)]
struct TokenizeRequest {
    #[serde(default)]
    model: Option<String>,
    /// As llama.cpp names it.
    #[serde(default)]
    content: Option<String>,
    /// As vLLM names it.
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    messages: Option<Vec<WireMessage>>,
    #[serde(default)]
    tools: Option<Vec<Json>>,
    #[serde(default)]
    add_special: Option<bool>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    parse_special: Option<bool>,
    #[serde(default)]
    with_pieces: Option<bool>,
}

pub(super) async fn tokenize(call: Call) -> Result<Response<Body>, ApiError> {
    let request: TokenizeRequest = call.json()?;
    let served = call.model(request.model.as_deref(), None).await?;
    let context = served.model.info.context;
    let with_pieces = request.with_pieces.unwrap_or(false);
    let tokens = call
        .app
        .compute(move || -> Result<(Vec<TokenId>, Vec<Value>), ApiError> {
            let chat = &served.model.chat;
            let tokenizer = chat.tokenizer();
            let tokens = if let Some(messages) = request.messages {
                let conversation = Conversation {
                    messages: wire::messages(messages)?,
                    tools: wire::tools(&request.tools.unwrap_or_default(), "tools")?,
                    ..Conversation::default()
                };
                chat.prompt(&conversation)?
            } else {
                let Some(text) = request.content.or(request.prompt) else {
                    return Err(ApiError::invalid(
                        "content",
                        "give `content`, `prompt` or `messages`",
                    ));
                };
                // As both have it: nothing is answered here, and clients learn the numbers of marks in this way.
                let specials = if request.parse_special.unwrap_or(true) {
                    Specials::Parse
                } else {
                    Specials::Ignore
                };
                // vLLM adds the first token unless told otherwise, llama.cpp only if told to.
                let adds = request
                    .add_special
                    .or(request.add_special_tokens)
                    .unwrap_or(false);
                if adds {
                    tokenizer.encode_prompt(&text, specials)
                } else {
                    tokenizer.encode(&text, specials)
                }
            };
            let pieces = if with_pieces {
                let piece = |id: &TokenId| {
                    let bytes = tokenizer.vocab().bytes(*id);
                    match String::from_utf8(bytes) {
                        Ok(text) => json!({ "id": id, "piece": text }),
                        Err(error) => json!({ "id": id, "piece": error.into_bytes() }),
                    }
                };
                tokens.iter().map(piece).collect()
            } else {
                Vec::new()
            };
            Ok((tokens, pieces))
        })
        .await??;
    let (tokens, pieces) = tokens;
    let count = tokens.len();
    let listed = if with_pieces {
        Value::Array(pieces)
    } else {
        json!(tokens)
    };
    Ok(Body::json(&json!({
        "tokens": listed,
        "count": count,
        "max_model_len": context,
    })))
}

#[derive(Debug, Deserialize)]
struct DetokenizeRequest {
    #[serde(default)]
    model: Option<String>,
    tokens: Vec<TokenId>,
}

pub(super) async fn detokenize(call: Call) -> Result<Response<Body>, ApiError> {
    let request: DetokenizeRequest = call.json()?;
    let served = call.model(request.model.as_deref(), None).await?;
    let text = call
        .app
        .compute(move || {
            let tokenizer = served.model.chat.tokenizer();
            let vocab = tokenizer.vocab();
            if let Some(n) = request
                .tokens
                .iter()
                .position(|id| *id as usize >= vocab.len())
            {
                return Err(ApiError::invalid(
                    format!("tokens[{n}]"),
                    format!(
                        "token {} is outside the vocabulary of {}",
                        request.tokens[n],
                        vocab.len()
                    ),
                ));
            }
            // Marks are text here, as `/tokenize` reads them.
            let mut decoder = TokenDecoder::new(Arc::clone(vocab), SpecialText::Show);
            let mut text = String::new();
            for token in &request.tokens {
                decoder.push(*token, &mut text);
            }
            decoder.finish(&mut text);
            Ok(text)
        })
        .await??;
    Ok(Body::json(&json!({ "content": text, "prompt": text })))
}

pub(super) async fn info(call: Call) -> Result<Response<Body>, ApiError> {
    let served = call.model(call.query("model").as_deref(), None).await?;
    let vocab = served.model.chat.tokenizer().vocab();
    let text = |id: TokenId| vocab.text(id).unwrap_or_default();
    let eos = vocab.stop_tokens().first().copied();
    Ok(Body::json(&json!({
        "tokenizer_class": "carat",
        "bos_token": text(vocab.bos()),
        "eos_token": eos.map(text),
        "chat_template": served.model.info.template,
        "vocab_size": vocab.len(),
    })))
}

pub(super) async fn apply_template(call: Call) -> Result<Response<Body>, ApiError> {
    let request = ChatRequest::read(&call)?;
    let named = request.model.clone();
    let ask = request.ask()?;
    ask.check()?;
    let served = call.model(named.as_deref(), None).await?;
    let Prompt::Chat(conversation) = ask.prompt else {
        unreachable!("a chat request has a conversation");
    };
    let context = served.model.info.context;
    let (text, tokens) = call
        .app
        .compute(move || -> Result<_, ApiError> {
            let chat = &served.model.chat;
            let rendered = chat.render(&conversation)?;
            Ok((rendered.text().into_owned(), chat.prompt(&conversation)?))
        })
        .await??;
    Ok(Body::json(&json!({
        "prompt": text,
        "count": tokens.len(),
        "tokens": tokens,
        "max_model_len": context,
    })))
}
