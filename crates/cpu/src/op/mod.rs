//! Operations over whole values, shared out over the threads.
//!
//! - [`workers`]: threads, kernels and scratch memory, which every operation takes
//! - [`linear`]: products with weights; [`repack`]: weights kept in the layout that large batches read
//! - [`quantize`]: the copy of a value that quantized weights are multiplied with
//! - [`attention`], [`kv`], [`rope`]: attention over the paged KV cache
//! - [`experts`]: mixture of experts, by grouped GEMM
//!
//! Steps of simple arithmetic need no more than a kernel per row, so the executor calls those itself.

pub(crate) mod attention;
pub(crate) mod experts;
pub(crate) mod kv;
pub(crate) mod linear;
pub(crate) mod quantize;
pub(crate) mod repack;
pub(crate) mod rope;
pub(crate) mod workers;
