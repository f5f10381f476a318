//! Twin of `kernels/attention/attend.cu`: attention without tensor cores, for heads that the flash kernels do not take.

use carat_model::{kv::KvType, plan::KvSlot};

use crate::kernel::{
    Addresses, Kernel, Operand, RowRefsAt, RowsAt, SlotAt, Specialization,
    specialization::kv_constants,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

/// Elements of a head that one lane may hold: heads of up to 32 to 512.
pub(crate) const LANE_VALUES: [usize; 5] = [1, 2, 4, 8, 16];

params! {
    struct AttendParams {
        rows: RowsAt,
        row_refs: RowRefsAt,
        slot: SlotAt,
        q: Address,
        out: Address,
        heads: u32,
        window: u32,
    }
}

#[derive(Debug)]
pub(crate) struct Attend {
    pub(crate) q: Operand,
    pub(crate) slot: KvSlot,
    kv: KvType,
    tied: bool,
    pub(crate) heads: usize,
    pub(crate) window: Option<usize>,
    lane_values: usize,
    pub(crate) out: Operand,
}

impl Attend {
    /// `None` for head sizes the kernel does not take; `tied` is whether keys are made from values.
    pub(crate) fn new(
        (q, out): (Operand, Operand),
        (slot, kv, tied): (KvSlot, KvType, bool),
        (heads, head_dim): (usize, usize),
        window: Option<usize>,
    ) -> Option<Attend> {
        let fits = |values: &usize| head_dim <= 32 * values && head_dim.is_multiple_of(*values);
        Some(Attend {
            q,
            slot,
            kv,
            tied,
            heads,
            window,
            lane_values: LANE_VALUES.into_iter().find(fits)?,
            out,
        })
    }
}

pub(crate) fn specialization(lane_values: usize, kv: KvType, tied: bool) -> Specialization {
    Specialization {
        kernel: "attend",
        entries: &["attend"],
        constants: [("LANE_VALUES", lane_values.to_string())]
            .into_iter()
            .chain(kv_constants(kv, tied))
            .collect(),
        params_bytes: AttendParams::BYTES,
    }
}

impl Kernel for Attend {
    fn specialization(&self) -> Specialization {
        specialization(self.lane_values, self.kv, self.tied)
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, self.heads), 256)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        AttendParams {
            rows,
            row_refs: at.batch.row_refs,
            slot: at.slot(self.slot),
            q: at.operand(self.q),
            out: at.operand(self.out),
            heads: self.heads as u32,
            window: self.window.unwrap_or(0) as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.q]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_hold_as_little_as_the_head_allows() {
        let lane_values = |head_dim| {
            let operand = Operand::Scratch(0);
            let attend = Attend::new(
                (operand, operand),
                (KvSlot(0), KvType::F16, false),
                (1, head_dim),
                None,
            );
            attend.map(|a| a.lane_values)
        };
        assert_eq!(lane_values(16), Some(1));
        assert_eq!(lane_values(64), Some(2));
        assert_eq!(lane_values(256), Some(8));
        assert_eq!(lane_values(512), Some(16));
        assert_eq!(lane_values(66), None, "no even share for 32 lanes");
        assert_eq!(lane_values(1024), None);
    }
}
