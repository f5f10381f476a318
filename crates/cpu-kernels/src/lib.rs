//! Inner loops of the CPU backend, written once over [`simd`], and the table that holds one instantiation per instruction set.
//!
//! A crate of its own because it takes longest to compile of all: one instantiation per instruction set and format, made once for
//! the backend and for every program that tests or measures a kernel. It is no interface for others: the types of an instruction
//! set are sound only where the processor has it, which [`table::Kernels::for_isa`] sees to.
//!
//! - [`isa`]: levels of instructions; [`table`]: the kernels of each
//! - [`gemm`]: products with weights
//! - [`attention`]: one page of the KV cache; [`kv_page`]: its layout and encoding
//! - [`elementwise`]: norms, sums, gates, rotations
//! - [`roofline`]: reads and multiply-adds with nothing else around them
//! - [`simd`]: vectors and tiles of each instruction set; [`matrix`], [`aligned`]: rectangles of a matrix, aligned memory
#![allow(
    clippy::return_self_not_must_use,
    clippy::len_without_is_empty,
    reason = "public for one crate and its tests"
)]

pub mod aligned;
pub mod attention;
pub mod elementwise;
pub mod gemm;
pub mod isa;
pub mod kv_page;
pub mod matrix;
pub mod roofline;
pub mod simd;
pub mod table;
pub mod tied_keys;
