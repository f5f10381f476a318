//! A compiled model, running batches.
//!
//! - [`cpu_executor`]: the loop over operations, and sampling
//! - [`draft_model`]: a drafter beside the model
//! - [`state`]: buffers, KV pages and threads, and what each operation does to them
//! - [`row_view`]: a batch, seen from its rows

mod cpu_executor;
mod draft_model;
mod row_view;
mod state;

pub(crate) use cpu_executor::CpuExecutor;
