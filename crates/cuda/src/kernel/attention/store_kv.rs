//! Twin of `kernels/attention/store_kv.cu`: keys and values to f16, into their pages.

use carat_model::plan::KvSlot;

use crate::kernel::{
    Addresses, Kernel, Operand, RowRefsAt, RowsAt, SlotAt, Specialization, grid::elementwise_grid,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

params! {
    struct StoreKvParams {
        rows: RowsAt,
        row_refs: RowRefsAt,
        slot: SlotAt,
        k: Address,
        v: Address,
    }
}

#[derive(Debug)]
pub(crate) struct StoreKv {
    pub(crate) k: Operand,
    pub(crate) v: Operand,
    pub(crate) slot: KvSlot,
    pub(crate) columns: usize,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "store_kv",
        entries: &["store_kv"],
        constants: vec![],
        params_bytes: StoreKvParams::BYTES,
    }
}

impl Kernel for StoreKv {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        elementwise_grid(rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        StoreKvParams {
            rows,
            row_refs: at.batch.row_refs,
            slot: at.slot(self.slot),
            k: at.operand(self.k),
            v: at.operand(self.v),
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.k, self.v]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![]
    }
}
