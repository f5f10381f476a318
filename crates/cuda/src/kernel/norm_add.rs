//! Twin of `kernels/norm_add.cu`.

use carat_model::weights::Weight;

use super::{Addresses, Kernel, Place, RowsAt, Specialization, norm_threads};
use crate::{
    device::Address,
    launch::Grid,
    params::{Params, params},
    weights::Packed,
};

params! {
    struct NormAddParams {
        rows: RowsAt,
        x: Address,
        weight: Address,
        a: Address,
        sum: Address,
        next_weight: Address,
        next: Address,
        columns: u32,
        eps: f32,
        by: f32,
        next_eps: f32,
    }
}

/// `sum = (a + norm(x)) * by`, and the norm of that for whoever comes next.
#[derive(Debug)]
pub(crate) struct NormAdd {
    pub(crate) x: Place,
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) a: Place,
    pub(crate) by: f32,
    pub(crate) sum: Place,
    pub(crate) next: Option<NextNorm>,
    pub(crate) columns: usize,
}

#[derive(Debug)]
pub(crate) struct NextNorm {
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) out: Place,
}

pub(super) fn specialization() -> Specialization {
    Specialization {
        kernel: "norm_add",
        entries: &["norm_add", "norm_add_norm"],
        constants: vec![],
        params_bytes: NormAddParams::BYTES,
    }
}

impl Kernel for NormAdd {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid {
            entry: usize::from(self.next.is_some()),
            ..Grid::new((rows, 1), norm_threads(self.columns))
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let next = self.next.as_ref();
        NormAddParams {
            rows,
            x: at.place(self.x),
            weight: at.vector(self.weight),
            a: at.place(self.a),
            sum: at.place(self.sum),
            next_weight: at.vector(next.and_then(|n| n.weight)),
            next: next.map_or(Address::NULL, |n| at.place(n.out)),
            columns: self.columns as u32,
            eps: self.eps,
            by: self.by,
            next_eps: next.map_or(0.0, |n| n.eps),
        }
        .bytes()
    }

    fn weights(&self) -> Vec<Packed> {
        Packed::vectors([self.weight, self.next.as_ref().and_then(|n| n.weight)])
    }

    fn reads(&self) -> Vec<Place> {
        vec![self.x, self.a]
    }

    fn writes(&self) -> Vec<Place> {
        let next = self.next.as_ref().map(|n| n.out);
        [self.sum].into_iter().chain(next).collect()
    }
}
