//! Kernel text to loaded code: joined, compiled in parallel by NVRTC, cached on disk by content.

pub(crate) mod cache;
pub(crate) mod compiler;
mod grids;
pub(crate) mod nvrtc;
pub(crate) mod source;
