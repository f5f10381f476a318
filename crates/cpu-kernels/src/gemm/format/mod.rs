//! Quantized weight formats, as kernels unpack them.
//!
//! - [`unpack`]: the trait [`Format`], what a format must say
//! - [`legacy`], [`k_quants`], [`iq4`]: formats unpacked in registers
//! - [`coded`]: those that `carat_gguf` defines by codes and scales, all in one; [`grids`]: their vectors
//! - [`dispatch`]: from a `QuantType` to its format

mod coded;
mod dispatch;
mod grids;
mod iq4;
mod k_quants;
mod legacy;
mod unpack;

pub use dispatch::{WithFormat, dequantize, with_format};
pub use unpack::{Coding, Format, Order, Tail, TransposeLayout, Unpacked, chunk_at, signed};
