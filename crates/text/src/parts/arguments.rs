//! The notation of a tool call: `call:NAME{key:value,…}`.
//!
//! It looks like JSON with bare keys, but strings stand between two `<|"|>` tokens and have no escapes: whatever is
//! between them is the string. So the text arrives here already split at those tokens, and nothing inside a string can
//! be mistaken for structure. Strings in plain double quotes are read too, as JSON, because models slip into that.

use serde_json::{Map, Number, Value};

use super::pieces;
use crate::{ToolCall, chat::exact};

/// Deeper than any schema, and far from what recursion can bear.
pub(super) const DEEPEST: usize = 64;

/// Reason a call could not be understood, in words for the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No `call:NAME{` at its start.
    #[error(
        "a tool call begins with `call:`, the name of the tool and `{{`; this one with `{found}`"
    )]
    Beginning {
        /// Its first characters, 40 at most.
        found: String,
    },
    /// Arguments that break off or do not follow the notation.
    #[error("expected {expected} in the arguments of `{tool}`, found {found}")]
    Unexpected {
        /// Tool that was to be called.
        tool: String,
        /// Token or value that had to come.
        expected: &'static str,
        /// Text that came instead, quoted, or the end of the call.
        found: String,
    },
    /// A bare word that is no value.
    #[error("`{text}` in the arguments of `{tool}` is no number, and neither true, false nor null")]
    Word {
        /// Tool that was to be called.
        tool: String,
        /// The word.
        text: String,
    },
    /// Objects and lists within each other, past what any schema asks for.
    #[error("the arguments of `{tool}` are nested more than {DEEPEST} deep")]
    TooDeep {
        /// Tool that was to be called.
        tool: String,
    },
    /// A sound call of a tool that was not offered.
    #[error("there is no tool named `{name}`")]
    UnknownTool {
        /// Name in the call.
        name: String,
    },
}

/// Reads a call from the texts between one `<|"|>` token and the next.
pub(super) fn parse(segments: &[String]) -> Result<ToolCall, CallError> {
    let start = segments.first().map_or("", String::as_str);
    let beginning = || CallError::Beginning {
        found: start.chars().take(40).collect(),
    };
    let called = start
        .trim_start()
        .strip_prefix("call:")
        .ok_or_else(beginning)?;
    let (name, _) = called.split_once('{').ok_or_else(beginning)?;
    if name.trim().is_empty() {
        return Err(beginning());
    }
    let mut reader = Reader {
        tool: name.trim(),
        rest: &called[name.len()..],
        segments: segments.get(1..).unwrap_or_default(),
        has_large: false,
    };
    let arguments = reader.object(0)?;
    reader.skip_space();
    match reader.next() {
        Next::End => Ok(ToolCall {
            id: None,
            name: name.trim().to_owned(),
            arguments: if reader.has_large {
                Value::String(pieces::json(segments))
            } else {
                arguments
            },
        }),
        _ => Err(reader.unexpected("the end")),
    }
}

/// Next thing in the text.
#[derive(PartialEq)]
enum Next {
    Quote,
    Character(char),
    End,
}

struct Reader<'a> {
    tool: &'a str,
    /// Of the segment being read.
    rest: &'a str,
    /// Those after it; before each stands a quote.
    segments: &'a [String],
    /// An integer came that no value can hold.
    has_large: bool,
}

impl<'a> Reader<'a> {
    fn next(&self) -> Next {
        match self.rest.chars().next() {
            Some(character) => Next::Character(character),
            None if self.segments.is_empty() => Next::End,
            None => Next::Quote,
        }
    }

    fn unexpected(&self, expected: &'static str) -> CallError {
        let found = match self.next() {
            Next::Quote => "the beginning of a string".to_owned(),
            Next::End => "the end of the call".to_owned(),
            Next::Character(_) => {
                format!("`{}`", self.rest.chars().take(20).collect::<String>())
            }
        };
        CallError::Unexpected {
            tool: self.tool.to_owned(),
            expected,
            found,
        }
    }

    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Takes this character if it is the next one after white space.
    fn take(&mut self, character: char) -> bool {
        self.skip_space();
        let rest = self.rest.strip_prefix(character);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, character: char, name: &'static str) -> Result<(), CallError> {
        if self.take(character) {
            Ok(())
        } else {
            Err(self.unexpected(name))
        }
    }

