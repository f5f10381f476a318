//! The CUDA backend: the plan on kernels that are compiled at run time for the card at hand.
//!
//! From a plan to launches, each pass small and the first two pure, so that they are tested without a device:
//!
//! - [`fuse`]: runs of steps that one kernel does together
//! - [`lower`]: ops to calls of kernels, with scratch
//! - [`program`]: calls bound to functions and addresses; nothing in a launch changes from batch to batch but its rows
//!
//! Around them:
//!
//! - [`device`]: driver, context, stream, memory; absence is a value, not a panic
//! - [`library`]: where NVIDIA's libraries lie that are looked up at run time
//! - [`cublaslt`]: large products of halves
//! - [`nvrtc`], [`source`], [`cache`], [`compiler`]: from kernel text to modules, in parallel, cached by content
//! - [`kernel`]: the twin of each `kernels/*.cu`; [`params`] and [`launch`]: how one is called
//! - [`graph`]: launches captured once and replayed
//! - [`sample`]: tokens from logits on the device
//! - [`batch`]: what changes from batch to batch, in one copy to fixed addresses
//! - [`fragments`]: how quantized matrices lie, for tensor cores
//! - [`weights`], [`upload`], [`memory`]: what lies where, how it gets there, and how much of it
//! - [`measure`]: what the card can do at the most
//! - [`executor`]: the two traits of `carat-model`
//!
//! There is no toolkit to build with: the driver and NVRTC are loaded at run time, so this crate compiles, lints and tests
//! everywhere.

mod backend;
mod compile;
mod config;
mod device;
mod error;
mod jit;
mod kernel;
mod run;
#[cfg(test)]
mod testing;

pub use backend::{CudaBackend, DeviceFacts};
pub use compile::listing::{ProgramLaunch, program};
pub use compile::memory::MemoryPlan;
pub use config::{Checks, CudaConfig, Fusion, Graphs, Pdl, TablePlace, Tier};
pub use error::CudaError;
pub use jit::compiler::{Architecture, BuiltKernel, build_kernels};
