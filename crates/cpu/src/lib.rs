//! The CPU backend: every step of a plan on threads and vector instructions.
//!
//! - [`backend`]: [`CpuBackend`], the choice of threads and instructions
//! - [`lower`]: plan to operations, with quantized activations shared by their readers
//! - [`executor`]: buffers, KV pages and the loop over operations
//! - [`linear`], [`experts`], [`attend`], [`rope`], [`kv`]: one operation each, shared out over the [`pool`]
//! - [`rates`]: what the machine can do at the most, for bounds
//! - [`kernels`]: the table of inner loops, each compiled once an instruction set
//! - [`dot`], [`activations`], [`elementwise`]: the inner loops themselves, written once over [`simd`]
//!
//! Weights stay where the file is mapped. A row's results have the same bits whatever else is in its batch, however a
//! prompt is cut, on any number of threads and at every level of instructions.

mod activations;
mod aligned;
mod attend;
mod backend;
mod convert;
mod dot;
mod elementwise;
mod executor;
mod experts;
mod isa;
mod kernels;
mod kv;
mod linear;
mod lower;
mod memory;
mod pool;
mod rates;
mod repacked;
mod rope;
mod simd;
#[cfg(test)]
mod testing;
mod workers;

pub use backend::{CpuBackend, CpuConfig};
pub use isa::Isa;
