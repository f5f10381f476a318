//! Messages in, parts of an answer out: the façade that every front end uses.
//!
//! Rendering, encoding, decoding and parsing happen on the caller's thread; the engine sees tokens alone. Dropping the
//! stream stops the generation.

use std::{sync::Arc, time::Duration};

use carat_model::sampling::Sampling;
use carat_text::{
    ChatTemplate, Message, Part, PartsParser, RenderOptions, Specials, StopStrings, TextError,
    TokenDecoder, TokenId, Tokenizer, Tool, decoder::SpecialText,
};

use crate::{
    EngineError, EngineHandle, Event, FinishReason, Rejected, Request, TokenStream, Usage,
};

/// A model that can be talked to.
#[derive(Clone)]
pub struct Chat {
    engine: EngineHandle,
    tokenizer: Arc<Tokenizer>,
    template: Arc<ChatTemplate>,
}

/// How an answer is generated.
#[derive(Clone, Debug, Default)]
pub struct Generation {
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// `None` goes on until the model stops or the context is full.
    pub max_tokens: Option<usize>,
    /// The answer ends where one of these would appear, without it.
    pub stop: Vec<String>,
    /// Generate past stop tokens: for benchmarks.
    pub ignore_eos: bool,
    /// Report log-probabilities of each token, and of this many of the likeliest.
    pub logprobs: Option<usize>,
}

/// A conversation to continue.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// All turns so far.
    pub messages: Vec<Message>,
    /// Tools the model may call.
    pub tools: Vec<Tool>,
    /// Whether the model thinks before it answers.
    pub thinking: bool,
    /// Seconds since 1970, for templates that write the date.
    pub unix_time: Option<i64>,
}

/// What a stream yields, in order; `Finished` comes last.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatEvent {
    /// Every generated token, before the parts it brings about.
    Token(Token),
    /// The next piece of the answer, as text.
    Part(Part),
    /// Always the last.
    Finished {
        /// Why it is over.
        reason: ChatFinish,
        /// What it took.
        usage: Usage,
    },
}

/// A token of the answer, as it was generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: TokenId,
    /// Under the model itself; if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens, best first; if asked for.
    pub top: Vec<(TokenId, f32)>,
}

/// Why an answer is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatFinish {
    /// The model ended its turn, or a stop string appeared.
    Stop,
    /// The most tokens asked for, or the context, are used up.
    Length,
    /// The model waits for the results of its tool calls.
    ToolCalls,
    /// The caller lost interest.
    Cancelled,
}

/// Why a chat could not go on.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The conversation could not be rendered or encoded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The engine did not accept it.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// The engine gave it up.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl Chat {
    /// Of a running engine, and of the file its model came from.
    pub fn new(
        engine: EngineHandle,
        tokenizer: Arc<Tokenizer>,
        template: Arc<ChatTemplate>,
    ) -> Chat {
        Chat {
            engine,
            tokenizer,
            template,
        }
    }

    /// As the model's file defines it.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The tokens a conversation becomes.
    pub fn prompt(&self, conversation: &Conversation) -> Result<Vec<TokenId>, TextError> {
        let options = RenderOptions {
            thinking: conversation.thinking,
            unix_time: conversation.unix_time,
            ..RenderOptions::default()
        };
        let rendered =
            self.template
                .render(&conversation.messages, &conversation.tools, &options)?;
        Ok(self.tokenizer.encode_rendered(&rendered))
    }

    /// Answers the conversation.
    pub fn answer(
        &self,
        conversation: &Conversation,
        generation: &Generation,
    ) -> Result<ChatStream, ChatError> {
        let prompt = self.prompt(conversation)?;
        if generation.ignore_eos {
            // What follows the end of an answer has no parts.
            return self.start(prompt, generation, self.plain_reading());
        }
        let mut parser = PartsParser::new(Arc::clone(self.tokenizer.vocab()), &conversation.tools);
        parser.start_after(&prompt);
        self.start(prompt, generation, Reading::Parts(parser))
    }

    /// Continues plain text, without a template.
    pub fn complete(&self, text: &str, generation: &Generation) -> Result<ChatStream, ChatError> {
        let prompt = self.tokenizer.encode_prompt(text, Specials::Ignore);
        self.start(prompt, generation, self.plain_reading())
    }

    fn plain_reading(&self) -> Reading {
        let vocab = Arc::clone(self.tokenizer.vocab());
        Reading::Plain(TokenDecoder::new(vocab, SpecialText::Hide))
    }

    fn start(
        &self,
        prompt: Vec<TokenId>,
        generation: &Generation,
        reading: Reading,
    ) -> Result<ChatStream, ChatError> {
        let vocab = self.tokenizer.vocab();
        let mut sampling = generation.sampling.clone();
        let suppressed = vocab.suppressed_tokens().iter();
        sampling
            .logit_bias
            .extend(suppressed.map(|token| (*token, f32::NEG_INFINITY)));
        let tokens = self.engine.submit(Request {
            max_tokens: generation.max_tokens,
            sampling,
            stop_tokens: vocab.stop_tokens().to_vec(),
            ignore_eos: generation.ignore_eos,
            logprobs: generation.logprobs,
            ..Request::new(prompt)
        })?;
        Ok(ChatStream {
            tokens,
            reading,
            stop: StopStrings::new(&generation.stop),
            token_count: 0,
            ready: Vec::new(),
        })
    }
}

