//! Twin of `kernels/elementwise/pointwise.cu`: add, GELU times a second value, scale, softcap.

use crate::kernel::{Addresses, Kernel, Operand, RowsAt, Specialization, grid::elementwise_grid};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
};

params! {
    struct PointwiseParams {
        rows: RowsAt,
        a: Address,
        b: Address,
        out: Address,
        columns: u32,
        b_columns: u32,
        b_column: u32,
        factor: f32,
    }
}

/// The function of each value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Function {
    Add(ColumnSlice),
    GeluMul(ColumnSlice),
    Scale { by: f32 },
    Softcap { cap: f32 },
}

/// A second operand: as many columns as the first has, from `column` on, of rows that have `columns`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ColumnSlice {
    pub(crate) operand: Operand,
    pub(crate) columns: usize,
    pub(crate) column: usize,
}

#[derive(Debug)]
pub(crate) struct Pointwise {
    pub(crate) function: Function,
    pub(crate) a: Operand,
    pub(crate) columns: usize,
    pub(crate) out: Operand,
}

impl Pointwise {
    fn second(&self) -> Option<ColumnSlice> {
        match self.function {
            Function::Add(b) | Function::GeluMul(b) => Some(b),
            Function::Scale { .. } | Function::Softcap { .. } => None,
        }
    }
}

pub(crate) fn specialization() -> Specialization {
    Specialization {
        kernel: "pointwise",
        entries: &["add_values", "gelu_mul", "scale", "softcap"],
        constants: vec![],
        params_bytes: PointwiseParams::BYTES,
    }
}

impl Kernel for Pointwise {
    fn specialization(&self) -> Specialization {
        specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        let entry = match self.function {
            Function::Add(_) => 0,
            Function::GeluMul(_) => 1,
            Function::Scale { .. } => 2,
            Function::Softcap { .. } => 3,
        };
        Grid {
            entry,
            ..elementwise_grid(rows, self.columns)
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let b = self.second();
        PointwiseParams {
            rows,
            a: at.operand(self.a),
            b: b.map_or(Address::NULL, |b| at.operand(b.operand)),
            out: at.operand(self.out),
            columns: self.columns as u32,
            b_columns: b.map_or(0, |b| b.columns) as u32,
            b_column: b.map_or(0, |b| b.column) as u32,
            factor: match self.function {
                Function::Scale { by } => by,
                Function::Softcap { cap } => cap,
                Function::Add(_) | Function::GeluMul(_) => 0.0,
            },
        }
        .bytes()
    }

    fn reads(&self) -> Vec<Operand> {
        let b = self.second().map(|b| b.operand);
        [self.a].into_iter().chain(b).collect()
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}
