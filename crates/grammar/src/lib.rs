//! Schemas, regular expressions, grammars and tool calls to token masks.
//!
//! - [`Answer`]: what an answer has to look like, as front ends say it
//! - [`Grammars`]: compiles that into a [`ConstraintSource`](carat_engine::ConstraintSource) for the engine, and keeps grammars
//! - [`Meter`]: what it costs
//! - `guide`: one answer under way, part by part: thought, text or format, calls
//! - `follower`: masks computed ahead, on threads beside the engine's
//! - `vocabulary`: the tokens as grammars see them; `counted`: masks inside strings by the number of characters
//! - `schema`: limits of JSON schemas, and errors that say where; `formats`: regular expressions, choices, Lark and GBNF
//! - `tools`: tools to a grammar of calls in the model's own notation, the counterpart of `carat_text::parts`
//!
//! Masks are computed by llguidance. It sees one part of an answer at a time; what joins the parts are single tokens.
#![warn(missing_docs)]

mod answer;
mod cache;
mod counted;
mod error;
mod follower;
mod formats;
mod grammars;
mod guide;
mod meter;
mod path;
mod schema;
#[cfg(test)]
mod testing;
mod tools;
mod vocabulary;

pub use answer::{Answer, Format, Start, Thinking, ToolChoice, Tools};
pub use error::GrammarError;
pub use grammars::{Compiled, Grammars, Settings};
pub use meter::{BUCKET_MICROS, Histogram, Meter};
