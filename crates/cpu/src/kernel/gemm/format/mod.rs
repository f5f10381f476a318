//! Quantized weight formats.

mod iq4;
mod k_quants;
mod legacy;
mod unpack;

pub(crate) use unpack::*;
