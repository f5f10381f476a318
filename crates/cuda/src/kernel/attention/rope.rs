//! Twin of `kernels/attention/rope.cu`: RoPE by itself.

use carat_model::plan::RopeId;

use crate::kernel::{
    Addresses, Kernel, Operand, RowRefsAt, RowsAt, Specialization, grid::elementwise_grid,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

params! {
    struct RopeParams {
        rows: RowsAt,
        row_refs: RowRefsAt,
        x: Address,
        frequencies: Address,
        out: Address,
        columns: u32,
        head_dim: u32,
    }
}

#[derive(Debug)]
pub(crate) struct Rope {
    pub(crate) x: Operand,
    pub(crate) table: RopeId,
    pub(crate) columns: usize,
    pub(crate) head_dim: usize,
    pub(crate) out: Operand,
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "rope",
        entries: &["rope"],
        constants: vec![],
        params_bytes: RopeParams::BYTES,
    }
}

impl Kernel for Rope {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        elementwise_grid(rows, self.columns / 2)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        RopeParams {
            rows,
            row_refs: at.batch.row_refs,
            x: at.operand(self.x),
            frequencies: at.rope(self.table),
            out: at.operand(self.out),
            columns: self.columns as u32,
            head_dim: self.head_dim as u32,
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
