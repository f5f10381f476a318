//! RMS norms of rows, alone and with the residual add.

pub(crate) mod fused_norm;
pub(crate) mod rms_norm;
