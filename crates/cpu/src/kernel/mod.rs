//! Inner loops, written once over [`crate::simd`], and the table that holds one instantiation per instruction set.
//!
//! - [`isa`]: levels of instructions; [`table`]: the kernels of each
//! - [`gemm`]: products with weights
//! - [`attention`]: one page of the KV cache; [`kv_page`]: its layout and encoding
//! - [`elementwise`]: norms, sums, gates, rotations
//! - [`roofline`]: reads and multiply-adds with nothing else around them

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod gemm;
pub(crate) mod isa;
pub(crate) mod kv_page;
pub(crate) mod roofline;
pub(crate) mod table;
