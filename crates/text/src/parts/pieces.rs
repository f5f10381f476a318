//! The arguments of a call as JSON, piece by piece while the call is being written.
//!
//! Follows the notation that [`arguments`] reads, one character at a time, and writes no character that a later one
//! could make wrong: strings between quote tokens go out as they come, everything else once it is complete. Whether the call is sound is
//! not decided here: at its end it is read again, as a whole.

use std::mem;

use serde_json::Value;

use super::arguments::{self, DEEPEST, Literal};

/// A call under way.
#[derive(Clone, Debug)]
pub(super) struct CallPieces {
    state: State,
    /// Closing bracket of each object and list that is open.
    open: Vec<char>,
    /// Name, key, literal or plain string, as far as it has come.
    word: String,
}

/// Next thing in the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The rest of `call:NAME`, up to the first brace.
    Name,
    /// A value, or the end of the list.
    FirstItem,
    Value,
    /// A key, or the end of the object.
    FirstKey,
    Key,
    /// The rest of a key without quotes.
    BareKey,
    Colon,
    /// The rest of a number or a word.
    Literal,
    /// The rest of a string between quote tokens.
    Marked(Place),
    /// The rest of a string in plain quotes.
    Plain {
        place: Place,
        escaped: bool,
    },
    /// A comma or a closing bracket.
    After,
    /// Nothing more: the call is complete, or it is none.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Key,
    Value,
}

impl CallPieces {
    pub(super) fn new() -> CallPieces {
        CallPieces {
            state: State::Name,
            open: Vec::new(),
            word: String::new(),
        }
    }

    /// Reads the next text of the call and appends what is certain to `json`. Returns the name of the tool when it is known.
    pub(super) fn text(&mut self, text: &str, json: &mut String) -> Option<String> {
        let mut called = None;
        for character in text.chars() {
            if self.state != State::Name {
                self.character(character, json);
            } else if character == '{' {
                let word = mem::take(&mut self.word);
                let name = word.trim_start().strip_prefix("call:").map(str::trim);
                called = name.filter(|name| !name.is_empty()).map(str::to_owned);
                if called.is_some() {
                    self.value(character, json);
                } else {
                    self.state = State::Done;
                }
            } else {
                self.word.push(character);
            }
        }
        called
    }

    /// Reads a quote token.
    pub(super) fn quote(&mut self, json: &mut String) {
        match self.state {
            State::FirstItem | State::Value => {
                json.push('"');
                self.state = State::Marked(Place::Value);
            }
            State::FirstKey | State::Key => self.state = State::Marked(Place::Key),
            State::Marked(Place::Value) => {
                json.push('"');
                self.state = State::After;
            }
            State::Marked(Place::Key) => self.key(json),
            _ => self.state = State::Done,
        }
    }

    fn character(&mut self, character: char, json: &mut String) {
        match self.state {
            State::Marked(Place::Value) => {
                let mut bytes = [0; 4];
                let quoted = string(character.encode_utf8(&mut bytes));
                json.push_str(&quoted[1..quoted.len() - 1]);
            }
            State::Plain { place, escaped } => {
                self.word.push(character);
                if character == '"' && !escaped {
                    self.plain_string(place, json);
                } else {
                    let escaped = character == '\\' && !escaped;
                    self.state = State::Plain { place, escaped };
                }
            }
            State::BareKey if character == ':' => {
                self.word.truncate(self.word.trim_end().len());
                self.key(json);
                self.character(character, json);
            }
            State::BareKey if character == '}' => self.state = State::Done,
            State::BareKey | State::Marked(Place::Key) => self.word.push(character),
            State::Literal if arguments::is_of_literal(character) => self.word.push(character),
            State::Literal => {
                self.literal(json);
                self.character(character, json);
            }
            State::Name | State::Done => {}
            _ if character.is_whitespace() => {}
            State::FirstItem if character == ']' => self.close(json),
            State::FirstItem | State::Value => self.value(character, json),
            State::FirstKey if character == '}' => self.close(json),
            State::FirstKey | State::Key => match character {
                '"' => self.plain(Place::Key),
                ':' | '}' => self.state = State::Done,
                _ => {
                    self.word.push(character);
                    self.state = State::BareKey;
                }
            },
            State::Colon if character == ':' => {
                json.push(':');
                self.state = State::Value;
            }
            State::Colon => self.state = State::Done,
            State::After => match self.open.last() {
                Some(end) if character == *end => self.close(json),
                Some(end) if character == ',' => {
                    self.state = if *end == '}' {
                        State::Key
                    } else {
                        State::Value
                    };
                    json.push(',');
                }
                _ => self.state = State::Done,
            },
        }
    }

    fn value(&mut self, character: char, json: &mut String) {
        let (end, inside) = match character {
            _ if self.open.len() > DEEPEST => {
                self.state = State::Done;
                return;
            }
            '{' => ('}', State::FirstKey),
            '[' => (']', State::FirstItem),
            '"' => return self.plain(Place::Value),
            _ => {
                self.word.push(character);
                self.state = if arguments::begins_literal(character) {
                    State::Literal
                } else {
                    State::Done
                };
                return;
            }
        };
        json.push(character);
        self.open.push(end);
        self.state = inside;
    }

    fn close(&mut self, json: &mut String) {
        json.extend(self.open.pop());
        self.state = if self.open.is_empty() {
            State::Done
        } else {
            State::After
        };
    }

    fn plain(&mut self, place: Place) {
        self.word.push('"');
        self.state = State::Plain {
            place,
            escaped: false,
        };
    }

    fn plain_string(&mut self, place: Place, json: &mut String) {
        let text = arguments::plain_string(&mem::take(&mut self.word));
        match place {
            Place::Key => {
                self.word = text;
                self.key(json);
            }
            Place::Value => {
                json.push_str(&string(&text));
                self.state = State::After;
            }
        }
    }

    fn key(&mut self, json: &mut String) {
        json.push_str(&string(&mem::take(&mut self.word)));
        self.state = State::Colon;
    }

    fn literal(&mut self, json: &mut String) {
        let word = mem::take(&mut self.word);
        self.state = match arguments::literal(&word) {
            Some(Literal::Value(value)) => {
                json.push_str(&value.to_string());
                State::After
            }
            Some(Literal::Large) => {
                json.push_str(&word);
                State::After
            }
            None => State::Done,
        };
    }
}

/// The arguments of a sound call as JSON, from the texts between one quote token and the next.
pub(super) fn json(segments: &[String]) -> String {
    let mut pieces = CallPieces::new();
    let mut json = String::new();
    for (place, segment) in segments.iter().enumerate() {
        if place > 0 {
            pieces.quote(&mut json);
        }
        pieces.text(segment, &mut json);
    }
    json
}

/// A string as JSON writes it.
fn string(text: &str) -> String {
    Value::from(text).to_string()
}
