//! One output of one row, for heads that compute few of their outputs.

use carat_model::weights::{Weight, Weights};

use super::Input;
use carat_cpu_kernels::{gemm::WeightRows, table::Kernels};

/// The product of input row `row` with one row of a matrix: the same as a small batch would have there.
pub(crate) fn logit(
    kernels: &Kernels,
    weights: &Weights,
    (weight, output): (Weight, usize),
    input: Input<'_>,
    row: usize,
    out: &mut f32,
) {
    let bytes = weights.row(weight, 0, output);
    let quant = weights.matrix(weight).quant;
    let rows = WeightRows::new(bytes, bytes.len(), bytes.len(), 1);
    let out = std::slice::from_mut(out);
    match input {
        Input::Quantized(x) => kernels.gemv(quant, rows, &[x.row(row)], out),
        Input::F32 { data, columns } => {
            let x = &data[row * columns..][..columns];
            kernels.gemm_float(quant, rows, &[x], out);
        }
    }
}
