//! Weights from the file's blocks into the layouts that kernels read.

pub(crate) mod expand;
pub(crate) mod pack;
