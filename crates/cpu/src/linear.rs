//! Products of a batch with a weight matrix, or with a stack of them: which cells there are and which kernel fills one.
//!
//! A cell is some rows of the batch by some rows of one matrix. Few batch rows read the weights packed and in long runs,
//! as fast as memory gives them; more rows share panels. Both give the same bits, so the choice is free.

use std::ops::Range;

use carat_gguf::QuantType;
use carat_model::weights::{Weight, Weights};

use crate::{
    activations::{Activations, Row},
    dot::{
        WeightRows, matvec, panel,
        tiled::{self, Step},
    },
    isa::Isa,
    kernels::Kernels,
    pool::{Cell, Grid},
    workers::{Scratch, Workers},
};

/// Weight bytes of a cell when few rows stream them: long enough for the prefetcher, short enough to share out.
const STREAM_BYTES: usize = 96 * 1024;
/// Weight rows of a cell when many batch rows share it.
const PANEL_COLUMNS: usize = panel::ROWS * panel::MOST_PANELS;
/// Bytes of unpacked weights of a cell, about, where kernels multiply tiles: half of what a core has to itself.
const STRIP_BYTES: usize = 1 << 20;
/// Batch rows whose addresses are gathered at a time.
const GATHER: usize = 24;

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
    pub(crate) weights: &'a Weights,
    pub(crate) weight: Weight,
    pub(crate) input: Input<'a>,
    /// The input row of each output row; `None` when they are the same.
    pub(crate) gather: Option<&'a [usize]>,
    /// Band `i` covers the output rows from entry `i` to entry `i + 1`.
    pub(crate) row_bounds: &'a [usize],
    pub(crate) bands: &'a [Band],
}

impl Product<'_> {
    /// Fills `out`, `[rows, matrix rows]`.
    pub(crate) fn run(&self, workers: &mut Workers, out: &mut [f32]) {
        let matrix = self.weights.matrix(self.weight);
        let bytes = self.weights.bytes(self.weight);
        let most_rows = self.row_bounds.windows(2).map(|w| w[1] - w[0]).max();
        let streams = most_rows.is_none_or(|rows| rows <= matvec::MOST_ROWS);
        let tiled = match self.input {
            Input::Codes(x) if !streams && workers.kernels.isa() >= Isa::Amx => {
                Some(self.arrange(x, workers))
            }
            _ => None,
        };
        let cell_columns = if streams {
            let fair = matrix.rows.div_ceil(4 * workers.pool.threads());
            (STREAM_BYTES / matrix.row_bytes()).min(fair).max(8)
        } else if tiled.is_some() {
            let strips = matrix
                .rows
                .div_ceil(2 * workers.pool.threads() * tiled::ROWS);
            let most = STRIP_BYTES / (matrix.columns * tiled::ROWS);
            tiled::ROWS * strips.min(most).clamp(1, tiled::MOST_STRIPS)
        } else {
            PANEL_COLUMNS
        };
        let row_tiles = &workers.row_tiles;
        let kernels = workers.kernels;
        let grid = Grid {
            data: out,
            columns: matrix.rows,
            row_bounds: self.row_bounds,
            cell_columns,
        };
        workers
            .pool
            .for_each_cell(grid, &mut workers.scratch, |scratch, mut cell| {
                let start = self.bands[cell.band].matrix * matrix.matrix_stride;
                let rows = WeightRows::new(
                    &bytes[start..],
                    matrix.row_stride,
                    matrix.row_bytes(),
                    matrix.rows,
                )
                .slice(cell.columns.clone());
                match self.input {
                    Input::Codes(x) => {
                        let row = |row: usize| x.row(self.input_row(row));
                        if cell.rows.len() <= matvec::MOST_ROWS {
                            stream(
                                kernels,
                                matrix.quant,
                                rows,
                                row,
                                &mut cell,
                                &mut scratch.tile,
                            );
                        } else if let Some(tiles) = &tiled {
                            let steps = &row_tiles[tiles.of_band(cell.band)];
                            multiply_tiles(kernels, matrix.quant, rows, steps, &mut cell, scratch);
                        } else {
                            share(kernels, matrix.quant, rows, row, &mut cell, scratch);
                        }
                    }
                    Input::Floats { data, columns } => {
                        let row = |row: usize| &data[self.input_row(row) * columns..][..columns];
                        floats(kernels, matrix.quant, rows, row, &mut cell, scratch);
                    }
                }
            });
    }

    /// Turns the input rows of every band that shares weights into row tiles.
    fn arrange(&self, x: &Activations, workers: &mut Workers) -> RowTiles {
        let matrix = self.weights.matrix(self.weight);
        let (groups, group) = tiled::groups(matrix.quant, matrix.columns);
        let mut tiles = RowTiles {
            groups,
            rows: Vec::new(),
            bounds: vec![0],
        };
        for band in self.row_bounds.windows(2) {
            if band[1] - band[0] > matvec::MOST_ROWS {
                let starts = (band[0]..band[1]).step_by(tiled::ROWS);
                tiles
                    .rows
                    .extend(starts.map(|row| row..band[1].min(row + tiled::ROWS)));
            }
            tiles.bounds.push(tiles.rows.len());
        }
        let steps = tiles.rows.len() * groups;
        if workers.row_tiles.len() < steps {
            workers.row_tiles.resize(steps, Step::ZERO);
        }
        let kernels = workers.kernels;
        workers
            .pool
            .for_each_chunk(&mut workers.row_tiles[..steps], groups, |tile, steps| {
                let mut rows: [Row<'_>; tiled::ROWS] = [&[]; tiled::ROWS];
                let range = tiles.rows[tile].clone();
                for (place, row) in rows.iter_mut().zip(range.clone()) {
                    *place = x.row(self.input_row(row));
                }
                kernels.arrange(&rows[..range.len()], group, steps);
            });
        tiles
    }

    fn input_row(&self, row: usize) -> usize {
        self.gather.map_or(row, |gather| gather[row])
    }
}

