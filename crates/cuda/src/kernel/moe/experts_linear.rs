//! Twin of `kernels/moe/experts_linear.cu`: the plain product with routed experts.

use carat_gguf::QuantType;
use carat_model::weights::Weight;

use crate::kernel::{
    Addresses, Kernel, Operand, RowsAt, Specialization, linear::linear_plain::OUTPUTS,
    specialization::format_constant,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::{WeightFormat, WeightOperand},
};

params! {
    struct ExpertsLinearParams {
        rows: RowsAt,
        x: Address,
        route: Address,
        w: Address,
        row_bytes: u64,
        matrix_bytes: u64,
        out: Address,
        columns: u32,
        outputs: u32,
        top_k: u32,
        x_per_token: u32,
    }
}

/// Products of each row with its routed experts: `[rows, top_k, outputs]`.
#[derive(Debug)]
pub(crate) struct ExpertsLinear {
    pub(crate) x: Operand,
    pub(crate) x_rows: ExpertInput,
    pub(crate) route: Operand,
    pub(crate) w: Weight,
    pub(crate) quant: QuantType,
    pub(crate) columns: usize,
    pub(crate) outputs: usize,
    pub(crate) top_k: usize,
    pub(crate) out: Operand,
}

/// Input of the routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertInput {
    /// The token's row for all of them.
    PerToken,
    /// One row per routed expert.
    PerExpert,
}

pub(crate) fn specialization(quant: QuantType) -> Specialization {
    Specialization {
        kernel: "experts_linear",
        entries: &["experts_linear"],
        constants: vec![format_constant(quant)],
        params_bytes: ExpertsLinearParams::BYTES,
    }
}

impl Kernel for ExpertsLinear {
    fn specialization(&self) -> Specialization {
        specialization(self.quant)
    }

    fn grid(&self, rows: usize) -> Grid {
        let blocks = (rows * self.top_k, self.outputs.div_ceil(OUTPUTS));
        Grid::new(blocks, 32 * OUTPUTS)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let w = at.matrix(&WeightOperand::one(self.w, WeightFormat::File));
        ExpertsLinearParams {
            rows,
            x: at.operand(self.x),
            route: at.operand(self.route),
            w: w.start,
            row_bytes: w.row_bytes as u64,
            matrix_bytes: w.matrix_bytes as u64,
            out: at.operand(self.out),
            columns: self.columns as u32,
            outputs: self.outputs as u32,
            top_k: self.top_k as u32,
            x_per_token: match self.x_rows {
                ExpertInput::PerToken => 1,
                ExpertInput::PerExpert => self.top_k as u32,
            },
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        vec![WeightOperand::one(self.w, WeightFormat::File)]
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.x, self.route]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}
