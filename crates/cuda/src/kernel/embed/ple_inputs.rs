//! Twin of `kernels/embed/ple_inputs.cu`: per-layer inputs from a token's table row and its embedding's projection.

use carat_gguf::QuantType;
use carat_model::weights::Weight;

use crate::kernel::{
    Addresses, Kernel, Operand, RowsAt, Specialization, grid::norm_threads,
    specialization::format_constant,
};
use crate::{
    device::{Address, Grid},
    kernel::params::{Params, params},
    kernel::weights::{WeightFormat, WeightOperand},
};

/// The widest group that a block's shared memory holds.
pub(crate) const MAX_GROUP: usize = 1024;

params! {
    struct PleInputsParams {
        rows: RowsAt,
        tokens: Address,
        table: Address,
        row_bytes: u64,
        context: Address,
        weight: Address,
        out: Address,
        columns: u32,
        group: u32,
        eps: f32,
        context_scale: f32,
        table_scale: f32,
        by: f32,
    }
}

#[derive(Debug)]
pub(crate) struct PleInputs {
    pub(crate) context: Operand,
    pub(crate) context_scale: f32,
    pub(crate) weight: Option<Weight>,
    pub(crate) eps: f32,
    pub(crate) table: Weight,
    pub(crate) quant: QuantType,
    pub(crate) table_scale: f32,
    pub(crate) by: f32,
    pub(crate) columns: usize,
    pub(crate) group: usize,
    pub(crate) out: Operand,
}

pub(crate) fn specialization(quant: QuantType) -> Specialization {
    Specialization {
        kernel: "ple_inputs",
        entries: &["ple_inputs"],
        constants: vec![format_constant(quant), ("MAX_GROUP", MAX_GROUP.to_string())],
        params_bytes: PleInputsParams::BYTES,
    }
}

impl PleInputs {
    fn packed(&self) -> WeightOperand {
        WeightOperand::one(self.table, WeightFormat::Table)
    }
}

impl Kernel for PleInputs {
    fn specialization(&self) -> Specialization {
        specialization(self.quant)
    }

    fn grid(&self, rows: usize) -> Grid {
        Grid::new((rows, self.columns / self.group), norm_threads(self.group))
    }

    fn params(&self, at: &Addresses, rows: RowsAt) -> Vec<u8> {
        let table = at.matrix(&self.packed());
        PleInputsParams {
            rows,
            tokens: at.batch.tokens,
            table: table.start,
            row_bytes: table.row_bytes as u64,
            context: at.operand(self.context),
            weight: at.vector(self.weight),
            out: at.operand(self.out),
            columns: self.columns as u32,
            group: self.group as u32,
            eps: self.eps,
            context_scale: self.context_scale,
            table_scale: self.table_scale,
            by: self.by,
        }
        .bytes()
    }

    fn weights(&self) -> Vec<WeightOperand> {
        let mut weights = WeightOperand::vectors([self.weight]);
        weights.push(self.packed());
        weights
    }

    fn reads(&self) -> Vec<Operand> {
        vec![self.context]
    }

    fn writes(&self) -> Vec<Operand> {
        vec![self.out]
    }
}
