//! The card and NVIDIA's libraries: handles, memory, the one launch. Absence is a value, not a panic.

mod clusters;
pub(crate) mod cublaslt;
mod driver;
mod launch;
pub(crate) mod library;
mod management;
mod registered;
mod shared_buffer;
mod tensor_map;

pub(crate) use clusters::ClusterCapacity;
pub(crate) use driver::{
    Address, Buffer, Capability, Device, Event, HostBuffer, MIN_ALLOCATION, Mark, Module,
    assumed_free,
};
pub(crate) use launch::{Grid, launch, launch_aside};
pub(crate) use shared_buffer::SharedBuffer;
pub(crate) use tensor_map::TensorMap;
