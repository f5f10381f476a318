//! Products of a batch with a weight matrix, or with a stack of them: which cells there are and which kernel fills one.
//!
//! A cell is some rows of the batch by some rows of one matrix. Few batch rows read the weights packed and in long runs,
//! as fast as memory gives them; more rows share panels, or the columns of tiles where there are registers for those. All
//! give the same bits, so the choice is free. With tiles, [`Class::Many`] rows are multiplied in BF16 instead, with results of
//! their own; so the number of rows in the batch decides, and never how many of them chose an expert.

use std::ops::Range;

use carat_gguf::QuantType;
use carat_model::weights::{Weight, Weights};

use super::{
    repack::Repacked,
    workers::{Scratch, Workers},
};
use crate::{
    kernel::{
        gemm::{
            STRANDS, WeightRows,
            activations::{Activations, Room, Row},
            amx_bf16::{self, Operands, Side},
            amx_int8::{self, Columns},
            gemv, gemv_transposed, packed_int8,
        },
        table::{Kernels, TileKernels},
    },
    pool::{Cell, Grid, Pool},
    simd::{Sums, Tile},
};

/// Weight bytes of a cell when few rows stream them: long enough for the prefetcher, short enough to share out.
const STREAM_BYTES: usize = 96 * 1024;
/// Weight rows of a cell when many batch rows share it.
const PANEL_COLUMNS: usize = packed_int8::ROWS * packed_int8::MOST_PANELS;
/// Weight rows of a cell in tiles, at most: the more, the less often activations come from far.
const TILE_COLUMNS: usize = 256;
/// Values of these that are unpacked at a time. Both together fill a third of what a core has to itself.
const TILE_VALUES: usize = 1536;
/// Batch rows whose addresses are gathered at a time.
const GATHER: usize = 24;

/// Rows of a batch up to which results have the same bits at every level of instructions.
const FEW_ROWS: usize = 32;

/// Batches whose rows have the same bits in any company.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Few,
    /// Only where kernels multiply tiles.
    Many,
}

impl Class {
    /// The class of a step on so many rows of a batch.
    pub(crate) fn of(kernels: &Kernels, rows: usize) -> Class {
        if kernels.tiles().is_some() && rows > FEW_ROWS {
            Class::Many
        } else {
            Class::Few
        }
    }

    /// Room for the activations of steps on up to `rows` rows that become `each` rows.
    pub(crate) fn room(kernels: &Kernels, rows: usize, each: usize) -> Room {
        match Class::of(kernels, rows) {
            Class::Few => Room {
                codes: rows * each,
                tiles: 0,
            },
            Class::Many => Room {
                codes: FEW_ROWS * each,
                tiles: rows * each,
            },
        }
    }
}

/// The activations of a product, in the form its weights want.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    Codes(&'a Activations),
    Floats { data: &'a [f32], columns: usize },
}

/// Output rows that use one matrix of a stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Band {
    pub(crate) matrix: usize,
}

/// A product to compute.
pub(crate) struct Product<'a> {
    pub(crate) class: Class,
    pub(crate) weights: &'a Weights,
    pub(crate) weight: Weight,
    pub(crate) input: Input<'a>,
    /// The input row of each output row; `None` when they are the same.
    pub(crate) gather: Option<&'a [usize]>,
    /// Band `i` covers the output rows from entry `i` to entry `i + 1`.
    pub(crate) row_bounds: &'a [usize],
    pub(crate) bands: &'a [Band],
}

