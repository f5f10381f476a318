//! Messages in, parts of an answer out: the façade that every front end uses.
//!
//! Rendering, encoding, decoding and parsing happen on the caller's thread; the engine sees tokens alone. Dropping the
//! stream stops the generation.

use std::{sync::Arc, time::Duration};

use carat_model::sampling::Sampling;
use carat_text::{
    ChatTemplate, Message, Part, PartsParser, RenderOptions, Rendered, Specials, StopStrings,
    TextError, TokenDecoder, TokenId, Tokenizer, Tool, decoder::SpecialText,
};

use crate::{
    ConstraintSource, Counts, EngineError, EngineHandle, Event, FinishReason, Rejected, Request,
    TokenStream, Usage,
};

/// A model that can be talked to.
#[derive(Clone)]
pub struct Chat {
    engine: EngineHandle,
    tokenizer: Arc<Tokenizer>,
    template: Arc<ChatTemplate>,
}

/// Settings of one answer's generation.
#[derive(Clone, Debug, Default)]
pub struct Generation {
    /// Parameters by which tokens are drawn.
    pub sampling: Sampling,
    /// The most tokens of the answer, or as many as there is room for if that is less; `None` goes on until the model stops or
    /// the context is full.
    pub max_tokens: Option<usize>,
    /// The answer ends where one of these would appear, without it.
    pub stop: Vec<String>,
    /// The answer does not end by itself: tokens that would end it are not drawn. For benchmarks.
    pub ignore_eos: bool,
    /// Report log-probabilities of each token, and of this many of the likeliest.
    pub logprobs: Option<usize>,
    /// Constraint that the answer must satisfy, token by token.
    pub constraint: Option<ConstraintSource>,
    /// Make no drafts for it, whatever the engine could: the answer is the same, perhaps later.
    pub without_drafts: bool,
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
    /// The last message is the beginning of the answer, to be gone on with.
    pub continues: bool,
}

/// Events of a stream, in order; `Finished` comes last.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatEvent {
    /// Always the first: of the prompt, what was cached and why not more.
    Started(Counts),
    /// Log probability of a token of the prompt; if asked for. All of them come first.
    PromptToken(Token),
    /// Every generated token, before the parts it brings about.
    Token(Token),
    /// The next piece of the answer, as text.
    Part(Part),
    /// Always the last.
    Finished {
        /// Reason of the end.
        reason: ChatFinish,
        /// Counts and times of the request.
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

/// Reason an answer is over.
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
    /// Its time was up.
    Deadline,
}

/// Reason a chat could not go on.
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

    /// The engine that runs it.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// As the model's file defines it.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The text a conversation becomes.
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, TextError> {
        let options = RenderOptions {
            thinking: conversation.thinking,
            unix_time: conversation.unix_time,
            add_generation_prompt: !conversation.continues,
        };
        self.template
            .render(&conversation.messages, &conversation.tools, &options)
    }

    /// The tokens a conversation becomes.
    pub fn prompt(&self, conversation: &Conversation) -> Result<Vec<TokenId>, TextError> {
        let mut prompt = self.tokenizer.encode_rendered(&self.render(conversation)?);
        if conversation.continues {
            // The template has closed the turn that is to go on.
            let stops = self.tokenizer.vocab().stop_tokens();
            if let Some(end) = prompt.iter().rposition(|id| stops.contains(id)) {
                prompt.truncate(end);
            }
        }
        Ok(prompt)
    }

    /// The engine's request for an answer to the conversation, and the reader of that answer. `prompt` is [`Chat::prompt`]'s.
    pub fn prepare(
        &self,
        prompt: Vec<TokenId>,
        conversation: &Conversation,
        generation: &Generation,
    ) -> Prepared {
        let mut parser = PartsParser::new(Arc::clone(self.tokenizer.vocab()), &conversation.tools);
        parser.start_after(&prompt);
        self.prepared(prompt, generation, Reading::Parts(parser))
    }

    /// The same for tokens that are continued as plain text.
    pub fn prepare_text(&self, prompt: Vec<TokenId>, generation: &Generation) -> Prepared {
        let vocab = Arc::clone(self.tokenizer.vocab());
        let reading = Reading::Plain(TokenDecoder::new(vocab, SpecialText::Hide));
        self.prepared(prompt, generation, reading)
    }

    fn prepared(
        &self,
        prompt: Vec<TokenId>,
        generation: &Generation,
        reading: Reading,
    ) -> Prepared {
        let vocab = self.tokenizer.vocab();
        // A most is no reservation: the answer ends at the latest where the context does. A prompt that leaves no room at all is
        // refused as it is.
        let room = self.engine.limits().room(prompt.len()).max(1);
        let mut sampling = generation.sampling.clone();
        // What an answer that must go on could end with is not among its tokens: after its end a model has nothing to say.
        let ends = if generation.ignore_eos {
            vocab.stop_tokens()
        } else {
            &[]
        };
        let suppressed = vocab.suppressed_tokens().iter().chain(ends);
        sampling
            .logit_bias
            .extend(suppressed.map(|token| (*token, f32::NEG_INFINITY)));
        Prepared {
            request: Request {
                max_tokens: generation.max_tokens.map(|most| most.min(room)),
                sampling,
                stop_tokens: vocab.stop_tokens().to_vec(),
                ignore_eos: generation.ignore_eos,
                logprobs: generation.logprobs,
                constraint: generation.constraint.clone(),
                drafts: !generation.without_drafts,
                ..Request::new(prompt)
            },
            reader: AnswerReader {
                reading,
                stop: StopStrings::new(&generation.stop),
                token_count: 0,
            },
        }
    }

    /// Answers the conversation.
    pub fn answer(
        &self,
        conversation: &Conversation,
        generation: &Generation,
    ) -> Result<ChatStream, ChatError> {
        let prompt = self.prompt(conversation)?;
        self.start(self.prepare(prompt, conversation, generation))
    }

    /// Continues plain text, without a template.
    pub fn complete(&self, text: &str, generation: &Generation) -> Result<ChatStream, ChatError> {
        let prompt = self.tokenizer.encode_prompt(text, Specials::Ignore);
        self.start(self.prepare_text(prompt, generation))
    }

    fn start(&self, prepared: Prepared) -> Result<ChatStream, ChatError> {
        Ok(ChatStream {
            tokens: self.engine.submit(prepared.request)?,
            reader: prepared.reader,
            ready: Vec::new(),
        })
    }
}

