//! The GGUF file format: metadata, tensor directory and quantized block layouts.
//!
//! - [`reader`]: bytes to [`Header`]; every length, count and offset is checked before use
//! - [`value`]: metadata values and typed getters
//! - [`map`]: a memory-mapped model, possibly split over several files; the one entry for other crates
//! - [`writer`]: the reverse of the reader, for synthetic and test models
//! - [`quant`]: one file per block format, each the definition that faster code is tested against
//!
//! Nothing here knows about Gemma, tokens or arithmetic beyond dequantization.
#![warn(missing_docs)]
#![deny(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap
)]

mod error;
pub mod map;
pub mod quant;
pub mod reader;
pub mod value;
pub mod writer;

pub use error::GgufError;
pub use map::{Gguf, Tensor};
pub use quant::QuantType;
pub use reader::{Header, TensorInfo};
pub use value::{Array, Metadata, Value, ValueType};
