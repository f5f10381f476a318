//! Keeps text of users from becoming control tokens.
//!
//! A prompt is one string in which the template's `<|turn>` and a user's `<|turn>` look alike. So before rendering, the
//! brackets `<` and `>` in everything users wrote are replaced by two private-use characters that occur nowhere in the
//! conversation, and the tokenizer puts them back only after it has found the special tokens. Every special token it
//! looks for starts with `<` and ends with `>`, so all it finds begins and ends in the template's own text. One
//! character stands for one, so trimming, splitting and comparing in the template work as before.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::{
    TextError,
    chat::exact::{unused_characters, visit_strings},
};

/// True for a special token that a rendered prompt can hold.
pub(crate) fn is_bracketed(special_text: &str) -> bool {
    special_text.len() > 1 && special_text.starts_with('<') && special_text.ends_with('>')
}

/// The characters that stand for `<` and `>`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    open: char,
    close: char,
}

impl Guard {
    /// A guard for everything in the context; `None` where there is nothing to guard against.
    pub(crate) fn for_strings_of(context: &Map<String, Value>) -> Result<Option<Guard>, TextError> {
        let mut needed = false;
        for value in context.values() {
            visit_strings(value, &mut |text| needed |= text.contains(['<', '>']));
        }
        if !needed {
            return Ok(None);
        }
        let [open, close] =
            unused_characters(context.values()).ok_or(TextError::NoGuardCharacter)?;
        Ok(Some(Guard { open, close }))
    }

    /// The character that stands for `<`, then the one that stands for `>`.
    pub(crate) fn characters(self) -> String {
        [self.open, self.close].into_iter().collect()
    }

    /// Replaces the brackets in every string and key.
    pub(crate) fn apply(self, context: &mut Map<String, Value>) {
        context.values_mut().for_each(|value| self.apply_to(value));
    }

    fn apply_to(self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Cow::Owned(guarded) = self.guard(text) {
                    *text = guarded;
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.apply_to(value)),
            Value::Object(map) => {
                *map = std::mem::take(map)
                    .into_iter()
                    .map(|(key, mut value)| {
                        self.apply_to(&mut value);
                        (self.guard(&key).into_owned(), value)
                    })
                    .collect();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn guard(self, text: &str) -> Cow<'_, str> {
        replace(text, [('<', self.open), ('>', self.close)])
    }
}

/// A prompt in which text of users is told from the template's.
#[derive(Clone, Debug)]
pub struct Rendered {
    guarded: String,
    guard: Option<Guard>,
}

impl Rendered {
    pub(crate) fn new(guarded: String, guard: Option<Guard>) -> Rendered {
        Rendered { guarded, guard }
    }

    /// The prompt as people read it. Encoding this text instead would let messages forge control tokens.
    pub fn text(&self) -> Cow<'_, str> {
        self.restore(&self.guarded)
    }

    pub(crate) fn guarded(&self) -> &str {
        &self.guarded
    }

    /// A piece of the guarded text as it was written.
    pub(crate) fn restore<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.guard {
            Some(Guard { open, close }) => replace(text, [(open, '<'), (close, '>')]),
            None => Cow::Borrowed(text),
        }
    }
}

fn replace(text: &str, pairs: [(char, char); 2]) -> Cow<'_, str> {
    if !text.contains(pairs.map(|(from, _)| from)) {
        return Cow::Borrowed(text);
    }
    let put = |c| {
        pairs
            .iter()
            .find(|(from, _)| *from == c)
            .map_or(c, |(_, to)| *to)
    };
    Cow::Owned(text.chars().map(put).collect())
}
