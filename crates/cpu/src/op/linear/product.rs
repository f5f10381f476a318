//! A product to compute: activations, a weight matrix or a stack of them, and which rows meet which matrix.

use carat_model::weights::{Weight, Weights};

use crate::pool::OutputTile;
use carat_cpu_kernels::{
    gemm::{
        WeightRows,
        activations::Activations,
        choice::{KernelChoice, WeightFormat, choose},
        row_class::RowClass,
    },
    isa::Isa,
};

/// The activations of a product, in the format its weights want.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    Quantized(&'a Activations),
    F32 { data: &'a [f32], columns: usize },
}

/// Output rows that use one matrix of a stack: those that chose an expert. A dense product has one group, of matrix 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertGroup {
    pub(crate) matrix: usize,
}

/// A product to compute.
pub(crate) struct Product<'a> {
    /// Of the batch, however few of its rows an expert has.
    pub(crate) class: RowClass,
    pub(crate) weights: &'a Weights,
    pub(crate) weight: Weight,
    pub(crate) input: Input<'a>,
    /// The input row of each output row; `None` when they are the same.
    pub(crate) gather: Option<&'a [usize]>,
    /// Group `i` covers the output rows from entry `i` to entry `i + 1`.
    pub(crate) row_bounds: &'a [usize],
    pub(crate) groups: &'a [ExpertGroup],
}

impl Product<'_> {
    /// The kernel for so many rows that meet one matrix.
    pub(super) fn kernel(&self, isa: Isa, rows: usize) -> KernelChoice {
        let matrix = self.weights.matrix(self.weight);
        let quant = matrix.quant;
        let weights = WeightFormat {
            quant,
            columns: matrix.columns,
            // Looks at every weight the first time, so only where it matters.
            is_exact_bf16: quant.is_float()
                && self.class == RowClass::Large
                && self.weights.is_exact_bf16(self.weight),
        };
        choose(weights, self.class, rows, isa)
    }

    /// Rows of the largest group.
    pub(super) fn max_rows(&self) -> usize {
        let rows = self.row_bounds.windows(2).map(|w| w[1] - w[0]);
        rows.max().unwrap_or(0)
    }

    /// The weights of a tile.
    pub(super) fn tile_weights(&self, tile: &OutputTile<'_>, interleaved: bool) -> WeightRows<'_> {
        let all = self.matrix_rows(self.groups[tile.row_group].matrix);
        let all = if interleaved { all.interleaved() } else { all };
        all.slice(tile.columns.clone())
    }

    /// The weights of one matrix of the stack.
    pub(super) fn matrix_rows(&self, index: usize) -> WeightRows<'_> {
        let matrix = self.weights.matrix(self.weight);
        WeightRows::new(
            &self.weights.bytes(self.weight)[index * matrix.matrix_stride..],
            matrix.row_stride,
            matrix.row_bytes(),
            matrix.rows,
        )
    }

    pub(super) fn input_row(&self, row: usize) -> usize {
        self.gather.map_or(row, |gather| gather[row])
    }
}
