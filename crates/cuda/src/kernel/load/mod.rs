//! Weights from the file's blocks into the layouts that kernels read.

pub(crate) mod dequantize;
pub(crate) mod pack;