    /// Everything up to the first character that `ends` the word.
    fn word(&mut self, ends: impl Fn(char) -> bool) -> &'a str {
        let (word, rest) = self
            .rest
            .split_at(self.rest.find(ends).unwrap_or(self.rest.len()));
        self.rest = rest;
        word
    }

    fn value(&mut self, depth: usize) -> Result<Value, CallError> {
        if depth > DEEPEST {
            return Err(CallError::TooDeep {
                tool: self.tool.to_owned(),
            });
        }
        self.skip_space();
        match self.next() {
            Next::Quote => self.quoted().map(Value::String),
            Next::Character('"') => self.json_string().map(Value::String),
            Next::Character('{') => self.object(depth),
            Next::Character('[') => self.list(depth),
            Next::Character(c) if begins_literal(c) => self.literal(),
            _ => Err(self.unexpected("a value")),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value, CallError> {
        self.expect('{', "`{`")?;
        let mut object = Map::new();
        if self.take('}') {
            return Ok(Value::Object(object));
        }
        loop {
            let key = self.key()?;
            self.expect(':', "`:`")?;
            object.insert(key, self.value(depth + 1)?);
            if self.take('}') {
                return Ok(Value::Object(object));
            }
            self.expect(',', "`,` or `}`")?;
        }
    }

    fn list(&mut self, depth: usize) -> Result<Value, CallError> {
        self.expect('[', "`[`")?;
        let mut list = Vec::new();
        if self.take(']') {
            return Ok(Value::Array(list));
        }
        loop {
            list.push(self.value(depth + 1)?);
            if self.take(']') {
                return Ok(Value::Array(list));
            }
            self.expect(',', "`,` or `]`")?;
        }
    }

    fn key(&mut self) -> Result<String, CallError> {
        self.skip_space();
        match self.next() {
            Next::Quote => self.quoted(),
            Next::Character('"') => self.json_string(),
            _ => {
                let before = self.rest;
                let key = self.word(|c| c == ':' || c == '}').trim_end();
                if key.is_empty() {
                    self.rest = before;
                    return Err(self.unexpected("a key"));
                }
                Ok(key.to_owned())
            }
        }
    }

    /// A string between quote tokens: exactly one segment.
    fn quoted(&mut self) -> Result<String, CallError> {
        if let [string, rest, segments @ ..] = self.segments {
            (self.rest, self.segments) = (rest, segments);
            return Ok(string.clone());
        }
        (self.rest, self.segments) = ("", &[]);
        Err(self.unexpected("the end of a string"))
    }

    fn json_string(&mut self) -> Result<String, CallError> {
        let mut escaped = false;
        let end = self.rest.char_indices().skip(1).find(|(_, character)| {
            let ends = *character == '"' && !escaped;
            escaped = *character == '\\' && !escaped;
            ends
        });
        let Some((end, _)) = end else {
            return Err(self.unexpected("a string with an end"));
        };
        let (string, rest) = self.rest.split_at(end + 1);
        self.rest = rest;
        Ok(plain_string(string))
    }

    fn literal(&mut self) -> Result<Value, CallError> {
        let text = self.word(|c| !is_of_literal(c));
        match literal(text) {
            Some(Literal::Value(value)) => Ok(value),
            Some(Literal::Large) => {
                // Nobody sees this: the arguments will be text.
                self.has_large = true;
                Ok(Value::Null)
            }
            None => Err(CallError::Word {
                tool: self.tool.to_owned(),
                text: text.to_owned(),
            }),
        }
    }
}

pub(super) fn begins_literal(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-'
}

pub(super) fn is_of_literal(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '-' | '+' | '.')
}

/// A number or a word.
pub(super) enum Literal {
    Value(Value),
    /// An integer beyond 64 bits: the text itself is its JSON.
    Large,
}

/// A number, or one of the words that are values.
pub(super) fn literal(text: &str) -> Option<Literal> {
    let value = match text {
        // Templates are Python, and write what they have of these in its spelling.
        "true" | "True" => Value::Bool(true),
        "false" | "False" => Value::Bool(false),
        "null" | "None" => Value::Null,
        large if exact::is_large(large) => return Some(Literal::Large),
        _ => serde_json::from_str::<Number>(text).ok()?.into(),
    };
    Some(Literal::Value(value))
}

/// A string in plain quotes, which are its first and last character.
pub(super) fn plain_string(quoted: &str) -> String {
    // Real line breaks are not JSON, yet clear enough.
    serde_json::from_str(quoted).unwrap_or_else(|_| quoted[1..quoted.len() - 1].to_owned())
}
