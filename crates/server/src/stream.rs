//! From an answer under way to a response: piece by piece, or whole.

use std::{
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll},
};

use bytes::Bytes;
use carat_engine::chat::Token;
use carat_text::{ToolCall, parts::InvalidCall};
use futures_core::Stream;
use http::{HeaderValue, Response, header};
use tokio::sync::mpsc::Receiver;

use crate::{
    answer::{Answer, Finished, Output, Wait},
    app::App,
    body::{Body, Hand},
    error::ApiError,
    metrics::Metrics,
};

/// A dialect's way to write a stream. Everything is appended to `out`, which is one write.
pub(crate) trait Encoder: Send + 'static {
    /// Of the response.
    const CONTENT_TYPE: &'static str;
    /// The dialect has words for pieces of a call.
    const STREAMS_CALLS: bool = false;

    /// Before the first output.
    fn begin(&mut self, out: &mut Vec<u8>);

    /// A piece of a choice's answer.
    fn output(&mut self, choice: usize, output: Output, out: &mut Vec<u8>);

    /// After the last choice has ended.
    fn end(&mut self, out: &mut Vec<u8>);

    /// It went wrong after it had begun.
    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>);

    /// A sign of life.
    fn ping(&mut self, out: &mut Vec<u8>);
}

pub(crate) const SSE: &str = "text/event-stream; charset=utf-8";
pub(crate) const NDJSON: &str = "application/x-ndjson";

/// Pieces that may wait for a slow reader, beyond which it is not asked for more.
pub(crate) const AHEAD: usize = 16;

/// Streams an answer. Nothing is sent, the status included, before there is something to say or a ping is due: until then a
/// failure has a status of its own, and a router may ask somebody else.
pub(crate) async fn stream<E: Encoder>(
    app: &Arc<App>,
    mut answer: Answer,
    mut encoder: E,
) -> Result<Response<Body>, ApiError> {
    if E::STREAMS_CALLS {
        answer.stream_calls();
    }
    let mut first = Vec::new();
    match answer.wait(app.config.ping).await {
        Wait::Outputs(outputs) => {
            if let Some((_, Output::Failed(error))) = outputs.first() {
                return Err(error.clone());
            }
            encoder.begin(&mut first);
            if !encode(&mut encoder, outputs, &mut first) {
                let whole = Body::Whole(Some(first.into()));
                return Ok(response(E::CONTENT_TYPE, whole));
            }
        }
        Wait::Nothing => {
            encoder.begin(&mut first);
            encoder.ping(&mut first);
        }
        Wait::Ended => encoder.begin(&mut first),
    }
    let ping = app.config.ping;
    let open = Open::new(&app.metrics);
    // Made by the connection itself as it writes: a task and a channel between would be woken for every token, too.
    let body = Body::made(async move |hand: Hand| {
        let _open = open;
        hand.give(first).await;
        loop {
            let mut piece = Vec::new();
            let goes_on = match answer.wait(ping).await {
                Wait::Outputs(outputs) => encode(&mut encoder, outputs, &mut piece),
                Wait::Nothing => {
                    encoder.ping(&mut piece);
                    true
                }
                Wait::Ended => {
                    encoder.end(&mut piece);
                    false
                }
            };
            hand.give(piece).await;
            if !goes_on {
                return;
            }
        }
    });
    Ok(response(E::CONTENT_TYPE, body))
}

/// `false` after a failure, which is the last that is written.
fn encode(encoder: &mut impl Encoder, outputs: Vec<(usize, Output)>, out: &mut Vec<u8>) -> bool {
    for (choice, output) in outputs {
        if let Output::Failed(error) = &output {
            encoder.fail(error, out);
            return false;
        }
        encoder.output(choice, output, out);
    }
    true
}

