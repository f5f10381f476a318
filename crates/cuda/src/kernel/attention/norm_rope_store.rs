//! Twin of `kernels/attention/norm_rope_store.cu`.

use carat_model::{
    plan::{KvSlot, RopeId},
    weights::Weight,
};

use crate::kernel::{
    Addresses, Kernel, Place, PlacesAt, RowsAt, SlotAt, Specialization, norm_threads,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::Packed,
};

/// The kernel keeps a head in shared memory.
pub(crate) const MOST_HEAD_DIM: usize = 512;

params! {
    pub(crate) struct NormRopeStoreParams {
        rows: RowsAt,
        places: PlacesAt,
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

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "norm_rope_store",
        entries: &["norm_rope_store"],
        constants: vec![],
        params_bytes: NormRopeStoreParams::BYTES,
    }
}

/// `rope(norm(k))` and `norm(v)`, head by head, into their pages.
#[derive(Debug)]
pub(crate) struct NormRopeStore {
    pub(crate) k: Place,
    pub(crate) k_weight: Option<Weight>,
    pub(crate) k_eps: f32,
    pub(crate) v: Place,
    pub(crate) v_weight: Option<Weight>,
    pub(crate) v_eps: f32,
    pub(crate) rope: RopeId,
    pub(crate) slot: KvSlot,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Kernel for NormRopeStore {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, self.kv_heads), norm_threads(self.head_dim))
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        NormRopeStoreParams {
            rows,
            places: at.batch.places,
            slot: at.slot(self.slot),
            k: at.place(self.k),
            k_weight: at.vector(self.k_weight),
            v: at.place(self.v),
            v_weight: at.vector(self.v_weight),
            frequencies: at.rope(self.rope),
            columns: (self.kv_heads * self.head_dim) as u32,
            head_dim: self.head_dim as u32,
            k_eps: self.k_eps,
            v_eps: self.v_eps,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<Packed> {
        Packed::vectors([self.k_weight, self.v_weight])
    }

    fn reads(&self) -> Vec<Place> {
        vec![self.k, self.v]
    }

    fn writes(&self) -> Vec<Place> {
        vec![]
    }
}
