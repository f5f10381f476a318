//! Answers that tests of encoders feed them.

use std::time::Duration;

use carat_engine::{Usage, chat::ChatFinish};
use carat_text::ToolCall;
use serde_json::Value;

use crate::{
    answer::{Finished, Output},
    stream::Encoder,
    testing::without_ids,
};

pub(super) fn content(text: &str) -> Output {
    Output::Content {
        text: text.to_owned(),
        tokens: Vec::new(),
    }
}

pub(super) fn thinking(text: &str) -> Output {
    Output::Thinking(text.to_owned())
}

pub(super) fn call(name: &str, arguments: Value) -> Output {
    Output::Call(ToolCall {
        id: Some(format!("call_{name}")),
        name: name.to_owned(),
        arguments,
    })
}

/// 10 tokens of prompt, 4 of them cached; 7 generated, 2 of them thought; 2 ms and 3 ms.
pub(super) fn finished(reason: ChatFinish) -> Output {
    let mut usage = Usage::default();
    usage.counts.prompt_tokens = 10;
    usage.counts.cached_tokens = 4;
    usage.counts.generated_tokens = 7;
    usage.prefill = Duration::from_millis(2);
    usage.decode = Duration::from_millis(3);
    Output::Finished(Finished {
        reason,
        stop: None,
        usage,
        thinking_tokens: 2,
        prompt: Vec::new(),
        unshown: Vec::new(),
    })
}

/// Ended by a stop string.
pub(super) fn stopped(by: &str) -> Output {
    match finished(ChatFinish::Stop) {
        Output::Finished(finished) => Output::Finished(Finished {
            stop: Some(by.to_owned()),
            ..finished
        }),
        other => other,
    }
}

/// Everything an encoder writes for an answer of one choice.
pub(super) fn bytes(mut encoder: impl Encoder, outputs: Vec<Output>) -> Vec<u8> {
    let mut out = Vec::new();
    encoder.begin(&mut out);
    for output in outputs {
        encoder.output(0, output, &mut out);
    }
    encoder.end(&mut out);
    out
}

/// The same, readable and without what is random.
pub(super) fn transcript(encoder: impl Encoder, outputs: Vec<Output>) -> String {
    without_ids(&String::from_utf8_lossy(&bytes(encoder, outputs)))
}

/// Ways to cut a text into pieces: whole, at every place, and into characters.
pub(super) fn splits(text: &str) -> Vec<Vec<&str>> {
    let mut ways = vec![vec![text]];
    let cuts = text.char_indices().map(|(at, _)| at).skip(1);
    ways.extend(cuts.map(|at| vec![&text[..at], &text[at..]]));
    ways.push(text.split_inclusive(|_| true).collect());
    ways
}

/// Text that JSON, lines and UTF-8 make trouble with.
pub(super) const AWKWARD: &str = "a\n\ndata: \"\u{e9}\\\r\nevent: x\u{2028}\u{1f600}\u{0}: ";
