//! Products of a batch with a weight matrix, or with a stack of them (grouped GEMM).
//!
//! - [`product`]: what is multiplied with what
//! - [`tiling`]: how the output is cut into tiles
//! - [`run`](mod@run): the kernel chosen for each tile ([`carat_cpu_kernels::gemm::choice`]), one round of the pool for all
//! - [`int8`], [`float`]: tiles of int8 and of float products
//! - [`logit`](mod@logit): one output of one row
//! - [`bf16`]: large batches in BF16, in a round of their own

mod bf16;
mod float;
mod int8;
mod logit;
mod product;
mod run;
mod tiling;

pub(crate) use logit::logit;
pub(crate) use product::{ExpertGroup, Input, Product};
pub(crate) use run::run;
