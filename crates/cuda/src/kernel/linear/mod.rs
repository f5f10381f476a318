//! Products with weights: GEMV for small batches, GEMM over packed weights for medium ones, GEMM for large ones, and their plain
//! twin.

pub(crate) mod gemm;
pub(crate) mod gemm_medium;
pub(crate) mod gemm_packed;
pub(crate) mod gemv;
pub(crate) mod linear_plain;
pub(crate) mod ple_branch;
pub(crate) mod prepare_rows;