/// How ids become text.
enum Reading {
    Parts(PartsParser),
    Plain(TokenDecoder),
}

/// The events of one answer.
pub struct ChatStream {
    tokens: TokenStream,
    reading: Reading,
    stop: StopStrings,
    /// Tokens of the answer so far.
    token_count: usize,
    /// Events that came about together, last first.
    ready: Vec<ChatEvent>,
}

impl ChatStream {
    /// The next event, if it comes in time; `None` otherwise, and after the end.
    pub fn wait(&mut self, patience: Duration) -> Option<Result<ChatEvent, ChatError>> {
        loop {
            if let Some(event) = self.ready.pop() {
                return Some(Ok(event));
            }
            match self.tokens.wait(patience)? {
                Ok(event) => self.take(event),
                Err(error) => return Some(Err(error.into())),
            }
        }
    }

    fn take(&mut self, event: Event) {
        let mut events = Vec::new();
        match event {
            // Tokens that were on their way when the stop string came are not part of the answer.
            Event::Token { .. } if self.stop.stopped() => {}
            Event::Token { id, logprob, top } => {
                self.token_count += 1;
                events.push(ChatEvent::Token(Token { id, logprob, top }));
                let parts = self.reading.push(id);
                self.emit(parts, &mut events);
            }
            Event::Finished { reason, mut usage } => {
                if self.stop.stopped() {
                    usage.counts.generated_tokens = self.token_count;
                }
                let parts = self.reading.finish();
                self.emit(parts, &mut events);
                self.flush(&mut events);
                let reason = match reason {
                    _ if self.stop.stopped() => ChatFinish::Stop,
                    FinishReason::Cancelled => ChatFinish::Cancelled,
                    _ if self.reading.has_called() => ChatFinish::ToolCalls,
                    // Either way the answer is cut off.
                    FinishReason::Length | FinishReason::DeadEnd | FinishReason::Deadline => {
                        ChatFinish::Length
                    }
                    FinishReason::Stop { .. } => ChatFinish::Stop,
                };
                events.push(ChatEvent::Finished { reason, usage });
            }
        }
        if self.stop.stopped() {
            // The rest of the answer is not wanted; its usage still is.
            self.tokens.cancel();
        }
        events.reverse();
        self.ready = events;
    }

    /// Lets content through as far as no stop string can begin in it.
    fn emit(&mut self, parts: Vec<Part>, events: &mut Vec<ChatEvent>) {
        for part in parts {
            if self.stop.stopped() {
                return;
            }
            match part {
                Part::Content(text) => {
                    let mut clear = String::new();
                    self.stop.push(&text, &mut clear);
                    if !clear.is_empty() {
                        events.push(ChatEvent::Part(Part::Content(clear)));
                    }
                }
                other => {
                    self.flush(events);
                    events.push(ChatEvent::Part(other));
                }
            }
        }
    }

    /// Hands over what was held back in case a stop string followed.
    fn flush(&mut self, events: &mut Vec<ChatEvent>) {
        let mut held = String::new();
        self.stop.finish(&mut held);
        if !held.is_empty() {
            events.push(ChatEvent::Part(Part::Content(held)));
        }
    }
}

impl Iterator for ChatStream {
    type Item = Result<ChatEvent, ChatError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(event) = self.ready.pop() {
                return Some(Ok(event));
            }
            match self.tokens.next()? {
                Ok(event) => self.take(event),
                Err(error) => return Some(Err(error.into())),
            }
        }
    }
}

impl Reading {
    fn push(&mut self, id: TokenId) -> Vec<Part> {
        match self {
            Reading::Parts(parser) => {
                let mut parts = Vec::new();
                parser.push(id, &mut parts);
                parts
            }
            Reading::Plain(decoder) => {
                let mut text = String::new();
                decoder.push(id, &mut text);
                content(text)
            }
        }
    }

    fn finish(&mut self) -> Vec<Part> {
        match self {
            Reading::Parts(parser) => {
                let mut parts = Vec::new();
                parser.finish(&mut parts);
                parts
            }
            Reading::Plain(decoder) => {
                let mut text = String::new();
                decoder.finish(&mut text);
                content(text)
            }
        }
    }

    fn has_called(&self) -> bool {
        matches!(self, Reading::Parts(parser) if parser.has_called())
    }
}

fn content(text: String) -> Vec<Part> {
    if text.is_empty() {
        Vec::new()
    } else {
        vec![Part::Content(text)]
    }
}
