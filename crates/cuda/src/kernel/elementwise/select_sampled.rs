//! Twin of `kernels/elementwise/select_sampled.cu`: the rows that will be sampled, of a value of all rows.

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization, grid::elementwise_grid};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

params! {
    pub(crate) struct SelectSampledParams {
        rows: RowsAt,
        x: Address,
        out: Address,
        columns: u32,
    }
}

#[derive(Debug)]
pub(crate) struct SelectSampled {
    pub(crate) x: Operand,
    pub(crate) columns: usize,
    pub(crate) out: Operand,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "select_sampled",
        entries: &["select_sampled"],
        constants: vec![],
        params_bytes: SelectSampledParams::BYTES,
    }
}

pub(crate) fn grid(rows: usize, columns: usize) -> Grid {
    elementwise_grid(rows, columns)
}

impl Kernel for SelectSampled {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        grid(rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        SelectSampledParams {
            rows,
            x: at.operand(self.x),
            out: at.operand(self.out),
            columns: self.columns as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}
