//! Products with weights: GEMV for small batches, GEMM for large ones, and their plain twin.

pub(crate) mod gemm;
pub(crate) mod gemv;
pub(crate) mod linear_plain;
