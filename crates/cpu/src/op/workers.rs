//! Resources of every operation: the threads, the kernels, and scratch memory per thread.

use super::repack::Repacked;
use crate::pool::Pool;
use carat_cpu_kernels::{
    aligned::Aligned,
    gemm::{
        amx_int8::{self, ActivationColumns},
        gemv_transposed,
        packed_int8::{self, FourRows, Panel},
        row_class::RowClasses,
    },
    simd::Tile,
    table::Kernels,
};

/// Elements below which a step of simple arithmetic is not worth sharing out.
pub(crate) const GRAIN: usize = 16 * 1024;

pub(crate) struct Workers {
    pub(crate) pool: Pool,
    pub(crate) kernels: &'static Kernels,
    pub(crate) classes: RowClasses,
    /// One per thread.
    pub(crate) scratch: Vec<ThreadScratch>,
    /// The input of a BF16 product, where its value has no tiles or not in the product's order.
    pub(crate) bf16_rows: Vec<Tile>,
    /// The input of a large batch, four rows after four, for weights unpacked into panels.
    pub(crate) four_rows: Vec<FourRows>,
    /// The input of a small batch, for int8 tiles.
    pub(crate) int8_columns: ActivationColumns,
    pub(crate) repacked: Repacked,
}

/// Memory of one thread, grown on first use to what the model needs.
#[derive(Default)]
pub(crate) struct ThreadScratch {
    pub(crate) panels: [Panel; packed_int8::MAX_PANELS],
    pub(crate) packed_int8: packed_int8::Accumulators,
    pub(crate) gemv_transposed: gemv_transposed::Accumulators,
    pub(crate) amx_int8: amx_int8::Scratch,
    /// Weights in BF16 tiles.
    pub(crate) weight_tiles: Vec<Tile>,
    /// Outputs of a tile, before they go to their rows.
    pub(crate) output: Vec<f32>,
    /// Weights widened to f32.
    pub(crate) widened: Aligned<u8>,
    pub(crate) attention: AttentionScratch,
}

/// Memory of one thread for attention.
#[derive(Default)]
pub(crate) struct AttentionScratch {
    pub(crate) scores: Vec<f32>,
    pub(crate) tied: TiedScratch,
    /// The partial of one KV split.
    pub(crate) split: Vec<f32>,
    /// Of all splits so far.
    pub(crate) total: Vec<f32>,
}

/// The same where pages hold values alone.
#[derive(Default)]
pub(crate) struct TiedScratch {
    /// Keys of one page.
    pub(crate) made: Vec<f32>,
    /// Queries of a block, as they meet values and made keys.
    pub(crate) split: Vec<f32>,
}

impl Workers {
    pub(crate) fn new(
        pool: Pool,
        kernels: &'static Kernels,
        classes: RowClasses,
        repacked: Repacked,
    ) -> Workers {
        Workers {
            classes,
            scratch: (0..pool.threads())
                .map(|_| ThreadScratch::default())
                .collect(),
            bf16_rows: Vec::new(),
            four_rows: Vec::new(),
            int8_columns: ActivationColumns::default(),
            repacked,
            pool,
            kernels,
        }
    }

    /// Calls `f(row, values)` for every row of a matrix.
    pub(crate) fn each_row(
        &self,
        out: &mut [f32],
        columns: usize,
        f: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let together = (GRAIN / columns).max(1);
        self.pool
            .for_each_chunk(out, together * columns, |chunk, out| {
                for (row, out) in out.chunks_exact_mut(columns).enumerate() {
                    f(chunk * together + row, out);
                }
            });
    }

    /// Calls `f(start, part)` for consecutive parts of a matrix whose elements are independent.
    pub(crate) fn each_part(&self, out: &mut [f32], f: impl Fn(usize, &mut [f32]) + Sync) {
        self.pool
            .for_each_chunk(out, GRAIN, |chunk, out| f(chunk * GRAIN, out));
    }
}
