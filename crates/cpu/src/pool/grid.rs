//! Output tiles: rectangles of a matrix that several threads write at once, each its own.
#![expect(
    unsafe_code,
    reason = "disjoint parts of one slice for several threads"
)]

use std::{marker::PhantomData, ops::Range};

use carat_cpu_kernels::matrix::MatrixMut;

/// A matrix cut into tiles that may be written at the same time.
pub(crate) struct Grid<'a> {
    /// `[rows, columns]`.
    pub(crate) data: &'a mut [f32],
    pub(crate) columns: usize,
    /// Row group `i` has the rows from entry `i` to entry `i + 1`. No tile spans two.
    pub(crate) row_bounds: &'a [usize],
    /// Width of a tile; the last in a row group may be narrower.
    pub(crate) tile_columns: usize,
    /// 1, or the equal parts of a row that columns are counted across: the first of each part, then the second of each. It
    /// divides the widths.
    pub(crate) interleave: usize,
}

/// The tiles of a grid as items of one round of the pool.
pub(super) struct GridItems<'a> {
    matrix: Disjoint<'a, f32>,
    columns: usize,
    row_bounds: &'a [usize],
    tile_columns: usize,
    interleave: usize,
    tiles_per_row_group: usize,
    /// Its items in the round.
    start: usize,
    pub(super) end: usize,
}

impl<'a> GridItems<'a> {
    pub(super) fn new(grid: Grid<'a>, start: usize) -> GridItems<'a> {
        let Grid {
            data,
            columns,
            row_bounds,
            tile_columns,
            interleave,
        } = grid;
        assert!(
            row_bounds.is_sorted() && row_bounds.last().is_none_or(|&r| r * columns <= data.len()),
            "row groups lie in order within the matrix"
        );
        assert!(
            columns.is_multiple_of(interleave) && tile_columns.is_multiple_of(interleave),
            "tiles of {tile_columns} out of {columns} columns, interleaved by {interleave}"
        );
        let tiles_per_row_group = columns.div_ceil(tile_columns.max(1));
        GridItems {
            matrix: Disjoint::new(data),
            columns,
            row_bounds,
            tile_columns,
            interleave,
            tiles_per_row_group,
            start,
            end: start + tiles_per_row_group * row_bounds.len().saturating_sub(1),
        }
    }

    /// The tile of an item of the round, which must be one of ours; each is asked for once.
    pub(super) fn tile(&self, item: usize) -> OutputTile<'_> {
        let item = item - self.start;
        let row_group = item / self.tiles_per_row_group;
        let start = item % self.tiles_per_row_group * self.tile_columns;
        OutputTile {
            row_group,
            rows: self.row_bounds[row_group]..self.row_bounds[row_group + 1],
            columns: start..self.columns.min(start + self.tile_columns),
            interleave: self.interleave,
            matrix: &self.matrix,
            stride: self.columns,
        }
    }
}

/// One rectangle of a matrix, ours alone.
pub(crate) struct OutputTile<'a> {
    pub(crate) row_group: usize,
    pub(crate) rows: Range<usize>,
    /// As the grid counts them.
    pub(crate) columns: Range<usize>,
    interleave: usize,
    matrix: &'a Disjoint<'a, f32>,
    stride: usize,
}

impl OutputTile<'_> {
    /// This tile's part of a row; `row` counts from the top of the matrix.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert_eq!(self.interleave, 1, "an interleaved row is in pieces");
        self.piece_mut(row, 0)
    }

    /// The columns that lie in one of the interleaved parts of a row.
    fn piece_mut(&mut self, row: usize, part: usize) -> &mut [f32] {
        assert!(self.rows.contains(&row), "row {row} is of another tile");
        let start = row * self.stride + part * (self.stride / self.interleave);
        let (first, end) = (
            self.columns.start / self.interleave,
            self.columns.end / self.interleave,
        );
        // SAFETY: Tiles of one grid do not overlap (widths are whole multiples of the parts), each is made once, and
        // `&mut self` keeps its pieces of rows apart in time.
        unsafe { self.matrix.part(start + first..start + end) }
    }

    /// Fills this tile's part of a row, in the grid's order of columns. The grid is interleaved by `N`, or not at all.
    pub(crate) fn store<const N: usize>(&mut self, row: usize, values: &[f32]) {
        assert_eq!(values.len(), self.columns.len(), "a value per column");
        if self.interleave == 1 {
            self.row_mut(row).copy_from_slice(values);
            return;
        }
        assert_eq!(self.interleave, N, "as the grid is interleaved");
        let (values, _) = values.as_chunks::<N>();
        for part in 0..N {
            for (out, values) in self.piece_mut(row, part).iter_mut().zip(values) {
                *out = values[part];
            }
        }
    }

    /// All of this tile.
    pub(crate) fn as_matrix(&mut self) -> MatrixMut<'_> {
        assert_eq!(self.interleave, 1, "a rectangle has whole rows");
        let first = self.rows.start * self.stride + self.columns.start;
        let end = (self.rows.end * self.stride).min(self.matrix.length);
        assert!(
            first <= end && self.columns.end <= self.stride,
            "a tile lies within its matrix"
        );
        // SAFETY: The rectangle lies within the slice that the grid borrowed, as asserted; tiles of one grid do not overlap
        // and each is made once, so nobody else touches its elements while `self` is borrowed.
        unsafe {
            MatrixMut::from_raw(
                self.matrix.start.wrapping_add(first),
                self.stride,
                self.rows.len(),
                self.columns.len(),
            )
        }
    }
}

/// A slice that several threads write, each its own parts.
pub(super) struct Disjoint<'a, T> {
    start: *mut T,
    length: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: Sharing it shares nothing but the right to make parts, and `part` demands that they do not overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Disjoint<'a, T> {
        Disjoint {
            start: slice.as_mut_ptr(),
            length: slice.len(),
            slice: PhantomData,
        }
    }

    /// # Safety
    /// No two parts alive at the same time may overlap.
    #[expect(
        clippy::mut_from_ref,
        reason = "the caller keeps parts disjoint; that is this type's purpose"
    )]
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.length,
            "part {range:?} of {}",
            self.length
        );
        // SAFETY: The range lies within the slice borrowed at `new`; exclusive use is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
