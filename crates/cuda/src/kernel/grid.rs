//! Grids that several kernels share: one thread per value, and one block per norm group.

use crate::device::Grid;

/// Multiprocessors of a full-size Hopper card (H100, H200), which grids are tuned for. A constant, not the card's own number,
/// wherever it decides how a sum is split: the order of additions, hence the bits, must not depend on the card. One with
/// fewer takes the blocks in turn, which costs some time and no more.
pub(crate) const HOPPER_MULTIPROCESSORS: usize = 132;

/// Threads of an elementwise block, one per column.
const BLOCK_THREADS: usize = 256;

/// One thread per value: rows by blocks of columns.
pub(super) fn elementwise_grid(rows: usize, columns: usize) -> Grid {
    Grid::new((rows, columns.div_ceil(BLOCK_THREADS)), BLOCK_THREADS)
}

/// Threads of the block that norms a group of this width. A function of the width alone: the order of sums depends on it.
pub(super) fn norm_threads(group: usize) -> usize {
    group.next_multiple_of(32).min(512)
}
