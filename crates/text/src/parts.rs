//! Splits what a model generates into content, thinking and tool calls.
//!
//! Works on token ids: the marks are single tokens, so text that only looks like a mark stays text, and there is nothing
//! to hold back. A call comes out whole, once its arguments are known to be sound. One that cannot be understood comes out
//! as it was written, with the reason. No text is ever lost. Whoever wants to see a call while it is being written asks for
//! its pieces, which come before it.

mod arguments;
mod pieces;

use std::{mem, sync::Arc};

pub use self::arguments::CallError;
use self::pieces::CallPieces;
use crate::{Message, Role, TokenDecoder, TokenId, Tool, ToolCall, Vocab, decoder::SpecialText};

/// A piece of an answer. Pieces of one kind belong together, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text for the reader.
    Content(String),
    /// Without the white space around it.
    Thinking(String),
    /// A call of this tool has begun; with [`PartsParser::stream_calls`].
    CallStarted(String),
    /// The next piece of the arguments of the call that has begun, as JSON text.
    CallArguments(String),
    /// A call of one of the tools, whole.
    ToolCall(ToolCall),
    /// Something that was to be a call.
    InvalidCall(InvalidCall),
}

/// Something between the marks of a call that is none.
#[derive(Clone, Debug, PartialEq)]
pub struct InvalidCall {
    /// Reason it is none.
    pub error: CallError,
    /// As generated, marks included.
    pub raw: String,
}

/// All parts of an answer, put together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    /// Text for the reader.
    pub content: String,
    /// Thoughts before the text and between calls.
    pub thinking: String,
    /// Calls to run, in the order the model made them.
    pub tool_calls: Vec<ToolCall>,
    /// Calls that could not be understood.
    pub invalid_calls: Vec<InvalidCall>,
}

impl Reply {
    /// Appends a part to what there is of its kind.
    pub fn add(&mut self, part: Part) {
        match part {
            Part::Content(text) => self.content.push_str(&text),
            Part::Thinking(text) => self.thinking.push_str(&text),
            // The whole call follows.
            Part::CallStarted(_) | Part::CallArguments(_) => {}
            Part::ToolCall(call) => self.tool_calls.push(call),
            Part::InvalidCall(call) => self.invalid_calls.push(call),
        }
    }
}

impl Extend<Part> for Reply {
    fn extend<I: IntoIterator<Item = Part>>(&mut self, parts: I) {
        parts.into_iter().for_each(|part| self.add(part));
    }
}

/// For the next round of the conversation. Calls that were none stay in the text, so that the model sees what it wrote.
impl From<Reply> for Message {
    fn from(reply: Reply) -> Message {
        let mut content = reply.content;
        for call in reply.invalid_calls {
            content.push_str(&call.raw);
        }
        Message {
            thinking: reply.thinking,
            tool_calls: reply.tool_calls,
            ..Message::new(Role::Assistant, content)
        }
    }
}

/// Place in the answer.
#[derive(Clone, Debug)]
enum State {
    Content,
    /// After a mark that a certain word follows; as much of that word as has come.
    Header(Header, String),
    Thought {
        /// Some of it has come out.
        begun: bool,
    },
    /// After `<|tool_call>`: the texts between one `<|"|>` and the next.
    Call(Vec<String>),
    /// After a stop token.
    Ended,
}

/// Mark and word that introduce a stretch of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Header {
    /// `<|channel>thought`
    Channel,
    /// `<|turn>model`, which models repeat at times.
    Turn,
}

impl Header {
    fn word(self) -> &'static str {
        match self {
            Header::Channel => "thought",
            Header::Turn => "model\n",
        }
    }
}

/// Reads generated ids one by one.
#[derive(Clone, Debug)]
pub struct PartsParser {
    vocab: Arc<Vocab>,
    decoder: TokenDecoder,
    /// Names of the tools the model may call; with none, the marks of a call are text.
    tools: Vec<String>,
    streams_calls: bool,
    /// The call under way, if its pieces are wanted.
    pieces: Option<CallPieces>,
    state: State,
    /// White space that belongs to a thought only if more of the thought follows.
    held: String,
    has_thought: bool,
    has_called: bool,
}

