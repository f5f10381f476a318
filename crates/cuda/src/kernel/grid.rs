//! Grids that several kernels share: one thread per value, and one block per norm group.

use crate::device::Grid;

/// Threads that take values one by one, and the blocks of columns they make.
const BLOCK_THREADS: usize = 256;

/// One thread per value: rows by blocks of columns.
pub(super) fn elementwise_grid(rows: usize, columns: usize) -> Grid {
    Grid::new((rows, columns.div_ceil(BLOCK_THREADS)), BLOCK_THREADS)
}

/// Threads that norm a group of this width. A function of the width alone: sums are taken in an order that depends on it.
pub(super) fn norm_threads(group: usize) -> usize {
    group.next_multiple_of(32).min(512)
}
