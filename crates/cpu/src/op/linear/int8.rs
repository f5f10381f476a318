//! Tiles of products with quantized weights and int8 activations.

use std::ops::Range;

use carat_gguf::QuantType;

use super::Product;
use crate::{op::workers::ThreadScratch, pool::OutputTile};
use carat_cpu_kernels::{
    gemm::{
        READ_STREAMS, WeightRows,
        activations::{Activations, Row},
        amx_int8::ActivationColumns,
        choice::KernelChoice,
        gemv_transposed, packed_int8,
    },
    table::{Kernels, TileKernels},
};

/// Arranges the rows of every group as the columns of int8 tiles, and returns the column sets of each.
pub(super) fn arrange_columns(
    product: &Product<'_>,
    x: &Activations,
    columns: &mut ActivationColumns,
) -> Vec<Range<usize>> {
    let matrix = product.weights.matrix(product.weight);
    let rows = |rows: Range<usize>| rows.map(|row| x.row(product.input_row(row)));
    product
        .row_bounds
        .windows(2)
        .map(|group| columns.add(matrix.quant, matrix.columns, rows(group[0]..group[1])))
        .collect()
}

/// Fills a tile in int8 tile registers.
pub(super) fn fill_amx(
    kernels: &TileKernels,
    (quant, weights): (QuantType, WeightRows<'_>),
    (columns, sets): (&ActivationColumns, Range<usize>),
    tile: &mut OutputTile<'_>,
    scratch: &mut ThreadScratch,
) {
    let ThreadScratch {
        output, amx_int8, ..
    } = scratch;
    output.resize(tile.rows.len() * weights.len(), 0.0);
    kernels.gemm_int8(quant, weights, columns, sets, amx_int8, output);
    store_rows(output, tile.rows.start, tile);
}

/// Fills a tile of few rows, with weights read where they lie. `kernel` is one of the two GEMVs.
pub(super) fn fill_gemv<'a>(
    kernels: &Kernels,
    kernel: KernelChoice,
    (quant, weights): (QuantType, WeightRows<'_>),
    x: impl Fn(usize) -> Row<'a>,
    tile: &mut OutputTile<'_>,
    scratch: &mut ThreadScratch,
) {
    let ThreadScratch {
        output,
        gemv_transposed,
        ..
    } = scratch;
    let mut rows: [Row<'_>; gemv_transposed::MAX_ROWS] = [&[]; gemv_transposed::MAX_ROWS];
    for (to, row) in rows.iter_mut().zip(tile.rows.clone()) {
        *to = x(row);
    }
    let rows = &rows[..tile.rows.len()];
    output.resize(rows.len() * weights.len(), 0.0);
    if kernel == KernelChoice::GemvTransposed {
        kernels.gemv_transposed(quant, weights, rows, gemv_transposed, output);
    } else {
        kernels.gemv(quant, weights, rows, output);
    }
    store_rows(output, tile.rows.start, tile);
}

/// Fills a tile with weights unpacked once, as all rows pass by.
pub(super) fn fill_packed<'a>(
    kernels: &Kernels,
    (quant, weights): (QuantType, WeightRows<'_>),
    x: impl Fn(usize) -> Row<'a>,
    tile: &mut OutputTile<'_>,
    scratch: &mut ThreadScratch,
) {
    let ThreadScratch {
        panels,
        packed_int8,
        ..
    } = scratch;
    let count = weights.len().div_ceil(packed_int8::ROWS);
    let panels = &mut panels[..count];
    for (p, panel) in panels.iter_mut().enumerate() {
        let rows = p * packed_int8::ROWS..weights.len().min((p + 1) * packed_int8::ROWS);
        kernels.pack_int8(quant, weights.slice(rows), panel);
    }
    let mut rows: [Row<'_>; packed_int8::MAX_ROWS] = [&[]; packed_int8::MAX_ROWS];
    let mut first = tile.rows.start;
    while first < tile.rows.end {
        let block = first..tile.rows.end.min(first + packed_int8::MAX_ROWS);
        for (to, row) in rows.iter_mut().zip(block.clone()) {
            *to = x(row);
        }
        kernels.gemm_packed_int8(panels, &rows[..block.len()], packed_int8);
        for (i, row) in block.clone().enumerate() {
            packed_int8.copy_row(i, tile.row_mut(row));
        }
        first = block.end;
    }
}

/// Copies `[rows, tile columns]` to the rows of a tile from `first` on.
pub(super) fn store_rows(output: &[f32], first: usize, tile: &mut OutputTile<'_>) {
    for (row, values) in output.chunks_exact(tile.columns.len()).enumerate() {
        tile.store::<READ_STREAMS>(first + row, values);
    }
}
