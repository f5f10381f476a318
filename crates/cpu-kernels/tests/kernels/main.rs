//! Kernels against their definitions in f64, every instruction set against plain Rust, and the choice among them.

mod aligned;
mod choice;
mod gemm;
mod plain_tiles;
mod roofline;
mod simd;
