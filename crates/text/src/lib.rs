//! Text for Gemma 4: from messages to token ids, and from generated ids back to messages.
//!
//! - [`vocab`]: the token table of a model file; special tokens found by their text
//! - [`tokenizer`]: text to ids, byte-fallback BPE without a word splitter; `merges` holds its rank table
//! - [`chat`]: messages, tools and tool calls as plain values
//! - [`template`]: a conversation to a prompt, through the file's own Jinja template or a built-in one
//! - [`decoder`]: ids to text as they arrive, never half a character; stop strings
//! - [`parts`]: generated ids to content, thinking and tool calls
//!
//! Everything here is a function of its arguments: no files, clocks, threads or settings. Text that users wrote can
//! never become a control token: see [`Specials`] and [`Rendered`].
#![warn(missing_docs)]

pub mod chat;
pub mod decoder;
mod error;
mod merges;
pub mod parts;
pub mod template;
#[cfg(test)]
mod test_data;
pub mod tokenizer;
pub mod vocab;

pub use chat::{Json, Message, Role, Tool, ToolCall, ToolResponse};
pub use decoder::{StopStrings, TokenDecoder};
pub use error::TextError;
pub use parts::{Part, PartsParser, Reply};
pub use template::{ChatTemplate, RenderOptions, Rendered, TemplateLimits};
pub use tokenizer::{Specials, Tokenizer};
pub use vocab::{TokenId, Vocab};
