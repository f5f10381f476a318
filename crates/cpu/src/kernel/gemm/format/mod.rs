//! Quantized weight formats, as kernels unpack them.
//!
//! - [`unpack`]: the trait [`Format`], what a format must say
//! - [`legacy`], [`k_quants`], [`iq4`]: the formats
//! - [`dispatch`]: from a `QuantType` to its format

mod dispatch;
mod iq4;
mod k_quants;
mod legacy;
mod unpack;

pub(crate) use dispatch::{WithFormat, dequantize, with_format};
pub(crate) use unpack::{Coding, Format, Order, Tail, TransposeLayout, Unpacked, chunk_at, signed};
