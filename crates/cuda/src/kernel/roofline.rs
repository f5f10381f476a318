//! Twins of `kernels/roofline/read_peak.cu` and `kernels/roofline/multiply_peak.cu`, which measure the card's peaks. No steps of
//! a plan: `crate::run::roofline` launches them.

use crate::{
    device::Address,
    kernel::{
        Specialization,
        params::{Params, params},
    },
};

params! {
    pub(crate) struct ReadPeakParams {
        data: Address,
        sums: Address,
        count: u64,
    }
}

params! {
    pub(crate) struct MultiplyPeakParams {
        sums: Address,
        rounds: u32,
    }
}

/// The kernels, reads first.
pub(crate) fn specializations() -> [Specialization; 2] {
    [
        Specialization {
            kernel: "read_peak",
            entries: &["fill", "read_peak"],
            constants: Vec::new(),
            params_bytes: ReadPeakParams::BYTES,
        },
        Specialization {
            kernel: "multiply_peak",
            entries: &["multiply_peak"],
            constants: Vec::new(),
            params_bytes: MultiplyPeakParams::BYTES,
        },
    ]
}
