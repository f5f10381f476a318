//! Generated ids to text as they arrive, and stop strings.
//!
//! A character may arrive in up to four byte tokens. Text goes out only in whole characters; bytes that can no longer
//! become one turn into U+FFFD at once, so a broken sequence never holds up what follows it. However the input is cut,
//! the text that came out is the same.

use std::sync::Arc;

use crate::{
    TokenId, Vocab,
    vocab::{SPACE_MARK, TokenKind},
};

/// Treatment of special tokens in decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialText {
    /// They stand in the text as the vocabulary writes them.
    Show,
    /// They leave no trace.
    Hide,
}

/// Turns a stream of ids into text.
#[derive(Clone, Debug)]
pub struct TokenDecoder {
    vocab: Arc<Vocab>,
    specials: SpecialText,
    characters: CharacterBuffer,
}

impl TokenDecoder {
    /// A decoder at the start of a text.
    pub fn new(vocab: Arc<Vocab>, specials: SpecialText) -> TokenDecoder {
        TokenDecoder {
            vocab,
            specials,
            characters: CharacterBuffer::default(),
        }
    }

    /// Appends what the token completes to `text`. An id outside the vocabulary adds nothing.
    pub fn push(&mut self, id: TokenId, text: &mut String) {
        match (self.vocab.kind(id), self.vocab.text(id)) {
            (Some(TokenKind::Byte(byte)), _) => self.characters.push_byte(byte, text),
            (Some(TokenKind::Text), Some(token)) => {
                self.characters.flush(text);
                text.extend(token.chars().map(|c| if c == SPACE_MARK { ' ' } else { c }));
            }
            (Some(TokenKind::Special), Some(token)) if self.specials == SpecialText::Show => {
                self.characters.flush(text);
                text.push_str(token);
            }
            _ => {}
        }
    }

    /// Appends what is left when no more tokens come: U+FFFD for an unfinished character.
    pub fn finish(&mut self, text: &mut String) {
        self.characters.flush(text);
    }
}

/// The bytes of a character that is not complete yet: nothing, or a beginning that more bytes can complete.
#[derive(Clone, Debug, Default)]
struct CharacterBuffer {
    bytes: [u8; 4],
    count: usize,
}

impl CharacterBuffer {
    fn push_byte(&mut self, byte: u8, text: &mut String) {
        self.bytes[self.count] = byte;
        self.count += 1;
        match str::from_utf8(&self.bytes[..self.count]) {
            Ok(character) => {
                text.push_str(character);
                self.count = 0;
            }
            // More bytes may still complete it. Four bytes are never merely incomplete, so the buffer has room.
            Err(error) if error.error_len().is_none() => {}
            Err(_) if self.count == 1 => self.flush(text),
            Err(_) => {
                // What was there is broken off; this byte may well begin the next character.
                self.flush(text);
                self.push_byte(byte, text);
            }
        }
    }

    fn flush(&mut self, text: &mut String) {
        if self.count > 0 {
            text.push(char::REPLACEMENT_CHARACTER);
            self.count = 0;
        }
    }
}

/// Watches text for strings that end the answer, and holds back what may be the beginning of one.
///
/// The answer ends where the first stop string is complete, and goes up to where that string begins.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Vec<Stop>,
    held: String,
    /// The one that ended the answer, among `stops`.
    found: Option<usize>,
}

/// One string and how much of it the text so far ends with: a Knuth-Morris-Pratt automaton.
#[derive(Clone, Debug)]
struct Stop {
    text: Vec<u8>,
    /// For each matched length, the next shorter one that is also a suffix of the match.
    shorter: Vec<usize>,
    matched: usize,
}

impl StopStrings {
    /// Empty strings are ignored: they would stop every answer before it begins.
    pub fn new<S: AsRef<str>>(stops: impl IntoIterator<Item = S>) -> StopStrings {
        StopStrings {
            stops: stops
                .into_iter()
                .filter(|stop| !stop.as_ref().is_empty())
                .map(|stop| Stop::new(stop.as_ref()))
                .collect(),
            held: String::new(),
            found: None,
        }
    }

    /// Takes new text and appends to `out` what is certainly before any stop string. Nothing more comes out once
    /// [`StopStrings::stopped`].
    pub fn push(&mut self, text: &str, out: &mut String) {
        if self.stopped() {
            return;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            for stop in &mut self.stops {
                stop.push(byte);
            }
            let complete = (0..self.stops.len()).filter(|&n| self.stops[n].is_complete());
            if let Some(longest) = complete.max_by_key(|&n| self.stops[n].text.len()) {
                let length = self.stops[longest].text.len();
                out.push_str(&self.held[..before + at + 1 - length]);
                self.held.clear();
                self.found = Some(longest);
                return;
            }
        }
        // Both a match and the text end with whole characters, so the match begins with one.
        let matched = self
            .stops
            .iter()
            .map(|stop| stop.matched)
            .max()
            .unwrap_or(0);
        out.extend(self.held.drain(..self.held.len() - matched));
    }

    /// Appends what was held back when no more text comes, or something else comes first. A stop string does not reach
    /// across such a break.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&std::mem::take(&mut self.held));
        for stop in &mut self.stops {
            stop.matched = 0;
        }
    }

    /// True once a stop string has ended the answer.
    pub fn stopped(&self) -> bool {
        self.found.is_some()
    }

    /// The stop string that ended the answer.
    pub fn found(&self) -> Option<&str> {
        let stop = &self.stops[self.found?];
        std::str::from_utf8(&stop.text).ok()
    }
}

impl Stop {
    fn new(text: &str) -> Stop {
        let text = text.as_bytes().to_vec();
        let mut shorter = vec![0; text.len() + 1];
        let mut length = 0;
        for at in 1..text.len() {
            while length > 0 && text[at] != text[length] {
                length = shorter[length];
            }
            if text[at] == text[length] {
                length += 1;
            }
            shorter[at + 1] = length;
        }
        Stop {
            text,
            shorter,
            matched: 0,
        }
    }

    fn push(&mut self, byte: u8) {
        while self.matched > 0 && self.text[self.matched] != byte {
            self.matched = self.shorter[self.matched];
        }
        if self.text[self.matched] == byte {
            self.matched += 1;
        }
    }

    fn is_complete(&self) -> bool {
        self.matched == self.text.len()
    }
}

#[cfg(test)]
mod tests;
