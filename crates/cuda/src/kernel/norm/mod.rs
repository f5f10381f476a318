//! RMS norms of rows, by themselves and with the residual add.

pub(crate) mod fused_norm;
pub(crate) mod rms_norm;
