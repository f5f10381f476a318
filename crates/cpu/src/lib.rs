//! The CPU backend: every step of a plan on threads and vector instructions.
//!
//! Stages import downwards only:
//!
//! - [`backend`]: [`CpuBackend`], the choice of threads and instructions; [`roofline`]: peak rates of the machine
//! - [`executor`]: buffers, KV pages and the loop over operations
//! - [`lower`]: plan to operations, with quantized copies of values shared by their readers
//! - [`op`]: operations over whole values, shared out over the threads: linear, attention, experts, rope, kv, quantize, repack
//! - [`kernel`]: inner loops over rows and pages, written once over [`simd`], and the table of them per instruction set
//! - [`pool`]: worker threads and output tiles; [`simd`]: vectors and tiles of each instruction set
//! - [`matrix`], [`aligned`], [`memory`]: rectangles of a matrix, aligned memory, and how much of it there is
//!
//! Weights stay where the file is mapped. Within a class of batches (up to 32 rows, or more; in batch-invariant mode there is one), a row's results have the same
//! bits whatever else is in its batch, however a prompt is cut, and on any number of threads; those of small batches at every
//! level of instructions, too.

mod aligned;
mod backend;
mod executor;
mod kernel;
mod lower;
mod matrix;
mod memory;
mod op;
mod pool;
mod roofline;
mod simd;
#[cfg(test)]
mod testing;

pub use backend::{CpuBackend, CpuConfig};
pub use kernel::isa::Isa;
pub use lower::{BatchRows, Fusion, ProgramOp};
