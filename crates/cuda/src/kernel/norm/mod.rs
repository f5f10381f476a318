//! RMS norms of rows, alone and with the residual add.

pub(crate) mod norm;
pub(crate) mod norm_wide;
