//! The CUDA backend: the plan on kernels that are compiled at run time for the card at hand.
//!
//! From a plan to launches, each pass small; the first is pure, so that it is tested without a device:
//!
//! - [`compile`]: steps fused into ops, ops lowered to calls of kernels for small and large batches, weights and memory laid out
//! - [`run`]: weights uploaded, calls bound to functions and addresses, batches queued, launches captured in CUDA graphs and
//!   replayed, tokens sampled
//!
//! Below them:
//!
//! - [`kernel`]: the twin of each `kernels/<family>/*.cu`: its params, its grid, what must hold
//! - [`jit`]: from kernel text to machine code, compiled in parallel, cached by content
//! - [`device`]: driver, memory, the one unsafe launch, cuBLASLt; absence is a value, not a panic
//!
//! [`backend`] implements the trait of `carat-model` with these; [`config`] and [`error`] are what callers see.
//!
//! There is no toolkit to build with: the driver and NVRTC are loaded at run time, so this crate compiles, lints and tests
//! everywhere.

mod backend;
mod bus;
mod choices;
mod compile;
mod config;
mod device;
mod error;
mod jit;
mod kernel;
mod placement;
mod planned;
mod run;
#[cfg(test)]
mod testing;
mod tuned_models;
mod tuning;

pub use backend::{CudaBackend, DeviceFacts};
pub use choices::{Alternative, Alternatives, Choice, ChoiceInForce, ChoiceOrigin, Workload};
pub use compile::listing::{ProgramLaunch, program, program_choices};
pub use compile::memory::MemoryPlan;
pub use config::{
    Checks, CudaConfig, Fusion, Graphs, KeptChoices, MemoryLimit, Pdl, TableMemory, Tier,
};
pub use error::CudaError;
pub use jit::compiler::{
    Architecture, BuiltKernel, Coverage, KernelChoice, KernelSet, build_kernels,
};
pub use kernel::GemmTile;
pub use placement::{HostParts, Layers, Placement, PlacementError, WeightKind};
pub use planned::PlannedCard;
pub use tuning::Tuning;
