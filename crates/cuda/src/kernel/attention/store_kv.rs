//! Twin of `kernels/attention/store_kv.cu`: keys and values to the KV type, into their pages.

use carat_model::{kv::KvType, plan::KvSlot};

use crate::kernel::{
    Addresses, Kernel, Operand, RowRefsAt, RowsAt, SlotAt, Specialization, grid::elementwise_grid,
    specialization::kv_constant,
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
    pub(crate) kv: KvType,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

pub(crate) fn specialization(kv: KvType) -> Specialization {
    Specialization {
        kernel: "store_kv",
        entries: &["store_kv"],
        constants: kv_constant(kv).into_iter().collect(),
        params_bytes: StoreKvParams::BYTES,
    }
}

impl Kernel for StoreKv {
    fn specialization(&self) -> Specialization {
        specialization(self.kv)
    }

    fn grid(&self, rows: usize) -> Grid {
        // In Q8_0 a warp has a block.
        let head_threads = match self.kv {
            KvType::F16 => self.head_dim,
            KvType::Q8_0 => self.head_dim.next_multiple_of(KvType::GROUP),
        };
        elementwise_grid(rows, self.kv_heads * head_threads)
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