/// Computes products of the same rows with some matrices, filling `[rows, matrix rows]` for each. What is not tiles of BF16
/// goes in one round of the pool: few rows have short products, and every round ends with threads that wait.
pub(crate) fn run(products: &[Product<'_>], workers: &mut Workers, outs: &mut [&mut [f32]]) {
    let mut ways = Vec::new();
    let mut grids = Vec::new();
    workers.columns.clear();
    let mut arranged: Vec<(usize, Vec<Range<usize>>)> = Vec::new();
    for (product, out) in products.iter().zip(outs) {
        if let Some(kernels) = product.tile_kernels(workers.kernels) {
            product.run_tiles(kernels, workers, out);
            continue;
        }
        let matrix = product.weights.matrix(product.weight);
        let (cut, way) = if let Some((kernels, x)) = product.in_columns(workers.kernels) {
            let group = amx_int8::group_of(matrix.quant);
            // Formats with groups of one length read the same arrangement.
            let place = arranged.iter().position(|(known, _)| *known == group);
            let place = place.unwrap_or_else(|| {
                arranged.push((group, product.arrange_columns(x, &mut workers.columns)));
                arranged.len() - 1
            });
            let cut = Cut {
                cell_columns: product.stream_columns(workers.pool.threads()),
                in_strands: matrix.rows.is_multiple_of(STRANDS),
            };
            (cut, Way::Columns(kernels, place))
        } else {
            (product.cut(workers.pool.threads()), Way::Rows)
        };
        grids.push(Grid {
            data: out,
            columns: matrix.rows,
            row_bounds: product.row_bounds,
            cell_columns: cut.cell_columns,
            strands: if cut.in_strands { STRANDS } else { 1 },
        });
        ways.push((product, cut, way));
    }
    let (kernels, columns) = (workers.kernels, &workers.columns);
    workers
        .pool
        .for_each_cell(grids, &mut workers.scratch, |scratch, place, cell| {
            let (product, cut, way) = &ways[place];
            match way {
                Way::Columns(tile_kernels, place) if cell.rows.len() >= amx_int8::LEAST_ROWS => {
                    let sets = arranged[*place].1[cell.band].clone();
                    product.fill_columns(tile_kernels, cut, (columns, sets), cell, scratch);
                }
                _ => product.fill(kernels, cut, cell, scratch),
            }
        });
}

/// What fills the cells of a product.
enum Way {
    /// Kernels that read weights row by row.
    Rows,
    /// Those on tiles for few rows, and which arrangement of the rows they meet.
    Columns(&'static TileKernels, usize),
}

/// How a product is cut into cells.
struct Cut {
    cell_columns: usize,
    in_strands: bool,
}

impl Product<'_> {
    /// The kernels for tiles, if this is a product for them.
    fn tile_kernels(&self, kernels: &Kernels) -> Option<&'static TileKernels> {
        let narrow = || match self.input {
            Input::Codes(_) => true,
            Input::Floats { .. } => self.weights.narrows(self.weight),
        };
        kernels
            .tiles()
            .filter(|_| self.class == Class::Many && narrow())
    }

    /// The kernels and the input for few rows in tiles, if this is a product for them.
    fn in_columns(&self, kernels: &Kernels) -> Option<(&'static TileKernels, &Activations)> {
        match (kernels.tiles(), self.input) {
            (Some(kernels), Input::Codes(x)) if self.most_rows() >= amx_int8::LEAST_ROWS => {
                Some((kernels, x))
            }
            _ => None,
        }
    }

    fn cut(&self, threads: usize) -> Cut {
        let matrix = self.weights.matrix(self.weight);
        let most_rows = self.most_rows();
        // Up to how many rows weights come straight from memory, and up to how many the kernel takes them in any order.
        let (streamed, in_strands) = match self.input {
            Input::Codes(_) => (few_rows(matrix.quant), gemv_transposed::LEAST_ROWS - 1),
            Input::Floats { .. } => (GATHER, GATHER),
        };
        Cut {
            cell_columns: if most_rows <= streamed {
                self.stream_columns(threads)
            } else {
                PANEL_COLUMNS
            },
            in_strands: most_rows <= in_strands && matrix.rows.is_multiple_of(STRANDS),
        }
    }

    /// Fills a cell, reading weights row by row.
    fn fill(&self, kernels: &Kernels, cut: &Cut, mut cell: Cell<'_>, scratch: &mut Scratch) {
        let quant = self.weights.matrix(self.weight).quant;
        let rows = self.cell_rows(&cell, cut.in_strands);
        match self.input {
            Input::Codes(x) => {
                let row = |row: usize| x.row(self.input_row(row));
                if cell.rows.len() <= few_rows(quant) {
                    stream(kernels, quant, rows, row, &mut cell, scratch);
                } else {
                    share(kernels, quant, rows, row, &mut cell, scratch);
                }
            }
            Input::Floats { data, columns } => {
                let row = |row: usize| &data[self.input_row(row) * columns..][..columns];
                floats(kernels, quant, rows, row, &mut cell, scratch);
            }
        }
    }

    /// Puts the rows of every band into columns, and returns their sets.
    fn arrange_columns(&self, x: &Activations, columns: &mut Columns) -> Vec<Range<usize>> {
        let matrix = self.weights.matrix(self.weight);
        let rows = |rows: Range<usize>| rows.map(|row| x.row(self.input_row(row)));
        self.row_bounds
            .windows(2)
            .map(|band| columns.add(matrix.quant, matrix.columns, rows(band[0]..band[1])))
            .collect()
    }

    /// Fills a cell of few rows with tiles.
    fn fill_columns(
        &self,
        kernels: &TileKernels,
        cut: &Cut,
        (columns, sets): (&Columns, Range<usize>),
        mut cell: Cell<'_>,
        scratch: &mut Scratch,
    ) {
        let weights = self.cell_rows(&cell, cut.in_strands);
        let quant = self.weights.matrix(self.weight).quant;
        let Scratch {
            tile, side_by_side, ..
        } = scratch;
        tile.resize(cell.rows.len() * weights.len(), 0.0);
        kernels.multiply_columns(quant, weights, columns, sets, side_by_side, tile);
        copy_rows(tile, weights.len(), cell.rows.start, &mut cell);
    }

    /// Rows of the largest band.
    fn most_rows(&self) -> usize {
        let rows = self.row_bounds.windows(2).map(|w| w[1] - w[0]);
        rows.max().unwrap_or(0)
    }

    /// Weight rows of a cell whose weights are read as they lie.
    fn stream_columns(&self, threads: usize) -> usize {
        let matrix = self.weights.matrix(self.weight);
        let fair = matrix.rows.div_ceil(4 * threads);
        let rows = (STREAM_BYTES / matrix.row_bytes()).min(fair).max(8);
        rows.next_multiple_of(gemv_transposed::ROWS)
    }

    fn run_tiles(&self, kernels: &TileKernels, workers: &mut Workers, out: &mut [f32]) {
        let matrix = self.weights.matrix(self.weight);
        let parts = match self.input {
            Input::Codes(_) => 1,
            Input::Floats { .. } => amx_bf16::PARTS,
        };
        let left_row = parts * amx_bf16::steps(matrix.columns);
        // Where each band's row tiles begin.
        let mut starts = vec![0];
        for band in self.row_bounds.windows(2) {
            starts.push(starts[starts.len() - 1] + (band[1] - band[0]).div_ceil(amx_bf16::ROWS));
        }
        let own = match self.input {
            Input::Codes(x) if self.gather.is_none() && self.bands.len() == 1 => Some(x.tiles().0),
            _ => {
                self.arrange(kernels, workers, &starts, left_row);
                None
            }
        };
        let left = own.unwrap_or(&workers.left);
        let strip_tiles = amx_bf16::steps(matrix.columns);
        let kept = self.kept_tiles(kernels, &workers.pool, &mut workers.repacked);
        let strips = matrix
            .rows
            .div_ceil(4 * amx_bf16::ROWS * workers.pool.threads());
        let grid = Grid {
            data: out,
            columns: matrix.rows,
            row_bounds: self.row_bounds,
            cell_columns: (2 * amx_bf16::ROWS * strips).min(TILE_COLUMNS),
            strands: 1,
        };
        let blocks = matrix.columns.div_ceil(TILE_VALUES);
        let block = matrix
            .columns
            .div_ceil(blocks)
            .next_multiple_of(amx_bf16::BLOCK);
        workers
            .pool
            .for_each_cell(vec![grid], &mut workers.scratch, |scratch, _, mut cell| {
                let weights = self.cell_rows(&cell, false);
                let left = &left[starts[cell.band] * left_row..starts[cell.band + 1] * left_row];
                for first in (0..matrix.columns).step_by(block) {
                    let steps = amx_bf16::steps(block.min(matrix.columns - first));
                    let right = if let Some(tiles) = kept {
                        // A cell is whole strips.
                        Side {
                            tiles: &tiles[cell.columns.start / amx_bf16::ROWS * strip_tiles..],
                            row: strip_tiles,
                            first: amx_bf16::steps(first),
                        }
                    } else {
                        let strips = weights.len().div_ceil(amx_bf16::ROWS);
                        if scratch.strips.len() < strips * steps {
                            scratch.strips.resize(strips * steps, Tile::ZERO);
                        }
                        let tiles = &mut scratch.strips[..strips * steps];
                        for (strip, tiles) in tiles.chunks_exact_mut(steps).enumerate() {
                            kernels.pack(matrix.quant, strip_of(weights, strip), first, tiles);
                        }
                        Side {
                            tiles,
                            row: steps,
                            first: 0,
                        }
                    };
                    let operands = Operands {
                        left: Side {
                            tiles: left,
                            row: left_row,
                            first: parts * amx_bf16::steps(first),
                        },
                        parts,
                        right,
                        steps,
                    };
                    let begin = if first == 0 {
                        Sums::Begin
                    } else {
                        Sums::Continue
                    };
                    kernels.multiply(&operands, begin, &mut cell.block_mut());
                }
            });
    }

    /// The matrix in tiles, `[strips, steps]`, if there is memory to keep them. Floats are as large in the file, and of experts
    /// a prompt uses only some.
    fn kept_tiles<'a>(
        &self,
        kernels: &TileKernels,
        pool: &Pool,
        repacked: &'a mut Repacked,
    ) -> Option<&'a [Tile]> {
        let matrix = self.weights.matrix(self.weight);
        if matrix.quant.is_float() || matrix.count > 1 {
            return None;
        }
        let steps = amx_bf16::steps(matrix.columns);
        let count = matrix.rows.div_ceil(amx_bf16::ROWS) * steps;
        repacked.tiles(self.weight, count, |tiles| {
            let weights = self.matrix_rows(0);
            pool.for_each_chunk(tiles, steps, |strip, tiles| {
                kernels.pack(matrix.quant, strip_of(weights, strip), 0, tiles);
            });
        })
    }

    /// Puts the rows of every band into tiles of its own, which begin at `starts`.
    fn arrange(
        &self,
        kernels: &TileKernels,
        workers: &mut Workers,
        starts: &[usize],
        left_row: usize,
    ) {
        let count = starts[starts.len() - 1] * left_row;
        if workers.left.len() < count {
            workers.left.resize(count, Tile::ZERO);
        }
        workers
            .pool
            .for_each_chunk(&mut workers.left[..count], left_row, |tile, tiles| {
                let band = starts.partition_point(|start| *start <= tile) - 1;
                let first = self.row_bounds[band] + (tile - starts[band]) * amx_bf16::ROWS;
                let rows = first..self.row_bounds[band + 1].min(first + amx_bf16::ROWS);
                match self.input {
                    Input::Codes(x) => {
                        let (from, row_tiles) = x.tiles();
                        for (i, row) in rows.enumerate() {
                            let row = self.input_row(row);
                            let from = &from[row / amx_bf16::ROWS * row_tiles..][..row_tiles];
                            for (tile, from) in tiles.iter_mut().zip(from) {
                                tile.0[i] = from.0[row % amx_bf16::ROWS];
                            }
                        }
                    }
                    Input::Floats { data, columns } => {
                        let mut values: [&[f32]; amx_bf16::ROWS] = [&[]; amx_bf16::ROWS];
                        for (values, row) in values.iter_mut().zip(rows.clone()) {
                            *values = &data[self.input_row(row) * columns..][..columns];
                        }
                        kernels.split(&values[..rows.len()], tiles);
                    }
                }
            });
    }

    /// The weights of a cell.
    fn cell_rows(&self, cell: &Cell<'_>, in_strands: bool) -> WeightRows<'_> {
        let all = self.matrix_rows(self.bands[cell.band].matrix);
        let all = if in_strands { all.in_strands() } else { all };
        all.slice(cell.columns.clone())
    }

    /// The weights of one matrix of the stack.
    fn matrix_rows(&self, index: usize) -> WeightRows<'_> {
        let matrix = self.weights.matrix(self.weight);
        WeightRows::new(
            &self.weights.bytes(self.weight)[index * matrix.matrix_stride..],
            matrix.row_stride,
            matrix.row_bytes(),
            matrix.rows,
        )
    }

    fn input_row(&self, row: usize) -> usize {
        self.gather.map_or(row, |gather| gather[row])
    }
}

