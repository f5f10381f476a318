//! Tiles of products with float weights and f32 activations.

use carat_gguf::QuantType;

use super::int8::store_rows;
use crate::{op::workers::ThreadScratch, pool::OutputTile};
use carat_cpu_kernels::{
    gemm::{WeightRows, float},
    table::Kernels,
};

/// Fills a tile. With many rows, shorter floats are widened once for all of them.
pub(super) fn fill<'a>(
    kernels: &Kernels,
    (mut quant, mut weights): (QuantType, WeightRows<'_>),
    x: impl Fn(usize) -> &'a [f32],
    tile: &mut OutputTile<'_>,
    scratch: &mut ThreadScratch,
) {
    let ThreadScratch {
        output, widened, ..
    } = scratch;
    if tile.rows.len() > float::MAX_ROWS && quant != QuantType::F32 {
        let row_bytes = size_of_val(x(tile.rows.start));
        widened.reserve_exactly(weights.len() * row_bytes);
        kernels.widen(quant, weights, widened);
        weights = WeightRows::new(widened, row_bytes, row_bytes, weights.len());
        quant = QuantType::F32;
    }
    let mut rows: [&[f32]; float::MAX_ROWS] = [&[]; float::MAX_ROWS];
    let mut first = tile.rows.start;
    while first < tile.rows.end {
        let block = first..tile.rows.end.min(first + float::MAX_ROWS);
        for (to, row) in rows.iter_mut().zip(block.clone()) {
            *to = x(row);
        }
        output.resize(block.len() * weights.len(), 0.0);
        kernels.gemm_float(quant, weights, &rows[..block.len()], output);
        store_rows(output, first, tile);
        first = block.end;
    }
}
