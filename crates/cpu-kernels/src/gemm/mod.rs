//! Products of weight rows with activation rows.
//!
//! The value of one output is defined independently of how it is computed. Each group of a quantized weight row (32 values, or
//! 16 in some formats) gives an exact integer, the sum of code times code. Group `g` then adds
//! `integer * (weight scale * activation scale)`, and for formats with minimums subtracts
//! `minimum * (sum of activations)`, to lane `g % 16` of sixteen f32; at the end the lanes are folded in the order of
//! [`crate::simd::Floats::sum`]. Integers do not depend on order, so [`gemv`] and [`gemv_transposed`] (few rows, weights read
//! packed), [`packed_int8`] (more rows, weights unpacked once) and [`amx_int8`] (a small batch in tiles) agree to the last bit
//! on every instruction set, and a row's result does not depend on its neighbours.
//!
//! [`amx_bf16`] is another class of results, for large batches where there are registers for whole tiles: BF16 on both sides.
//!
//! - [`row_class`]: small and large batches; [`choice`]: which of these kernels multiplies, by format, rows and instruction set
//! - [`format`](mod@format): the weight formats; [`activations`]: the formats they are multiplied with
//! - [`float`]: F32, F16 and BF16 weights with f32 activations

pub mod activations;
pub mod amx_bf16;
pub mod amx_int8;
pub mod choice;
pub mod float;
pub mod format;
pub mod gemv;
pub mod gemv_transposed;
pub mod packed_int8;
pub mod row_class;
mod sixteen_rows;
mod weight_rows;

pub use weight_rows::{PREFETCH_BYTES, READ_STREAMS, WeightRows};
