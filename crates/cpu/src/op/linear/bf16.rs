//! Products of large batches in BF16 tiles: those of one input in one round of the pool.
//!
//! The K dimension is cut into blocks whose weights fit a core's own cache, unpacked by each tile of the output or kept from
//! the first batch on ([`Repacked`]). Activations come as BF16, or in three terms where the weights are floats.

use carat_gguf::QuantType;

use super::{Input, Product};
use crate::{
    op::{
        repack::Repacked,
        workers::{ThreadScratch, Workers},
    },
    pool::{Grid, Pool},
};
use carat_cpu_kernels::{
    gemm::{
        WeightRows,
        amx_bf16::{self, TileOperands, TileRows},
    },
    matrix::MatrixMut,
    simd::{Accumulate, Tile},
    table::TileKernels,
};

/// Weight rows of an output tile, at most: the more, the less often activations come from far.
const TILE_COLUMNS: usize = 256;
/// Weight rows of a row of register tiles, of which two are multiplied at a time.
const STEP_COLUMNS: usize = 2 * amx_bf16::ROWS;
/// The fewest rows of a batch that are shared out, if they can be.
const PART_ROWS: usize = 64;
/// What it takes to bring a row of the batch to a tile, as weight rows to multiply it with.
const BRING: usize = 16;
/// What it takes to unpack a weight row, as rows of the batch to multiply it with.
const UNPACK: usize = 30;
/// Values of weight rows that are unpacked at a time. Both together fill a third of what a core has to itself.
const K_BLOCK_VALUES: usize = 1536;

/// Computes products of the same input with some matrices, filling `[rows, matrix rows]` for each.
pub(super) fn run(products: &[&Product<'_>], workers: &mut Workers, outs: Vec<&mut [f32]>) {
    let Some(first) = products.first().filter(|product| product.max_rows() > 0) else {
        return;
    };
    let kernels = workers.kernels.tiles();
    let kernels = kernels.expect("only a level with tiles has large batches");
    let columns = first.weights.matrix(first.weight).columns;
    let terms = match first.input {
        Input::Quantized(_) => 1,
        Input::F32 { .. } => amx_bf16::TERMS,
    };
    let left_row = terms * amx_bf16::k_steps(columns);
    // The first row tile of each group.
    let mut starts = vec![0];
    for group in first.row_bounds.windows(2) {
        starts.push(starts[starts.len() - 1] + (group[1] - group[0]).div_ceil(amx_bf16::ROWS));
    }
    let own = match first.input {
        Input::Quantized(x) if first.gather.is_none() && first.groups.len() == 1 => {
            Some(x.tiles().0)
        }
        _ => {
            arrange(first, kernels, workers, &starts, left_row);
            None
        }
    };
    let left = own.unwrap_or(&workers.bf16_rows);
    let weight_row = amx_bf16::k_steps(columns);
    for product in products {
        keep_tiles(product, kernels, &workers.pool, &mut workers.repacked);
    }
    let kept: Vec<Option<&[Tile]>> = products
        .iter()
        .map(|product| workers.repacked.tiles(product.weight))
        .collect();
    let matrix_rows: Vec<usize> = products
        .iter()
        .map(|product| product.weights.matrix(product.weight).rows)
        .collect();
    let tiling = Tiling::new(&matrix_rows, first.row_bounds, workers.pool.threads());
    let grids = matrix_rows.iter().zip(outs).map(|(columns, out)| Grid {
        data: out,
        columns: *columns,
        row_bounds: &tiling.row_bounds,
        tile_columns: tiling.tile_columns,
        interleave: 1,
    });
    let input = TiledInput {
        kernels,
        columns,
        terms,
        left_row,
    };
    workers.pool.for_each_tile(
        grids.collect(),
        &mut workers.scratch,
        |scratch, index, mut tile| {
            let product = products[index];
            let group = tiling.group(tile.row_group);
            let weights = product.matrix_rows(product.groups[group].matrix);
            let weights = weights.slice(tile.columns.clone());
            // An output tile is whole rows of weight tiles.
            let kept =
                kept[index].map(|tiles| &tiles[tile.columns.start / amx_bf16::ROWS * weight_row..]);
            let before = (tile.rows.start - product.row_bounds[group]) / amx_bf16::ROWS;
            let left = &left[(starts[group] + before) * left_row..];
            let quant = product.weights.matrix(product.weight).quant;
            input.fill(left, (quant, weights, kept), scratch, &mut tile.as_matrix());
        },
    );
}

/// The input of a round, in tiles.
struct TiledInput<'a> {
    kernels: &'a TileKernels,
    columns: usize,
    terms: usize,
    /// Tiles of a row of tiles.
    left_row: usize,
}