impl PartsParser {
    /// A parser at the start of an answer. Only calls of these tools are calls.
    pub fn new(vocab: Arc<Vocab>, tools: &[Tool]) -> PartsParser {
        PartsParser {
            decoder: TokenDecoder::new(Arc::clone(&vocab), SpecialText::Hide),
            vocab,
            tools: tools.iter().map(|tool| tool.name.clone()).collect(),
            streams_calls: false,
            pieces: None,
            state: State::Content,
            held: String::new(),
            has_thought: false,
            has_called: false,
        }
    }

    /// Gives the pieces of each call before the call itself. They add up to its arguments, unless it turns out to be none: then they
    /// break off.
    pub fn stream_calls(&mut self) {
        self.streams_calls = true;
    }

    /// Takes up the state the prompt leaves off in: some templates begin the model's thought, or finish an empty one.
    pub fn start_after(&mut self, prompt: &[TokenId]) {
        let turn = self.vocab.marks().turn_start;
        let start = prompt.iter().rposition(|id| Some(*id) == turn);
        let mut ignored = Vec::new();
        for &id in start.map_or(&[][..], |start| &prompt[start..]) {
            // The prompt may hold results of tools, whose marks end an answer but not a prompt.
            if !self.vocab.is_stop(id) {
                self.push(id, &mut ignored);
            }
        }
        self.held.clear();
        self.has_thought = false;
        self.has_called = false;
    }

    /// Reads one id and appends what it completes to `parts`. Nothing comes after a stop token.
    pub fn push(&mut self, id: TokenId, parts: &mut Vec<Part>) {
        if matches!(self.state, State::Ended) {
            return;
        }
        if self.vocab.is_stop(id) {
            self.finish(parts);
        } else if self.vocab.is_special(id) {
            // A mark ends the text before it; bytes that wait for more will not get them.
            self.flush_text(parts);
            self.leave_header(parts);
            self.mark(id, parts);
        } else {
            let mut text = String::new();
            self.decoder.push(id, &mut text);
            self.text(&text, parts);
        }
    }