/// Which rows are in which row tile.
struct RowTiles {
    groups: usize,
    /// Of each tile.
    rows: Vec<Range<usize>>,
    /// Band `i` has the tiles from entry `i` to entry `i + 1`.
    bounds: Vec<usize>,
}

impl RowTiles {
    /// The steps of a band.
    fn of_band(&self, band: usize) -> Range<usize> {
        self.bounds[band] * self.groups..self.bounds[band + 1] * self.groups
    }
}

/// Few rows: the weights are read where they lie.
fn stream<'a>(
    kernels: &Kernels,
    quant: QuantType,
    weights: WeightRows<'_>,
    x: impl Fn(usize) -> Row<'a>,
    cell: &mut Cell<'_>,
    tile: &mut Vec<f32>,
) {
    if cell.rows.len() == 1 {
        let row = cell.rows.start;
        kernels.matvec(quant, weights, &[x(row)], cell.row_mut(row));
        return;
    }
    let mut rows: [Row<'_>; matvec::MOST_ROWS] = [&[]; matvec::MOST_ROWS];
    for (place, row) in rows.iter_mut().zip(cell.rows.clone()) {
        *place = x(row);
    }
    tile.resize(cell.rows.len() * weights.len(), 0.0);
    kernels.matvec(quant, weights, &rows[..cell.rows.len()], tile);
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
    let count = weights.len().div_ceil(panel::ROWS);
    let panels = &mut scratch.panels[..count];
    for (p, panel) in panels.iter_mut().enumerate() {
        let rows = p * panel::ROWS..weights.len().min((p + 1) * panel::ROWS);
        kernels.pack(quant, weights.slice(rows), panel);
    }
    let mut rows: [Row<'_>; panel::MOST_ROWS] = [&[]; panel::MOST_ROWS];
    let mut first = cell.rows.start;
    while first < cell.rows.end {
        let block = first..cell.rows.end.min(first + panel::MOST_ROWS);
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

/// Many rows, where kernels multiply tiles.
fn multiply_tiles(
    kernels: &Kernels,
    quant: QuantType,
    weights: WeightRows<'_>,
    row_tiles: &[Step],
    cell: &mut Cell<'_>,
    scratch: &mut Scratch,
) {
    let count = weights.len().div_ceil(tiled::ROWS);
    let strips = &mut scratch.strips[..count];
    for (s, strip) in strips.iter_mut().enumerate() {
        let rows = s * tiled::ROWS..weights.len().min((s + 1) * tiled::ROWS);
        kernels.pack_strip(quant, weights.slice(rows), strip);
    }
    let groups = row_tiles.len() / cell.rows.len().div_ceil(tiled::ROWS);
    let mut first = cell.rows.start;
    for tiles in row_tiles.chunks(tiled::MOST_TILES * groups) {
        kernels.multiply_strips(strips, tiles, &mut scratch.tile_sums);
        let end = cell
            .rows
            .end
            .min(first + tiles.len() / groups * tiled::ROWS);
        for row in first..end {
            scratch.tile_sums.copy_row(row - first, cell.row_mut(row));
        }
        first = end;
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
        cell.row_mut(first + row).copy_from_slice(values);
    }
}
