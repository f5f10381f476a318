//! Tiles of products with quantized weights and int8 activations.

use std::{ops::Range, slice::Chunks};

use carat_gguf::QuantType;

use super::Product;
use crate::{
    op::workers::{ThreadScratch, Workers},
    pool::OutputTile,
};
use carat_cpu_kernels::{
    gemm::{
        READ_STREAMS, WeightRows,
        activations::{Activations, Row},
        amx_int8::{self, ActivationColumns},
        choice::KernelChoice,
        gemv_transposed,
        packed_int8::{self, FourRows},
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

/// Rows of a product in blocks of four, as weights unpacked into panels are multiplied with them.
pub(super) struct Blocks {
    /// Where the blocks of each group of rows begin in [`Workers::four_rows`], and where the last end.
    starts: Vec<usize>,
    /// Entries of a block.
    block: usize,
    /// Values of a weight's group.
    pub(super) group: usize,
}

impl Blocks {
    /// Arranges the rows of a product behind the blocks that are there.
    pub(super) fn arrange(
        product: &Product<'_>,
        x: &Activations,
        first: usize,
        workers: &mut Workers,
    ) -> Blocks {
        let matrix = product.weights.matrix(product.weight);
        let (block, group) = (
            FourRows::count(matrix.columns),
            amx_int8::group_of(matrix.quant),
        );
        let mut starts = vec![0];
        for bounds in product.row_bounds.windows(2) {
            let blocks = (bounds[1] - bounds[0]).div_ceil(packed_int8::MAX_ROWS);
            starts.push(starts[starts.len() - 1] + blocks);
        }
        let end = first + starts[starts.len() - 1] * block;
        if workers.four_rows.len() < end {
            workers.four_rows.resize(end, FourRows::ZERO);
        }
        let kernels = workers.kernels;
        let arranged = &mut workers.four_rows[first..end];
        workers
            .pool
            .for_each_chunk(arranged, block, |index, arranged| {
                let of = starts.partition_point(|start| *start <= index) - 1;
                let row = product.row_bounds[of] + (index - starts[of]) * packed_int8::MAX_ROWS;
                let end = product.row_bounds[of + 1].min(row + packed_int8::MAX_ROWS);
                let mut rows: [Row<'_>; packed_int8::MAX_ROWS] = [&[]; packed_int8::MAX_ROWS];
                for (to, row) in rows.iter_mut().zip(row..end) {
                    *to = x.row(product.input_row(row));
                }
                kernels.arrange_int8(&rows[..end - row], group, arranged);
            });
        for start in &mut starts {
            *start = first + *start * block;
        }
        Blocks {
            starts,
            block,
            group,
        }
    }

    /// Where those of the last group end.
    pub(super) fn end(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// The blocks of a group of rows, as many together as pass by weights at once.
    fn of_group<'a>(&self, group: usize, four_rows: &'a [FourRows]) -> Chunks<'a, FourRows> {
        four_rows[self.starts[group]..self.starts[group + 1]]
            .chunks(packed_int8::MAX_BLOCKS * self.block)
    }
}

/// Fills a tile with weights unpacked once, as all rows pass by.
pub(super) fn fill_packed(
    kernels: &Kernels,
    (quant, weights): (QuantType, WeightRows<'_>),
    (four_rows, blocks): (&[FourRows], &Blocks),
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
    let together = packed_int8::MAX_BLOCKS * packed_int8::MAX_ROWS;
    let firsts = tile.rows.clone().step_by(together);
    for (first, x) in firsts.zip(blocks.of_group(tile.row_group, four_rows)) {
        kernels.gemm_packed_int8(panels, x, packed_int8);
        let rows = first..tile.rows.end.min(first + together);
        for (i, row) in rows.enumerate() {
            packed_int8.copy_row(i, tile.row_mut(row));
        }
    }
}

/// Copies `[rows, tile columns]` to the rows of a tile from `first` on.
pub(super) fn store_rows(output: &[f32], first: usize, tile: &mut OutputTile<'_>) {
    for (row, values) in output.chunks_exact(tile.columns.len()).enumerate() {
        tile.store::<READ_STREAMS>(first + row, values);
    }
}
