//! Elementwise kernels: activation functions, conversions, selection of rows.

pub(crate) mod convert;
pub(crate) mod geglu;
pub(crate) mod pointwise;
pub(crate) mod select_sampled;
