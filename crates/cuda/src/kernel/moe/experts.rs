//! Twins of `kernels/moe/route.cu`, `kernels/moe/experts_linear.cu` and `kernels/moe/experts_sum.cu`.

use carat_gguf::QuantType;
use carat_model::weights::Weight;

use crate::kernel::{
    Addresses, Kernel, Operand, RowsAt, Specialization, elementwise_grid, format,
    linear::linear_plain::OUTPUTS,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::{WeightFormat, WeightOperand},
};

/// The router keeps a row's scores in shared memory.
pub(crate) const MAX_EXPERTS: usize = 1024;

params! {
    struct RouteParams {
        rows: RowsAt,
        scores: Address,
        expert_scale: Address,
        out: Address,
        experts: u32,
        top_k: u32,
    }
}

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
        x_choices: u32,
    }
}

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

/// From scores to choices and their weights.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) scores: Operand,
    pub(crate) expert_scale: Option<Weight>,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) out: Operand,
}

pub(crate) fn route_specialization() -> Specialization {
    Specialization {
        kernel: "route",
        entries: &["route"],
        constants: vec![],
        params_bytes: RouteParams::BYTES,
    }
}

impl Kernel for Route {
    fn specialization(&self) -> Specialization {
        route_specialization()
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, 1), 32)
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        RouteParams {
            rows,
            scores: at.operand(self.scores),
            expert_scale: at.vector(self.expert_scale),
            out: at.operand(self.out),
            experts: self.experts as u32,
            top_k: self.top_k as u32,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        WeightOperand::vectors([self.expert_scale])
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.scores]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}

/// Products of each row with the matrices it chose: `[rows, top_k, outputs]`.
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

/// What the chosen matrices are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertInput {
    /// The same row for all choices.
    PerToken,
    /// A row for each.
    PerExpert,
}

pub(crate) fn linear_specialization(quant: QuantType) -> Specialization {
    Specialization {
        kernel: "experts_linear",
        entries: &["experts_linear"],
        constants: vec![format(quant)],
        params_bytes: ExpertsLinearParams::BYTES,
    }
}

impl Kernel for ExpertsLinear {
    fn specialization(&self) -> Specialization {
        linear_specialization(self.quant)
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
            x_choices: match self.x_rows {
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

/// The weighted sum over a row's choices.
#[derive(Debug)]
pub(crate) struct ExpertsSum {
    pub(crate) x: Operand,
    pub(crate) route: Operand,
    pub(crate) columns: usize,
    pub(crate) top_k: usize,
    pub(crate) out: Operand,
}

pub(crate) fn sum_specialization() -> Specialization {
    Specialization {
        kernel: "experts_sum",
        entries: &["experts_sum"],
        constants: vec![],
        params_bytes: ExpertsSumParams::BYTES,
    }
}

impl Kernel for ExpertsSum {
    fn specialization(&self) -> Specialization {
        sum_specialization()
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
