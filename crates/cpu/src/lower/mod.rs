//! From a plan to operations.
//!
//! - [`steps`]: step by step, then together what goes better together
//! - [`program`]: the operations
//! - [`copies`]: buffers for quantized copies
//! - [`listing`]: the operations as text, for people

mod copies;
mod listing;
mod program;
mod steps;

pub use listing::{BatchRows, ProgramOp};
pub use steps::Fusion;

pub(crate) use listing::list;
pub(crate) use program::{LoweredOp, Op, Operand, ProductInput, Program};
pub(crate) use steps::lower;
