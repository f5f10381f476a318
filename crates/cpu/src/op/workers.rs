//! What every step works with: the threads, the kernels, and scratch memory a thread.

use super::{attention::AttendScratch, repack::Repacked};
use crate::{
    aligned::Aligned,
    kernel::{
        gemm::{
            amx_int8::{Columns, Space},
            gemv_transposed,
            packed_int8::{self, Panel},
        },
        table::Kernels,
    },
    pool::Pool,
    simd::Tile,
};

/// Elements below which a step of simple arithmetic is not worth sharing out.
pub(crate) const GRAIN: usize = 16 * 1024;

pub(crate) struct Workers {
    pub(crate) pool: Pool,
    pub(crate) kernels: &'static Kernels,
    /// One a thread.
    pub(crate) scratch: Vec<Scratch>,
    /// The input of a product in tiles, where its value has none or not in the product's order.
    pub(crate) left: Vec<Tile>,
    /// The input of a product with few rows, for tiles.
    pub(crate) columns: Columns,
    pub(crate) repacked: Repacked,
}

/// Memory of one thread, grown on first use to what the model needs.
pub(crate) struct Scratch {
    pub(crate) panels: [Panel; packed_int8::MOST_PANELS],
    pub(crate) sums: packed_int8::Sums,
    pub(crate) turned: gemv_transposed::Sums,
    pub(crate) side_by_side: Space,
    /// Weights in tiles.
    pub(crate) strips: Vec<Tile>,
    pub(crate) tile: Vec<f32>,
    /// Weights widened to f32.
    pub(crate) wide: Aligned<u8>,
    pub(crate) attend: AttendScratch,
}

impl Workers {
    pub(crate) fn new(pool: Pool, kernels: &'static Kernels, repacked: Repacked) -> Workers {
        let scratch = || Scratch {
            panels: Default::default(),
            sums: packed_int8::Sums::default(),
            turned: gemv_transposed::Sums::default(),
            side_by_side: Space::default(),
            strips: Vec::new(),
            tile: Vec::new(),
            wide: Aligned::default(),
            attend: AttendScratch::default(),
        };
        Workers {
            scratch: (0..pool.threads()).map(|_| scratch()).collect(),
            left: Vec::new(),
            columns: Columns::default(),
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
