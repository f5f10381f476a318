//! Inner loops, written once over [`crate::simd`], and the table that holds one instantiation per instruction set.

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod gemm;
pub(crate) mod isa;
pub(crate) mod table;