/// The rows of one strip of tiles.
fn strip_of(weights: WeightRows<'_>, strip: usize) -> WeightRows<'_> {
    let start = strip * amx_bf16::ROWS;
    weights.slice(start..weights.len().min(start + amx_bf16::ROWS))
}

/// The most batch rows for which weights of a format are read where they lie.
fn few_rows(quant: QuantType) -> usize {
    if gemv_transposed::takes(quant) {
        gemv_transposed::MOST_ROWS
    } else {
        gemv::MOST_ROWS
    }
}

/// Few rows: the weights are read where they lie.
fn stream<'a>(
    kernels: &Kernels,
    quant: QuantType,
    weights: WeightRows<'_>,
    x: impl Fn(usize) -> Row<'a>,
    cell: &mut Cell<'_>,
    scratch: &mut Scratch,
) {
    let Scratch { tile, turned, .. } = scratch;
    let mut rows: [Row<'_>; gemv_transposed::MOST_ROWS] = [&[]; gemv_transposed::MOST_ROWS];
    for (place, row) in rows.iter_mut().zip(cell.rows.clone()) {
        *place = x(row);
    }
    let rows = &rows[..cell.rows.len()];
    tile.resize(rows.len() * weights.len(), 0.0);
    if gemv_transposed::takes(quant) && rows.len() >= gemv_transposed::LEAST_ROWS {
        kernels.multiply_sideways(quant, weights, rows, turned, tile);
    } else {
        kernels.matvec(quant, weights, rows, tile);
    }
    copy_rows(tile, weights.len(), cell.rows.start, cell);
}

/// Many rows: the weights are unpacked once, and all rows pass by.
fn share<'a>(
    kernels: &Kernels,
    quant: QuantType,
    weights: WeightRows<'_>,
    x: impl Fn(usize) -> Row<'a>,
    cell: &mut Cell<'_>,
    scratch: &mut Scratch,
) {
    let count = weights.len().div_ceil(packed_int8::ROWS);
    let panels = &mut scratch.panels[..count];
    for (p, panel) in panels.iter_mut().enumerate() {
        let rows = p * packed_int8::ROWS..weights.len().min((p + 1) * packed_int8::ROWS);
        kernels.pack(quant, weights.slice(rows), panel);
    }
    let mut rows: [Row<'_>; packed_int8::MOST_ROWS] = [&[]; packed_int8::MOST_ROWS];
    let mut first = cell.rows.start;
    while first < cell.rows.end {
        let block = first..cell.rows.end.min(first + packed_int8::MOST_ROWS);
        for (place, row) in rows.iter_mut().zip(block.clone()) {
            *place = x(row);
        }
        kernels.multiply(panels, &rows[..block.len()], &mut scratch.sums);
        for (place, row) in block.clone().enumerate() {
            scratch.sums.copy_row(place, cell.row_mut(row));
        }
        first = block.end;
    }
}

fn floats<'a>(
    kernels: &Kernels,
    quant: QuantType,
    weights: WeightRows<'_>,
    x: impl Fn(usize) -> &'a [f32],
    cell: &mut Cell<'_>,
    scratch: &mut Scratch,
) {
    let Scratch { tile, wide, .. } = scratch;
    let (mut quant, mut weights) = (quant, weights);
    // Many rows: shorter floats are widened once for all of them.
    if cell.rows.len() > GATHER && quant != QuantType::F32 {
        let row_bytes = 4 * x(cell.rows.start).len();
        wide.reserve_exactly(weights.len() * row_bytes);
        kernels.widen(quant, weights, wide);
        weights = WeightRows::new(wide, row_bytes, row_bytes, weights.len());
        quant = QuantType::F32;
    }
    let mut rows: [&[f32]; GATHER] = [&[]; GATHER];
    let mut first = cell.rows.start;
    while first < cell.rows.end {
        let block = first..cell.rows.end.min(first + GATHER);
        for (place, row) in rows.iter_mut().zip(block.clone()) {
            *place = x(row);
        }
        tile.resize(block.len() * weights.len(), 0.0);
        kernels.float_matmul(quant, weights, &rows[..block.len()], tile);
        copy_rows(tile, weights.len(), first, cell);
        first = block.end;
    }
}

/// Copies `[rows, columns]` to the rows of a cell from `first` on.
fn copy_rows(tile: &[f32], columns: usize, first: usize, cell: &mut Cell<'_>) {
    for (row, values) in tile.chunks_exact(columns).enumerate() {
        cell.store(first + row, values);
    }
}
