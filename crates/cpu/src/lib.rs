//! The CPU backend: every step of a plan on threads and vector instructions.
//!
//! Stages import downwards only:
//!
//! - [`backend`]: [`CpuBackend`], the choice of threads and instructions; [`roofline`]: peak rates of the machine
//! - [`host_steps`]: networks that a device leaves to the host
//! - [`executor`]: buffers, KV pages and the loop over operations
//! - [`lower`]: plan to operations, with quantized copies of values shared by their readers
//! - [`op`]: operations over whole values, shared out over the threads: linear, attention, experts, rope, kv, quantize, repack
//! - [`carat_cpu_kernels`]: inner loops over rows and pages, and the table of them per instruction set
//! - [`pool`]: worker threads and output tiles; [`memory`]: how much of it there is
//!
//! Weights stay where the file is mapped. Within a class of batches (up to 32 rows, or more; in batch-invariant mode there is one), a row's results have the same
//! bits whatever else is in its batch, however a prompt is cut, and on any number of threads; those of small batches at every
//! level of instructions, too.

mod backend;
mod executor;
mod host_steps;
mod lower;
mod memory;
mod op;
mod pool;
mod roofline;

pub use backend::{CpuBackend, CpuConfig};
pub use carat_cpu_kernels::isa::Isa;
pub use lower::{BatchRows, Fusion, ProgramOp};
