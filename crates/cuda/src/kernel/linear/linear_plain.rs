//! Twin of `kernels/linear/linear_plain.cu`: the product of any format in f32, which faster ones are compared with.

use carat_gguf::QuantType;
use carat_model::weights::Weight;

use crate::kernel::{
    Addresses, Kernel, Operand, RowsAt, Specialization, specialization::format_constant,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::{WeightFormat, WeightOperand},
};

/// Outputs of a block, one per warp.
pub(crate) const OUTPUTS: usize = 8;
/// Rows that `linear_plain_8` takes together.
const TILE: usize = 8;

params! {
    struct LinearPlainParams {
        rows: RowsAt,
        x: Address,
        w: Address,
        row_bytes: u64,
        out: Address,
        columns: u32,
        outputs: u32,
    }
}

#[derive(Debug)]
pub(crate) struct LinearPlain {
    pub(crate) x: Operand,
    pub(crate) w: Weight,
    pub(crate) quant: QuantType,
    pub(crate) columns: usize,
    pub(crate) outputs: usize,
    pub(crate) out: Operand,
}

pub(crate) fn specialization(quant: QuantType) -> Specialization {
    Specialization {
        kernel: "linear_plain",
        entries: &["linear_plain_1", "linear_plain_8"],
        constants: vec![format_constant(quant)],
        params_bytes: LinearPlainParams::BYTES,
    }
}

impl Kernel for LinearPlain {
    fn specialization(&self) -> Specialization {
        specialization(self.quant)
    }

    fn grid(&self, rows: usize) -> Grid {
        let (entry, tiles) = match rows {
            1 => (0, 1),
            _ => (1, rows.div_ceil(TILE)),
        };
        let blocks = (tiles, self.outputs.div_ceil(OUTPUTS));
        Grid {
            entry,
            ..Grid::new(blocks, 32 * OUTPUTS)
        }
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let w = at.matrix(&WeightOperand::one(self.w, WeightFormat::File));
        LinearPlainParams {
            rows,
            x: at.operand(self.x),
            w: w.start,
            row_bytes: w.row_bytes as u64,
            out: at.operand(self.out),
            columns: self.columns as u32,
            outputs: self.outputs as u32,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        vec![WeightOperand::one(self.w, WeightFormat::File)]
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}