pub(crate) fn response(content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Body::response(content_type, body);
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// A body of pieces that somebody sends.
pub(crate) fn pieces(receiver: Receiver<Bytes>) -> Body {
    Body::Pieces(Box::pin(Pieces(receiver)))
}

struct Pieces(Receiver<Bytes>);

impl Stream for Pieces {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_recv(context)
    }
}

/// Counts a stream while it lasts.
struct Open(Arc<Metrics>);

impl Open {
    fn new(metrics: &Arc<Metrics>) -> Open {
        metrics.streams_open.fetch_add(1, Ordering::Relaxed);
        Open(Arc::clone(metrics))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.streams_open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One server-sent event of JSON.
pub(crate) fn data(out: &mut Vec<u8>, json: &impl serde::Serialize) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, json).expect("values made here have JSON");
    out.extend_from_slice(b"\n\n");
}

/// One with a name.
pub(crate) fn event(out: &mut Vec<u8>, name: &str, json: &impl serde::Serialize) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    data(out, json);
}

/// One line of JSON.
pub(crate) fn line(out: &mut Vec<u8>, json: &impl serde::Serialize) {
    serde_json::to_writer(&mut *out, json).expect("values made here have JSON");
    out.push(b'\n');
}

/// A comment, which clients pass over.
pub(crate) fn comment(out: &mut Vec<u8>) {
    out.extend_from_slice(b": ping\n\n");
}

/// Waits for the end of an answer that adds up inside its encoder. Nothing of what it writes is kept.
pub(crate) async fn drive<E: Encoder>(mut answer: Answer, encoder: &mut E) -> Result<(), ApiError> {
    let mut unread = Vec::new();
    while let Some(outputs) = answer.next().await {
        for (choice, output) in outputs {
            if let Output::Failed(error) = output {
                return Err(error);
            }
            encoder.output(choice, output, &mut unread);
            unread.clear();
        }
    }
    Ok(())
}

/// The whole answer of a choice.
#[derive(Clone, Debug)]
pub(crate) struct Collected {
    pub(crate) content: String,
    /// Of the content, if their log-probabilities were asked for.
    pub(crate) tokens: Vec<Token>,
    pub(crate) thinking: String,
    pub(crate) calls: Vec<ToolCall>,
    pub(crate) invalid_calls: Vec<InvalidCall>,
    pub(crate) finished: Finished,
}

impl Collected {
    /// The content, with calls that were none in it: as the model wrote them, so that nothing is lost.
    pub(crate) fn text(&self) -> String {
        let raw = self.invalid_calls.iter().map(|call| call.raw.as_str());
        std::iter::once(self.content.as_str()).chain(raw).collect()
    }
}

/// Waits for the whole answer.
pub(crate) async fn collect(mut answer: Answer) -> Result<Vec<Collected>, ApiError> {
    let empty = || {
        (
            String::new(),
            Vec::new(),
            String::new(),
            Vec::new(),
            Vec::new(),
            None,
        )
    };
    let mut choices: Vec<_> = (0..answer.choices()).map(|_| empty()).collect();
    while let Some(outputs) = answer.next().await {
        for (n, output) in outputs {
            let choice = &mut choices[n];
            match output {
                Output::Content { text, tokens } => {
                    choice.0.push_str(&text);
                    choice.1.extend(tokens);
                }
                Output::Thinking(text) => choice.2.push_str(&text),
                Output::CallStarted { .. } | Output::CallArguments(_) => {}
                Output::Call(call) => choice.3.push(call),
                Output::InvalidCall(call) => choice.4.push(call),
                Output::Finished(finished) => choice.5 = Some(finished),
                Output::Failed(error) => return Err(error),
            }
        }
    }
    let finished = |(content, tokens, thinking, calls, invalid_calls, finished): (
        _,
        _,
        _,
        _,
        _,
        Option<_>,
    )| Collected {
        content,
        tokens,
        thinking,
        calls,
        invalid_calls,
        finished: finished.expect("an answer ends with this or with a failure"),
    };
    Ok(choices.into_iter().map(finished).collect())
}
