//! Twin of `kernels/attention/store_kv.cu`.

use carat_model::plan::KvSlot;

use crate::kernel::{Addresses, Kernel, Place, PlacesAt, RowsAt, SlotAt, Specialization, strips};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

params! {
    struct StoreKvParams {
        rows: RowsAt,
        places: PlacesAt,
        slot: SlotAt,
        k: Address,
        v: Address,
    }
}

#[derive(Debug)]
pub(crate) struct StoreKv {
    pub(crate) k: Place,
    pub(crate) v: Place,
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
        strips(rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        StoreKvParams {
            rows,
            places: at.batch.places,
            slot: at.slot(self.slot),
            k: at.place(self.k),
            v: at.place(self.v),
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Place> {
        vec![self.k, self.v]
    }

    fn writes(&self) -> Vec<Place> {
        vec![]
    }
}