/// A request for the engine, and what makes text of its events.
pub struct Prepared {
    /// To be submitted.
    pub request: Request,
    /// Reads its events.
    pub reader: AnswerReader,
}

/// Conversion of ids to text: raw, or read as a chat answer.
enum Reading {
    Parts(PartsParser),
    Plain(TokenDecoder),
}

/// Makes parts of an answer out of its tokens, as they come.
pub struct AnswerReader {
    reading: Reading,
    stop: StopStrings,
    /// Tokens of the answer so far.
    token_count: usize,
}

impl AnswerReader {
    /// Gives the pieces of each call before the call itself ([`PartsParser::stream_calls`]).
    pub fn stream_calls(&mut self) {
        if let Reading::Parts(parser) = &mut self.reading {
            parser.stream_calls();
        }
    }

    /// Appends what an event brings about.
    pub fn read(&mut self, event: Event, events: &mut Vec<ChatEvent>) {
        match event {
            Event::Started { counts } => events.push(ChatEvent::Started(*counts)),
            Event::PromptToken {
                id, logprob, top, ..
            } => events.push(ChatEvent::PromptToken(Token { id, logprob, top })),
            // Tokens that were on their way when the stop string came are not part of the answer.
            Event::Token { .. } if self.stop.stopped() => {}
            Event::Token { id, logprob, top } => {
                self.token_count += 1;
                events.push(ChatEvent::Token(Token { id, logprob, top }));
                let parts = self.reading.push(id);
                self.emit(parts, events);
            }
            Event::Finished { reason, usage } => {
                let mut usage = *usage;
                if self.stop.stopped() {
                    usage.counts.generated_tokens = self.token_count;
                }
                let parts = self.reading.finish();
                self.emit(parts, events);
                self.flush(events);
                let reason = match reason {
                    _ if self.stop.stopped() => ChatFinish::Stop,
                    FinishReason::Cancelled => ChatFinish::Cancelled,
                    _ if self.reading.has_called() => ChatFinish::ToolCalls,
                    FinishReason::Deadline => ChatFinish::Deadline,
                    // Either way the answer is cut off.
                    FinishReason::Length | FinishReason::DeadEnd => ChatFinish::Length,
                    FinishReason::Stop { .. } => ChatFinish::Stop,
                };
                events.push(ChatEvent::Finished { reason, usage });
            }
        }
    }

    /// Whether a stop string has come: the rest of the answer is not wanted, and its request should be cancelled. Its end still
    /// has to be read.
    pub fn has_stopped(&self) -> bool {
        self.stop.stopped()
    }

    /// The stop string that came.
    pub fn stop_string(&self) -> Option<&str> {
        self.stop.found()
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

/// The events of one answer, for a thread that waits for them.
pub struct ChatStream {
    tokens: TokenStream,
    reader: AnswerReader,
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
        self.reader.read(event, &mut self.ready);
        self.ready.reverse();
        if self.reader.has_stopped() {
            self.tokens.cancel();
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
