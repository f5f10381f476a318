//! Values in the form that products with quantized weights read: converted once for all readers, and right after a row is
//! computed where that happens row by row, while the row is in the nearest cache.

use crate::{
    activations::Activations,
    dot::tiled,
    kernels::TileKernels,
    linear::Class,
    simd::Tile,
    workers::{GRAIN, Workers},
};

/// Calls `f(row, values)` for every row of `out`, `[rows, columns]`, and converts the row.
pub(crate) fn each_row(
    workers: &Workers,
    class: Class,
    (out, columns): (&mut [f32], usize),
    into: &mut Activations,
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    let rows = out.len() / columns;
    let kernels = workers.kernels;
    if let (Class::Many, Some(kernels)) = (class, kernels.tiles()) {
        let (tiles, row_tiles) = into.tiles_mut();
        let tiles = &mut tiles[..rows.div_ceil(tiled::ROWS) * row_tiles];
        let values = (out, tiled::ROWS * columns);
        workers
            .pool
            .for_each_pair_of_chunks(values, (tiles, row_tiles), |tile, out, tiles| {
                for (row, out) in out.chunks_exact_mut(columns).enumerate() {
                    f(tile * tiled::ROWS + row, out);
                }
                narrow(kernels, out, columns, tiles);
            });
        return;
    }
    let (chunks, row_chunks) = into.chunks_mut();
    let together = rows_together(columns);
    let chunks = (&mut chunks[..rows * row_chunks], together * row_chunks);
    let values = (out, together * columns);
    workers
        .pool
        .for_each_pair_of_chunks(values, chunks, |item, out, chunks| {
            let rows = out.chunks_exact_mut(columns);
            for (row, (out, chunks)) in rows.zip(chunks.chunks_exact_mut(row_chunks)).enumerate() {
                f(item * together + row, out);
                kernels.quantize(out, chunks);
            }
        });
}

/// Converts rows of `columns` values that are there already.
pub(crate) fn convert(
    workers: &Workers,
    class: Class,
    x: &[f32],
    columns: usize,
    into: &mut Activations,
) {
    let rows = x.len() / columns;
    let kernels = workers.kernels;
    if let (Class::Many, Some(kernels)) = (class, kernels.tiles()) {
        let (tiles, row_tiles) = into.tiles_mut();
        let tiles = &mut tiles[..rows.div_ceil(tiled::ROWS) * row_tiles];
        workers
            .pool
            .for_each_chunk(tiles, row_tiles, |tile, tiles| {
                let first = tile * tiled::ROWS;
                let last = rows.min(first + tiled::ROWS);
                narrow(kernels, &x[first * columns..last * columns], columns, tiles);
            });
        return;
    }
    let (chunks, row_chunks) = into.chunks_mut();
    let together = rows_together(columns);
    workers.pool.for_each_chunk(
        &mut chunks[..rows * row_chunks],
        together * row_chunks,
        |item, chunks| {
            let first = item * together;
            for (row, chunks) in chunks.chunks_exact_mut(row_chunks).enumerate() {
                kernels.quantize(&x[(first + row) * columns..][..columns], chunks);
            }
        },
    );
}

/// Up to sixteen rows into tiles.
fn narrow(kernels: &TileKernels, x: &[f32], columns: usize, tiles: &mut [Tile]) {
    let mut values: [&[f32]; tiled::ROWS] = [&[]; tiled::ROWS];
    let rows = x.chunks_exact(columns);
    let count = rows.len();
    for (values, row) in values.iter_mut().zip(rows) {
        *values = row;
    }
    kernels.narrow(&values[..count], tiles);
}

/// Rows of an item: as many values as other simple steps have.
fn rows_together(columns: usize) -> usize {
    (GRAIN / columns).max(1)
}
