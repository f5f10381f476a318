//! A call: one launch of the lowered program, of a native kernel or of cuBLASLt. Lowering writes calls; binding them to addresses
//! is `run/program.rs`.

use carat_model::{phase::Origin, plan::Rows};

use crate::{
    device::cublaslt::Out,
    kernel::{Kernel, Operand, WeightOperand},
};

/// One launch, not yet bound to a device.
#[derive(Debug)]
pub(crate) struct Call {
    /// Label of the step or steps it computes, such as `L12.attn.q+k+v`, with its part in them where it is one launch of several.
    pub(crate) label: String,
    pub(crate) origin: Origin,
    pub(crate) rows: Rows,
    /// Buckets it is launched for; others have another call in its place.
    pub(crate) buckets: Buckets,
    pub(crate) launch: Launch,
}

/// Buckets of rows, from the least to the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buckets {
    min: usize,
    max: usize,
}

impl Buckets {
    pub(crate) const ALL: Buckets = Buckets {
        min: 0,
        max: usize::MAX,
    };

    pub(crate) fn up_to(max: usize) -> Buckets {
        Buckets { min: 0, max }
    }

    pub(crate) fn above(rows: usize) -> Buckets {
        Buckets {
            min: rows + 1,
            max: usize::MAX,
        }
    }

    pub(crate) fn hold(self, rows: usize) -> bool {
        (self.min..=self.max).contains(&rows)
    }
}

#[derive(Debug)]
pub(crate) enum Launch {
    Kernel(Box<dyn Kernel>),
    CublasLt(CublasLtGemm),
}

/// `out = alpha * x . w^T` by cuBLASLt.
#[derive(Clone, Debug)]
pub(crate) struct CublasLtGemm {
    /// F16.
    pub(crate) x: Operand,
    /// F16, too.
    pub(crate) w: WeightOperand,
    pub(crate) out: Operand,
    pub(crate) kind: Out,
    pub(crate) alpha: f32,
    pub(crate) outputs: usize,
    pub(crate) columns: usize,
    /// Columns of a row of `out`.
    pub(crate) stride: usize,
    /// The output must still be multiplied by one factor per row: it is no value of the plan yet.
    pub(crate) scaled: bool,
}

impl Call {
    pub(crate) fn kernel(&self) -> Option<&dyn Kernel> {
        match &self.launch {
            Launch::Kernel(kernel) => Some(kernel.as_ref()),
            Launch::CublasLt(_) => None,
        }
    }

    /// Operands it reads, except weights and KV.
    pub(crate) fn reads(&self) -> Vec<Operand> {
        match &self.launch {
            Launch::Kernel(kernel) => kernel.reads(),
            Launch::CublasLt(product) => vec![product.x],
        }
    }

    /// Operands it writes, except KV.
    pub(crate) fn writes(&self) -> Vec<Operand> {
        match &self.launch {
            Launch::Kernel(kernel) => kernel.writes(),
            Launch::CublasLt(product) => vec![product.out],
        }
    }

    /// Whether its output must still be multiplied by one factor per row: it is no value of the plan yet.
    pub(crate) fn is_scaled(&self) -> bool {
        match &self.launch {
            Launch::Kernel(kernel) => kernel.is_scaled(),
            Launch::CublasLt(product) => product.scaled,
        }
    }

    pub(crate) fn weights(&self) -> Vec<WeightOperand> {
        match &self.launch {
            Launch::Kernel(kernel) => kernel.weights(),
            Launch::CublasLt(product) => vec![product.w.clone()],
        }
    }
}
