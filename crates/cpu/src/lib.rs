//! The CPU backend: every step of a plan on threads and vector instructions.
//!
//! - [`backend`]: [`CpuBackend`], the choice of threads and instructions
//! - [`lower`]: plan to operations, with quantized activations shared by their readers
//! - [`executor`]: buffers, KV pages and the loop over operations
//! - [`op`]: one operation each, shared out over the [`pool`]
//! - [`roofline`]: what the machine can do at the most, for bounds
//! - [`kernel`]: the inner loops, written once over [`simd`], and the table of them, each compiled once an instruction set
//!
//! Weights stay where the file is mapped. A row's results have the same bits whatever else is in its batch, however a
//! prompt is cut, on any number of threads and at every level of instructions.

mod aligned;
mod backend;
mod executor;
mod kernel;
mod lower;
mod memory;
mod op;
mod pool;
mod roofline;
mod simd;
#[cfg(test)]
mod testing;

pub use backend::{CpuBackend, CpuConfig};
pub use kernel::isa::Isa;
