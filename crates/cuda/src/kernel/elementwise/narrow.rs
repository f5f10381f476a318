//! Twin of `kernels/elementwise/narrow.cu`.

use crate::kernel::{Addresses, Kernel, Place, RowsAt, Specialization, strips};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

params! {
    struct NarrowParams {
        rows: RowsAt,
        x: Address,
        out: Address,
        columns: u32,
    }
}

#[derive(Debug)]
pub(crate) struct Narrow {
    pub(crate) x: Place,
    pub(crate) columns: usize,
    pub(crate) out: Place,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "narrow",
        entries: &["narrow"],
        constants: vec![],
        params_bytes: NarrowParams::BYTES,
    }
}

impl Kernel for Narrow {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        strips(rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        NarrowParams {
            rows,
            x: at.place(self.x),
            out: at.place(self.out),
            columns: self.columns as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Place> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Place> {
        vec![self.out]
    }
}
