//! Runs products: each tile of the output with the kernel that its rows ask for.

use std::ops::Range;

use super::{Input, Product, bf16, float, int8, int8::Blocks, tiling::Tiling};
use crate::{
    op::workers::{ThreadScratch, Workers},
    pool::{Grid, OutputTile},
};
use carat_cpu_kernels::{
    gemm::{
        READ_STREAMS,
        amx_int8::{self, ActivationColumns},
        choice::KernelChoice,
        packed_int8::FourRows,
    },
    table::Kernels,
};

/// Computes products of the same rows with some matrices, filling `[rows, matrix rows]` for each. Those in BF16 go in one round of
/// the pool and all others in another: every round ends with threads that wait.
pub(crate) fn run(products: &[Product<'_>], workers: &mut Workers, outs: &mut [&mut [f32]]) {
    let isa = workers.kernels.isa();
    let threads = workers.pool.threads();
    let mut tiled = Vec::new();
    let mut grids = Vec::new();
    let (mut bf16_products, mut bf16_outs) = (Vec::new(), Vec::new());
    workers.int8_columns.clear();
    // Formats with groups of one length read the same arrangement.
    let mut arranged: Vec<(usize, Vec<Range<usize>>)> = Vec::new();
    let mut blocks: Vec<Blocks> = Vec::new();
    for (product, out) in products.iter().zip(outs) {
        let rows = product.max_rows();
        let kernel = product.kernel(isa, rows);
        if kernel == KernelChoice::AmxBf16 {
            bf16_products.push(product);
            bf16_outs.push(&mut **out);
            continue;
        }
        let matrix = product.weights.matrix(product.weight);
        let mut column_sets = None;
        if let (KernelChoice::AmxInt8, Input::Quantized(x)) = (kernel, product.input) {
            let group = amx_int8::group_of(matrix.quant);
            let known = arranged.iter().position(|(known, _)| *known == group);
            column_sets = Some(known.unwrap_or_else(|| {
                let sets = int8::arrange_columns(product, x, &mut workers.int8_columns);
                arranged.push((group, sets));
                arranged.len() - 1
            }));
        }
        let mut blocks_of = None;
        if let (KernelChoice::PackedInt8, Input::Quantized(x)) = (kernel, product.input) {
            let group = amx_int8::group_of(matrix.quant);
            let known = blocks.iter().position(|known| known.group == group);
            blocks_of = Some(known.unwrap_or_else(|| {
                let first = blocks.last().map_or(0, Blocks::end);
                blocks.push(Blocks::arrange(product, x, first, workers));
                blocks.len() - 1
            }));
        }
        let tiling = Tiling::new(product, kernel, rows, (isa, threads));
        grids.push(Grid {
            data: out,
            columns: matrix.rows,
            row_bounds: product.row_bounds,
            tile_columns: tiling.tile_columns,
            interleave: if tiling.interleaved { READ_STREAMS } else { 1 },
        });
        tiled.push(TiledProduct {
            product,
            tiling,
            column_sets,
            blocks: blocks_of,
        });
    }
    bf16::run(&bf16_products, workers, bf16_outs);
    let (kernels, columns) = (workers.kernels, &workers.int8_columns);
    let four_rows = &workers.four_rows;
    workers
        .pool
        .for_each_tile(grids, &mut workers.scratch, |scratch, index, tile| {
            let product = &tiled[index];
            let sets = product
                .column_sets
                .map(|sets| arranged[sets].1[tile.row_group].clone());
            let blocks = product.blocks.map(|index| (&**four_rows, &blocks[index]));
            product.fill(kernels, (columns, sets), blocks, tile, scratch);
        });
}

/// A product, and how its output is cut.
struct TiledProduct<'a> {
    product: &'a Product<'a>,
    tiling: Tiling,
    /// Index of the arrangement of its rows that it meets in int8 tiles.
    column_sets: Option<usize>,
    /// Index of the arrangement that it meets panels in.
    blocks: Option<usize>,
}

impl TiledProduct<'_> {
    /// Fills a tile. `sets` are the columns of its rows, and `blocks` its rows by four, where they are arranged.
    fn fill(
        &self,
        kernels: &Kernels,
        (columns, sets): (&ActivationColumns, Option<Range<usize>>),
        blocks: Option<(&[FourRows], &Blocks)>,
        mut tile: OutputTile<'_>,
        scratch: &mut ThreadScratch,
    ) {
        let product = self.product;
        let quant = product.weights.matrix(product.weight).quant;
        let weights = (quant, product.tile_weights(&tile, self.tiling.interleaved));
        let tile = &mut tile;
        match product.input {
            Input::F32 { data, columns } => {
                let row = |row: usize| &data[product.input_row(row) * columns..][..columns];
                float::fill(kernels, weights, row, tile, scratch);
            }
            Input::Quantized(x) => {
                let row = |row: usize| x.row(product.input_row(row));
                let kernel = product.kernel(kernels.isa(), tile.rows.len());
                match (kernel, kernels.tiles(), sets, blocks) {
                    (KernelChoice::AmxInt8, Some(kernels), Some(sets), _) => {
                        int8::fill_amx(kernels, weights, (columns, sets), tile, scratch);
                    }
                    (KernelChoice::Gemv | KernelChoice::GemvTransposed, ..) => {
                        int8::fill_gemv(kernels, kernel, weights, row, tile, scratch);
                    }
                    // Rows of an expert that would fit int8 tiles, where another has too many for them: the same bits.
                    (KernelChoice::PackedInt8 | KernelChoice::AmxInt8, _, None, Some(blocks)) => {
                        int8::fill_packed(kernels, weights, blocks, tile, scratch);
                    }
                    _ => unreachable!("{kernel:?} is not for a tile of a quantized product"),
                }
            }
        }
    }
}
