//! Twins of `kernels/roofline/read_rate.cu` and `kernels/roofline/multiply_rate.cu`, which measure the card's peaks.

use crate::{
    device::Address,
    kernel::{
        Specialization,
        params::{Params, params},
    },
};

params! {
    pub(crate) struct ReadRateParams {
        data: Address,
        sums: Address,
        count: u64,
    }
}

params! {
    pub(crate) struct MultiplyRateParams {
        sums: Address,
        rounds: u32,
    }
}

/// The kernels, reads first.
pub(crate) fn specializations() -> [Specialization; 2] {
    [
        Specialization {
            kernel: "read_rate",
            entries: &["fill", "read_rate"],
            constants: Vec::new(),
            params_bytes: ReadRateParams::BYTES,
        },
        Specialization {
            kernel: "multiply_rate",
            entries: &["multiply_rate"],
            constants: Vec::new(),
            params_bytes: MultiplyRateParams::BYTES,
        },
    ]
}
