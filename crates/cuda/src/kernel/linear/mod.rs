//! Products with weights: streamed for few rows, tiled for many.

pub(crate) mod gemm;
pub(crate) mod gemv;
pub(crate) mod linear_plain;
