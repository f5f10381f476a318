//! Products of large batches in BF16 tiles.
//!
//! The K dimension is cut into blocks whose weights fit a core's own cache, unpacked by each tile of the output or kept from
//! the first batch on ([`Repacked`]). Activations come as BF16, or in three terms where the weights are floats.

use super::{Input, Product};
use crate::{
    op::{repack::Repacked, workers::Workers},
    pool::{Grid, Pool},
};
use carat_cpu_kernels::{
    gemm::{
        WeightRows,
        amx_bf16::{self, TileOperands, TileRows},
    },
    simd::{Accumulate, Tile},
    table::TileKernels,
};

/// Weight rows of an output tile, at most: the more, the less often activations come from far.
const TILE_COLUMNS: usize = 256;
/// Values of these that are unpacked at a time. Both together fill a third of what a core has to itself.
const K_BLOCK_VALUES: usize = 1536;

/// Fills `out`, `[rows, matrix rows]`.
pub(super) fn run(product: &Product<'_>, workers: &mut Workers, out: &mut [f32]) {
    let kernels = workers.kernels.tiles();
    let kernels = kernels.expect("only a level with tiles has large batches");
    let matrix = product.weights.matrix(product.weight);
    let terms = match product.input {
        Input::Quantized(_) => 1,
        Input::F32 { .. } => amx_bf16::TERMS,
    };
    let left_row = terms * amx_bf16::k_steps(matrix.columns);
    // The first row tile of each group.
    let mut starts = vec![0];
    for group in product.row_bounds.windows(2) {
        starts.push(starts[starts.len() - 1] + (group[1] - group[0]).div_ceil(amx_bf16::ROWS));
    }
    let own = match product.input {
        Input::Quantized(x) if product.gather.is_none() && product.groups.len() == 1 => {
            Some(x.tiles().0)
        }
        _ => {
            arrange(product, kernels, workers, &starts, left_row);
            None
        }
    };
    let left = own.unwrap_or(&workers.bf16_rows);
    let weight_row = amx_bf16::k_steps(matrix.columns);
    let kept = kept_tiles(product, kernels, &workers.pool, &mut workers.repacked);
    let fair = matrix
        .rows
        .div_ceil(4 * amx_bf16::ROWS * workers.pool.threads());
    let grid = Grid {
        data: out,
        columns: matrix.rows,
        row_bounds: product.row_bounds,
        tile_columns: (2 * amx_bf16::ROWS * fair).min(TILE_COLUMNS),
        interleave: 1,
    };
    let k_blocks = matrix.columns.div_ceil(K_BLOCK_VALUES);
    let k_block = matrix
        .columns
        .div_ceil(k_blocks)
        .next_multiple_of(amx_bf16::K_BLOCK_MULTIPLE);
    workers
        .pool
        .for_each_tile(vec![grid], &mut workers.scratch, |scratch, _, mut tile| {
            let weights = product.tile_weights(&tile, false);
            let rows = starts[tile.row_group] * left_row..starts[tile.row_group + 1] * left_row;
            let left = &left[rows];
            for first in (0..matrix.columns).step_by(k_block) {
                let steps = amx_bf16::k_steps(k_block.min(matrix.columns - first));
                let right = if let Some(tiles) = kept {
                    // An output tile is whole rows of weight tiles.
                    TileRows {
                        tiles: &tiles[tile.columns.start / amx_bf16::ROWS * weight_row..],
                        row: weight_row,
                        first: amx_bf16::k_steps(first),
                    }
                } else {
                    let count = weights.len().div_ceil(amx_bf16::ROWS) * steps;
                    if scratch.weight_tiles.len() < count {
                        scratch.weight_tiles.resize(count, Tile::ZERO);
                    }
                    let tiles = &mut scratch.weight_tiles[..count];
                    for (index, tiles) in tiles.chunks_exact_mut(steps).enumerate() {
                        kernels.pack_bf16(matrix.quant, sixteen_rows(weights, index), first, tiles);
                    }
                    TileRows {
                        tiles,
                        row: steps,
                        first: 0,
                    }
                };
                let operands = TileOperands {
                    left: TileRows {
                        tiles: left,
                        row: left_row,
                        first: terms * amx_bf16::k_steps(first),
                    },
                    terms,
                    right,
                    steps,
                };
                let accumulate = if first == 0 {
                    Accumulate::FromZero
                } else {
                    Accumulate::OntoOutput
                };
                kernels.gemm_bf16(&operands, accumulate, &mut tile.as_matrix());
            }
        });
}

/// The matrix in tiles, `[rows of tiles, K steps]`, if there is memory to keep them. Floats are as large in the file, and of
/// experts a prompt uses only some.
fn kept_tiles<'a>(
    product: &Product<'_>,
    kernels: &TileKernels,
    pool: &Pool,
    repacked: &'a mut Repacked,
) -> Option<&'a [Tile]> {
    let matrix = product.weights.matrix(product.weight);
    if matrix.quant.is_float() || matrix.count > 1 {
        return None;
    }
    let steps = amx_bf16::k_steps(matrix.columns);
    let count = matrix.rows.div_ceil(amx_bf16::ROWS) * steps;
    repacked.tiles(product.weight, count, |tiles| {
        let weights = product.matrix_rows(0);
        pool.for_each_chunk(tiles, steps, |index, tiles| {
            kernels.pack_bf16(matrix.quant, sixteen_rows(weights, index), 0, tiles);
        });
    })
}

/// Puts the rows of every group into tiles of its own, which begin at `starts`.
fn arrange(
    product: &Product<'_>,
    kernels: &TileKernels,
    workers: &mut Workers,
    starts: &[usize],
    left_row: usize,
) {
    let count = starts[starts.len() - 1] * left_row;
    if workers.bf16_rows.len() < count {
        workers.bf16_rows.resize(count, Tile::ZERO);
    }
    let tiles = &mut workers.bf16_rows[..count];
    workers
        .pool
        .for_each_chunk(tiles, left_row, |index, tiles| {
            let group = starts.partition_point(|start| *start <= index) - 1;
            let first = product.row_bounds[group] + (index - starts[group]) * amx_bf16::ROWS;
            let rows = first..product.row_bounds[group + 1].min(first + amx_bf16::ROWS);
            match product.input {
                Input::Quantized(x) => {
                    let (from, row_tiles) = x.tiles();
                    for (i, row) in rows.enumerate() {
                        let row = product.input_row(row);
                        let from = &from[row / amx_bf16::ROWS * row_tiles..][..row_tiles];
                        for (tile, from) in tiles.iter_mut().zip(from) {
                            tile.0[i] = from.0[row % amx_bf16::ROWS];
                        }
                    }
                }
                Input::F32 { data, columns } => {
                    let mut values: [&[f32]; amx_bf16::ROWS] = [&[]; amx_bf16::ROWS];
                    for (values, row) in values.iter_mut().zip(rows.clone()) {
                        *values = &data[product.input_row(row) * columns..][..columns];
                    }
                    kernels.split_bf16(&values[..rows.len()], tiles);
                }
            }
        });
}

/// The weight rows of one row of tiles.
fn sixteen_rows(weights: WeightRows<'_>, index: usize) -> WeightRows<'_> {
    let start = index * amx_bf16::ROWS;
    weights.slice(start..weights.len().min(start + amx_bf16::ROWS))
}