    /// Ends the answer: what is still held back comes out. A call without its end mark counts if it is whole.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        self.flush_text(parts);
        self.leave_header(parts);
        if let State::Call(segments) = mem::replace(&mut self.state, State::Ended) {
            self.call(&segments, "", parts);
        }
    }

    /// True where the answer holds at least one sound call, so that it ended to have it run.
    pub fn has_called(&self) -> bool {
        self.has_called
    }

    fn flush_text(&mut self, parts: &mut Vec<Part>) {
        let mut text = String::new();
        self.decoder.finish(&mut text);
        self.text(&text, parts);
    }

    fn mark(&mut self, id: TokenId, parts: &mut Vec<Part>) {
        let marks = *self.vocab.marks();
        let text = self.vocab.text(id).unwrap_or_default().to_owned();
        let id = Some(id);
        let is_call_mark = [marks.call_start, marks.call_end, marks.quote].contains(&id);
        let new_call = || State::Call(vec![String::new()]);
        let new_pieces = self.streams_calls.then(CallPieces::new);
        match &mut self.state {
            State::Call(segments) if id == marks.quote => {
                segments.push(String::new());
                let mut json = String::new();
                if let Some(pieces) = &mut self.pieces {
                    pieces.quote(&mut json);
                }
                parts.extend(call_arguments(json));
            }
            State::Call(segments) if id == marks.call_end || id == marks.call_start => {
                let (segments, ended) = (mem::take(segments), id == marks.call_end);
                self.state = if ended { State::Content } else { new_call() };
                self.call(&segments, if ended { &text } else { "" }, parts);
                self.pieces = new_pieces;
            }
            // No call has other marks in it; as text they will show in what is wrong with it.
            State::Call(_) => self.text(&text, parts),
            _ if id == marks.channel_start => {
                self.enter(State::Header(Header::Channel, String::new()));
            }
            _ if id == marks.channel_end => self.enter(State::Content),
            State::Thought { .. } if is_call_mark => self.text(&text, parts),
            State::Thought { .. } => {}
            _ if id == marks.turn_start => self.enter(State::Header(Header::Turn, String::new())),
            _ if id == marks.call_start && !self.tools.is_empty() => {
                self.enter(new_call());
                self.pieces = new_pieces;
            }
            _ if is_call_mark => {
                self.enter(State::Content);
                self.text(&text, parts);
            }
            // Padding and the like: nothing to a reader.
            _ => {}
        }
    }

    fn enter(&mut self, state: State) {
        self.held.clear();
        self.state = state;
    }

    fn text(&mut self, text: &str, parts: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        match &mut self.state {
            State::Content => parts.push(Part::Content(text.to_owned())),
            State::Header(..) => self.header(text, parts),
            State::Thought { .. } => self.thought(text, parts),
            State::Call(segments) => {
                if let Some(last) = segments.last_mut() {
                    last.push_str(text);
                }
                self.call_text(text, parts);
            }
            State::Ended => {}
        }
    }

    fn call_text(&mut self, text: &str, parts: &mut Vec<Part>) {
        let Some(pieces) = &mut self.pieces else {
            return;
        };
        let mut json = String::new();
        if let Some(name) = pieces.text(text, &mut json) {
            if !self.tools.contains(&name) {
                self.pieces = None;
                return;
            }
            parts.push(Part::CallStarted(name));
        }
        parts.extend(call_arguments(json));
    }

    /// A header that another mark or the end cuts short is none: as much of its word as has come is text.
    fn leave_header(&mut self, parts: &mut Vec<Part>) {
        if let State::Header(header, read) = &mut self.state {
            let whole = header.word().trim_end() == read.as_str();
            let read = mem::take(read);
            self.state = State::Content;
            if !whole {
                self.text(&read, parts);
            }
        }
    }

    fn header(&mut self, text: &str, parts: &mut Vec<Part>) {
        let State::Header(header, read) = &mut self.state else {
            return;
        };
        let header = *header;
        let leading_space = header == Header::Channel && read.is_empty();
        read.push_str(if leading_space {
            text.trim_start()
        } else {
            text
        });
        if header.word().starts_with(read.as_str()) && read != header.word() {
            return;
        }
        let read = mem::take(read);
        if let Some(rest) = read.strip_prefix(header.word()) {
            self.state = match header {
                Header::Channel => State::Thought { begun: false },
                Header::Turn => State::Content,
            };
            self.text(rest, parts);
        } else {
            // A channel or role nobody knows: better shown than lost.
            self.state = State::Content;
            self.text(&read, parts);
        }
    }

    fn thought(&mut self, text: &str, parts: &mut Vec<Part>) {
        let State::Thought { begun } = &mut self.state else {
            return;
        };
        let end = text.trim_end().len();
        if end == 0 {
            self.held.push_str(text);
            return;
        }
        let mut piece = mem::take(&mut self.held);
        piece.push_str(&text[..end]);
        self.held.push_str(&text[end..]);
        if !mem::replace(begun, true) {
            // Thoughts are trimmed one by one; a line break keeps the next from running into the last.
            let gap = if self.has_thought { "\n" } else { "" };
            piece = format!("{gap}{}", piece.trim_start());
            self.has_thought = true;
        }
        parts.push(Part::Thinking(piece));
    }

    fn call(&mut self, segments: &[String], end_mark: &str, parts: &mut Vec<Part>) {
        let call = arguments::parse(segments).and_then(|call| {
            if self.tools.contains(&call.name) {
                Ok(call)
            } else {
                Err(CallError::UnknownTool { name: call.name })
            }
        });
        parts.push(match call {
            Ok(call) => {
                self.has_called = true;
                Part::ToolCall(call)
            }
            Err(error) => Part::InvalidCall(InvalidCall {
                error,
                raw: format!("<|tool_call>{}{end_mark}", segments.join("<|\"|>")),
            }),
        });
    }
}

/// A part, if there is anything in it.
fn call_arguments(json: String) -> Option<Part> {
    (!json.is_empty()).then_some(Part::CallArguments(json))
}

#[cfg(test)]
mod tests;