impl TiledInput<'_> {
    /// Multiplies rows of tiles with weight rows, which may be kept as tiles.
    fn fill(
        &self,
        left: &[Tile],
        (quant, weights, kept): (QuantType, WeightRows<'_>, Option<&[Tile]>),
        scratch: &mut ThreadScratch,
        out: &mut MatrixMut<'_>,
    ) {
        let k_blocks = self.columns.div_ceil(K_BLOCK_VALUES);
        let k_block = self.columns.div_ceil(k_blocks);
        let k_block = k_block.next_multiple_of(amx_bf16::K_BLOCK_MULTIPLE);
        for first in (0..self.columns).step_by(k_block) {
            let steps = amx_bf16::k_steps(k_block.min(self.columns - first));
            let right = if let Some(tiles) = kept {
                TileRows {
                    tiles,
                    row: amx_bf16::k_steps(self.columns),
                    first: amx_bf16::k_steps(first),
                }
            } else {
                let count = weights.len().div_ceil(amx_bf16::ROWS) * steps;
                if scratch.weight_tiles.len() < count {
                    scratch.weight_tiles.resize(count, Tile::ZERO);
                }
                let tiles = &mut scratch.weight_tiles[..count];
                for (index, tiles) in tiles.chunks_exact_mut(steps).enumerate() {
                    let rows = sixteen_rows(weights, index);
                    self.kernels.pack_bf16(quant, rows, first, tiles);
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
                    row: self.left_row,
                    first: self.terms * amx_bf16::k_steps(first),
                },
                terms: self.terms,
                right,
                steps,
            };
            let accumulate = if first == 0 {
                Accumulate::FromZero
            } else {
                Accumulate::OntoOutput
            };
            self.kernels.gemm_bf16(&operands, accumulate, out);
        }
    }
}

/// How the outputs of one round are cut into tiles.
struct Tiling {
    tile_columns: usize,
    /// Of the groups, or of parts of the only one.
    row_bounds: Vec<usize>,
    groups: usize,
}

impl Tiling {
    /// The tiles with which the thread that has the most of them is done first.
    fn new(matrix_rows: &[usize], row_bounds: &[usize], threads: usize) -> Tiling {
        let groups = row_bounds.len() - 1;
        let rows = row_bounds[groups] - row_bounds[0];
        let parts = if groups == 1 { rows / PART_ROWS } else { 1 };
        let widths = (STEP_COLUMNS..=TILE_COLUMNS).step_by(STEP_COLUMNS);
        let tilings = (1..=parts.max(1)).flat_map(|parts| {
            let part = rows.div_ceil(groups * parts);
            let part = part.next_multiple_of(2 * amx_bf16::ROWS);
            widths.clone().map(move |width| (part, width))
        });
        let slowest = |(part, width): &(usize, usize)| {
            let wide: usize = matrix_rows.iter().map(|rows| rows.div_ceil(*width)).sum();
            let high = groups.max(rows.div_ceil(*part));
            let tile = part * (width + BRING) + UNPACK * width;
            (wide * high).div_ceil(threads) * tile
        };
        let best = tilings.min_by_key(slowest);
        let (part, tile_columns) = best.expect("there are tilings to choose from");
        let row_bounds = if groups == 1 {
            let starts = (row_bounds[0]..row_bounds[1]).step_by(part);
            starts.chain([row_bounds[1]]).collect()
        } else {
            row_bounds.to_vec()
        };
        Tiling {
            tile_columns,
            row_bounds,
            groups,
        }
    }

    /// The group that a row group of the grid is of.
    fn group(&self, row_group: usize) -> usize {
        if self.groups == 1 { 0 } else { row_group }
    }
}

/// Keeps the matrix in tiles, `[rows of tiles, K steps]`, if there is memory for them. Floats are as large in the file, and of
/// experts a prompt uses only some.
fn keep_tiles(product: &Product<'_>, kernels: &TileKernels, pool: &Pool, repacked: &mut Repacked) {
    let matrix = product.weights.matrix(product.weight);
    if matrix.quant.is_float() || matrix.count > 1 {
        return;
    }
    let steps = amx_bf16::k_steps(matrix.columns);
    let count = matrix.rows.div_ceil(amx_bf16::ROWS) * steps;
    repacked.keep(product.weight, count, |tiles| {
        let weights = product.matrix_rows(0);
        pool.for_each_chunk(tiles, steps, |index, tiles| {
            kernels.pack_bf16(matrix.quant, sixteen_rows(weights, index), 0, tiles);
        });
    });
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

#[cfg(test)]
mod tests {
    use super::*;

    fn tiles(matrix_rows: &[usize], rows: usize, threads: usize) -> usize {
        let tiling = Tiling::new(matrix_rows, &[0, rows], threads);
        assert!(
            (tiling.row_bounds.iter().skip(1))
                .rev()
                .skip(1)
                .all(|bound| bound % amx_bf16::ROWS == 0)
        );
        assert_eq!(tiling.row_bounds.last(), Some(&rows));
        let wide = |rows: &usize| rows.div_ceil(tiling.tile_columns);
        matrix_rows.iter().map(wide).sum::<usize>() * (tiling.row_bounds.len() - 1)
    }

    #[test]
    fn every_thread_has_as_many_tiles() {
        for threads in [2, 4, 8, 16] {
            for matrix_rows in [&[1536][..], &[256], &[2048, 256, 256], &[6144, 6144]] {
                let tiles = tiles(matrix_rows, 512, threads);
                let most = tiles.div_ceil(threads) * threads;
                assert!(most * 9 <= tiles * 10, "{matrix_rows:?} by {threads}");
            }
        }
    }

    #[test]
    fn few_rows_and_many_weights_are_not_cut() {
        for rows in [33, 64, 100] {
            assert_eq!(
                Tiling::new(&[12288, 12288], &[0, rows], 2).row_bounds.len(),
                2
            );
        }
        // Of experts each has its own.
        let bounds: Vec<usize> = (0..=128).map(|expert| expert * 32).collect();
        let tiling = Tiling::new(&[704, 704], &bounds, 16);
        assert_eq!(
            (tiling.row_bounds, tiling.tile_columns),
            (bounds, TILE_COLUMNS)
        );
    }
}
