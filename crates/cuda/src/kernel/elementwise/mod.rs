//! Values one by one: activations, conversions, selection of rows.

pub(crate) mod convert;
pub(crate) mod elementwise;
pub(crate) mod gelu_mul_wide;
pub(crate) mod narrow;
