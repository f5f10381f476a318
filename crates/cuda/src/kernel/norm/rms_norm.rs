//! Twin of `kernels/norm/rms_norm.cu`: the norm by itself, whose bits every fused norm repeats.

use carat_model::weights::Weight;

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization, grid::norm_threads};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::WeightOperand,
};

params! {
    struct RmsNormParams {
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
pub(crate) struct RmsNorm {
    pub(crate) x: Operand,
    pub(crate) weight: Option<Weight>,
    pub(crate) columns: usize,
    pub(crate) group: usize,
    pub(crate) eps: f32,
    pub(crate) out: Operand,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "rms_norm",
        entries: &["rms_norm"],
        constants: vec![],
        params_bytes: RmsNormParams::BYTES,
    }
}

impl Kernel for RmsNorm {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, self.columns / self.group), norm_threads(self.group))
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        RmsNormParams {
            rows,
            x: at.operand(self.x),
            weight: at.vector(self.weight),
            out: at.operand(self.out),
            columns: self.columns as u32,
            group: self.group as u32,
            eps: self.eps,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        WeightOperand::vectors([self.weight])
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}
