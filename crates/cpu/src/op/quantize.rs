//! The quantized copy of a value: made once for all products that read it, and right after a row is computed where that
//! happens row by row, while the row is in the nearest cache.

use super::workers::{GRAIN, Workers};
use carat_cpu_kernels::{
    gemm::{activations::Activations, amx_bf16, row_class::RowClass},
    simd::Tile,
    table::TileKernels,
};

/// Calls `f(row, values)` for every row of `out`, `[rows, columns]`, and converts the row; `f` does nothing where the values are
/// there already.
pub(crate) fn each_row(
    workers: &Workers,
    class: RowClass,
    (out, columns): (&mut [f32], usize),
    into: &mut Activations,
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    let rows = out.len() / columns;
    let kernels = workers.kernels;
    if let (RowClass::Large, Some(kernels)) = (class, kernels.tiles()) {
        let (tiles, row_tiles) = into.tiles_mut();
        let tiles = &mut tiles[..rows.div_ceil(amx_bf16::ROWS) * row_tiles];
        let values = (out, amx_bf16::ROWS * columns);
        workers
            .pool
            .for_each_pair_of_chunks(values, (tiles, row_tiles), |tile, out, tiles| {
                for (row, out) in out.chunks_exact_mut(columns).enumerate() {
                    f(tile * amx_bf16::ROWS + row, out);
                }
                to_bf16(kernels, out, columns, tiles);
            });
        return;
    }
    let (chunks, row_chunks) = into.chunks_mut();
    // As many values per item as other simple steps have.
    let together = (GRAIN / columns).max(1);
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

/// Rounds up to sixteen rows into tiles.
fn to_bf16(kernels: &TileKernels, x: &[f32], columns: usize, tiles: &mut [Tile]) {
    let mut values: [&[f32]; amx_bf16::ROWS] = [&[]; amx_bf16::ROWS];
    let rows = x.chunks_exact(columns);
    let count = rows.len();
    for (values, row) in values.iter_mut().zip(rows) {
        *values = row;
    }
    kernels.to_bf16(&values[..count], tiles);
}
