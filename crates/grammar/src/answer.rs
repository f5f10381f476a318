//! Syntax of answers, as front ends ask for them.

use carat_text::{TokenId, Tokenizer, Tool};
use serde_json::Value;

/// Syntax of an answer: `thought? (content | format)? call*`, with the parts that are asked for. The default asks for nothing.
#[derive(Clone, Debug, Default)]
pub struct Answer<'a> {
    /// Format of the text after the thought; `None` leaves it free.
    pub format: Option<Format>,
    /// Tools that may or must be called; `None` where there are none.
    pub tools: Option<Tools<'a>>,
    /// Thought before the answer.
    pub thinking: Thinking,
    /// Place at which the prompt leaves off.
    pub start: Start,
}

/// Format that the whole text of an answer has.
#[derive(Clone, Debug, PartialEq)]
pub enum Format {
    /// Any JSON object.
    JsonObject,
    /// JSON that fits a schema.
    JsonSchema {
        /// The schema. Its `x-guidance` may ask for other white space than one space after `,` and `:`.
        schema: Value,
        /// Refuse keywords that cannot be enforced, instead of passing them over.
        strict: bool,
    },
    /// A regular expression in the syntax of Rust's `regex` crate, without look-around. Anchors are not needed.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in the Lark dialect of llguidance.
    Lark(String),
    /// A grammar in the GBNF of llama.cpp.
    Gbnf(String),
}

/// Tools of a request.
#[derive(Clone, Debug)]
pub struct Tools<'a> {
    /// The tools, as the model was told about them.
    pub tools: &'a [Tool],
    /// Freedom to call them.
    pub choice: ToolChoice,
    /// Allows several calls in one answer.
    pub parallel: bool,
}

/// Freedom to call tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// Not in this answer.
    None,
    /// At least one, instead of text.
    Required,
    /// This one, once, instead of text.
    Named(String),
}

/// Freedom to think before the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thinking {
    /// No thought may be opened.
    #[default]
    Off,
    /// A thought may come first.
    Allowed {
        /// Tokens of thought after which it is closed; `None` lets the model end it.
        budget: Option<usize>,
    },
}

/// Place at which a prompt leaves off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// At the beginning of an answer.
    #[default]
    Fresh,
    /// Within a thought.
    InThought,
    /// After a thought, or within the text of the answer.
    AfterThought,
}

impl Start {
    /// Place at which this prompt leaves off. Templates open the model's thought at times, or close an empty one.
    pub fn after(tokenizer: &Tokenizer, prompt: &[TokenId]) -> Start {
        let vocab = tokenizer.vocab();
        let marks = vocab.marks();
        let Some(place) = prompt.iter().rposition(|id| vocab.is_special(*id)) else {
            return Start::Fresh;
        };
        let mark = Some(prompt[place]);
        if mark == marks.channel_start {
            Start::InThought
        } else if mark == marks.channel_end {
            Start::AfterThought
        } else if mark == marks.turn_start {
            let header = tokenizer.decode(&prompt[place + 1..]);
            let text = header.split_once('\n').map_or("", |(_, text)| text);
            if text.is_empty() {
                Start::Fresh
            } else {
                Start::AfterThought
            }
        } else {
            Start::Fresh
        }
    }
}
