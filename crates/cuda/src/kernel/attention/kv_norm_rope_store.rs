//! Twin of `kernels/attention/kv_norm_rope_store.cu`: the KV store of small batches that attend later.

use carat_model::{
    kv::KvType,
    plan::{KvSlot, RopeId},
    weights::Weight,
};

use crate::kernel::{
    Addresses, Kernel, Operand, RowRefsAt, RowsAt, SlotAt, Specialization, grid::norm_threads,
    specialization::kv_constant,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::WeightOperand,
};

/// The kernel keeps a head in shared memory.
pub(crate) const MAX_HEAD_DIM: usize = 512;

params! {
    pub(crate) struct KvNormRopeStoreParams {
        rows: RowsAt,
        row_refs: RowRefsAt,
        slot: SlotAt,
        k: Address,
        k_weight: Address,
        v: Address,
        v_weight: Address,
        frequencies: Address,
        columns: u32,
        head_dim: u32,
        k_eps: f32,
        v_eps: f32,
    }
}

pub(crate) fn specialization(kv: KvType) -> Specialization {
    Specialization {
        kernel: "kv_norm_rope_store",
        entries: &["kv_norm_rope_store"],
        constants: kv_constant(kv).into_iter().collect(),
        params_bytes: KvNormRopeStoreParams::BYTES,
    }
}

/// `rope(norm(k))` and `norm(v)`, head by head, into their pages.
#[derive(Debug)]
pub(crate) struct KvNormRopeStore {
    pub(crate) k: Operand,
    pub(crate) k_weight: Option<Weight>,
    pub(crate) k_eps: f32,
    pub(crate) v: Operand,
    pub(crate) v_weight: Option<Weight>,
    pub(crate) v_eps: f32,
    pub(crate) rope: RopeId,
    pub(crate) slot: KvSlot,
    pub(crate) kv: KvType,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Kernel for KvNormRopeStore {
    fn specialization(&self) -> Specialization {
        specialization(self.kv)
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, self.kv_heads), norm_threads(self.head_dim))
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        KvNormRopeStoreParams {
            rows,
            row_refs: at.batch.row_refs,
            slot: at.slot(self.slot),
            k: at.operand(self.k),
            k_weight: at.vector(self.k_weight),
            v: at.operand(self.v),
            v_weight: at.vector(self.v_weight),
            frequencies: at.rope(self.rope),
            columns: (self.kv_heads * self.head_dim) as u32,
            head_dim: self.head_dim as u32,
            k_eps: self.k_eps,
            v_eps: self.v_eps,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        WeightOperand::vectors([self.k_weight, self.v_weight])
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.k, self.v]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![]
    }
}
