//! Twin of `kernels/norm/norm.cu`.

use carat_model::weights::Weight;

use crate::kernel::{Addresses, Kernel, Place, RowsAt, Specialization, norm_threads};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::Packed,
};

params! {
    struct NormParams {
        rows: RowsAt,
        x: Address,
        weight: Address,
        out: Address,
        columns: u32,
        group: u32,
        eps: f32,
    }
}

#[derive(Debug)]
pub(crate) struct Norm {
    pub(crate) x: Place,
    pub(crate) weight: Option<Weight>,
    pub(crate) columns: usize,
    pub(crate) group: usize,
    pub(crate) eps: f32,
    pub(crate) out: Place,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "norm",
        entries: &["norm_rows"],
        constants: vec![],
        params_bytes: NormParams::BYTES,
    }
}

impl Kernel for Norm {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, self.columns / self.group), norm_threads(self.group))
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        NormParams {
            rows,
            x: at.place(self.x),
            weight: at.vector(self.weight),
            out: at.place(self.out),
            columns: self.columns as u32,
            group: self.group as u32,
            eps: self.eps,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<Packed> {
        Packed::vectors([self.weight])
    }

    fn reads(&self) -> Vec<Place> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Place> {
        vec![self.out]
    }
}
