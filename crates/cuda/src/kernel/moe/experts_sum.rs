//! Twin of `kernels/moe/experts_sum.cu`: the routed experts' outputs, summed by weight.

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization, grid::elementwise_grid};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

params! {
    struct ExpertsSumParams {
        rows: RowsAt,
        x: Address,
        route: Address,
        out: Address,
        columns: u32,
        top_k: u32,
    }
}

/// The weighted sum over a row's routed experts.
#[derive(Debug)]
pub(crate) struct ExpertsSum {
    pub(crate) x: Operand,
    pub(crate) route: Operand,
    pub(crate) columns: usize,
    pub(crate) top_k: usize,
    pub(crate) out: Operand,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "experts_sum",
        entries: &["experts_sum"],
        constants: vec![],
        params_bytes: ExpertsSumParams::BYTES,
    }
}

impl Kernel for ExpertsSum {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        elementwise_grid(rows, self.columns)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        ExpertsSumParams {
            rows,
            x: at.operand(self.x),
            route: at.operand(self.route),
            out: at.operand(self.out),
            columns: self.columns as u32,
            top_k: self.top_k as u32,
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x, self.route]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}
