//! Gemma 4 in a program of one's own: load a model, talk with it.
//!
//! ```no_run
//! # fn main() -> Result<(), carat::Error> {
//! let model = carat::Model::load("gemma-4-E4B-it-Q4_K_M.gguf")?;
//! let mut chat = model.chat().system("Answer briefly.");
//! for piece in chat.send("Why is the sky blue?")? {
//!     if let carat::Part::Content(text) = piece? {
//!         print!("{text}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - [`Model`], [`LoadOptions`]: from a file to a model that answers, sized to the machine
//! - [`Chat`], [`Answer`]: a conversation and its answers, as an iterator or a `Stream`; [`Answer::cancel`] keeps the usage
//! - [`Device`]: what computes; the one place that names the backends
//! - [`Loaded`], [`context`]: a model before it runs, and how much context fits
//! - [`footprint`]: memory that a model will take, for several within a budget
//! - [`window`]: conversations longer than the context
//! - [`intact`]: a model file that changes while it is in use ends in an error, not in a wrong answer
//!
//! Nothing here prints, reads the environment or ends the process. What a person may want to know is returned as notes.
#![warn(missing_docs)]

mod answer;
mod chat;
pub mod context;
mod device;
mod drafts;
mod error;
pub mod footprint;
pub mod intact;
mod loaded;
mod model;
mod prefix;
mod sampling;
pub mod window;

pub use answer::{Answer, Canceller, Completion};
pub use carat_engine::{
    Counts, Usage,
    chat::{ChatFinish, Generation},
};
pub use carat_grammar as grammar;
pub use carat_model::{
    kv::{KvType, PerGroup},
    sampling::Sampling,
};
pub use carat_text::{
    Json, Message, Part, Reply, Role, TokenId, Tokenizer, Tool, ToolCall, ToolResponse,
};
pub use chat::Chat;
pub use device::{Device, OpenedDevice, open_device};
pub use drafts::Drafts;
pub use error::Error;
pub use loaded::Loaded;
pub use model::{LoadOptions, Model};
pub use prefix::{PrefixCache, PrefixDisk};
pub use sampling::{file_sampling, fresh_seed};
pub use window::Overflow;
