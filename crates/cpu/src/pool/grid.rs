//! Parts of a matrix that several threads write at once, each its own.
#![expect(
    unsafe_code,
    reason = "disjoint parts of one slice for several threads"
)]

use std::{marker::PhantomData, ops::Range};

use crate::kernel::gemm::STRANDS;

/// A matrix cut into cells that may be written at the same time.
pub(crate) struct Grid<'a> {
    /// `[rows, columns]`.
    pub(crate) data: &'a mut [f32],
    pub(crate) columns: usize,
    /// Band `i` has the rows from entry `i` to entry `i + 1`.
    pub(crate) row_bounds: &'a [usize],
    /// Width of a cell; the last in a band may be narrower.
    pub(crate) cell_columns: usize,
    /// 1, or [`STRANDS`]: then columns are counted across as many equal parts of a row, the first of each part, then the
    /// second of each. It divides the widths.
    pub(crate) strands: usize,
}

/// A grid in one round of items.
pub(super) struct Cut<'a> {
    matrix: Disjoint<'a, f32>,
    columns: usize,
    row_bounds: &'a [usize],
    cell_columns: usize,
    strands: usize,
    /// Cells of a band.
    across: usize,
    /// Its items in the round.
    start: usize,
    pub(super) end: usize,
}

impl<'a> Cut<'a> {
    pub(super) fn new(grid: Grid<'a>, start: usize) -> Cut<'a> {
        let Grid {
            data,
            columns,
            row_bounds,
            cell_columns,
            strands,
        } = grid;
        assert!(
            row_bounds.is_sorted() && row_bounds.last().is_none_or(|&r| r * columns <= data.len()),
            "rows of cells lie in order within the matrix"
        );
        assert!(
            [1, STRANDS].contains(&strands)
                && columns.is_multiple_of(strands)
                && cell_columns.is_multiple_of(strands),
            "cells of {cell_columns} out of {columns} columns in {strands} strands"
        );
        let across = columns.div_ceil(cell_columns.max(1));
        Cut {
            matrix: Disjoint::new(data),
            columns,
            row_bounds,
            cell_columns,
            strands,
            across,
            start,
            end: start + across * row_bounds.len().saturating_sub(1),
        }
    }

    /// The cell of an item of the round, which must be one of ours; each is asked for once.
    pub(super) fn cell(&self, item: usize) -> Cell<'_> {
        let item = item - self.start;
        let (band, tile) = (item / self.across, item % self.across);
        let start = tile * self.cell_columns;
        Cell {
            band,
            rows: self.row_bounds[band]..self.row_bounds[band + 1],
            columns: start..self.columns.min(start + self.cell_columns),
            strands: self.strands,
            matrix: &self.matrix,
            stride: self.columns,
        }
    }
}

/// One rectangle of a matrix, ours alone.
pub(crate) struct Cell<'a> {
    pub(crate) band: usize,
    pub(crate) rows: Range<usize>,
    /// As the grid counts them.
    pub(crate) columns: Range<usize>,
    strands: usize,
    matrix: &'a Disjoint<'a, f32>,
    stride: usize,
}

impl Cell<'_> {
    /// This cell's part of a row; `row` counts from the top of the matrix.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert_eq!(self.strands, 1, "a row of strands is in pieces");
        self.strand_mut(row, 0)
    }

    /// The columns of one strand in this cell's part of a row.
    fn strand_mut(&mut self, row: usize, strand: usize) -> &mut [f32] {
        assert!(self.rows.contains(&row), "row {row} is of another cell");
        let start = row * self.stride + strand * (self.stride / self.strands);
        let (first, end) = (
            self.columns.start / self.strands,
            self.columns.end / self.strands,
        );
        // SAFETY: Cells of one grid do not overlap (widths are whole multiples of the strands), each is made once, and
        // `&mut self` keeps its parts of rows apart in time.
        unsafe { self.matrix.part(start + first..start + end) }
    }

    /// Fills this cell's part of a row, in the grid's order of columns.
    pub(crate) fn store(&mut self, row: usize, values: &[f32]) {
        assert_eq!(values.len(), self.columns.len(), "a value a column");
        if self.strands == 1 {
            self.row_mut(row).copy_from_slice(values);
            return;
        }
        let (values, _) = values.as_chunks::<STRANDS>();
        for strand in 0..STRANDS {
            for (place, values) in self.strand_mut(row, strand).iter_mut().zip(values) {
                *place = values[strand];
            }
        }
    }

    /// All of this cell.
    pub(crate) fn block_mut(&mut self) -> Block<'_> {
        assert_eq!(self.strands, 1, "a block has whole rows");
        let first = self.rows.start * self.stride + self.columns.start;
        let end = (self.rows.end * self.stride).min(self.matrix.length);
        assert!(
            first <= end && self.columns.end <= self.stride,
            "a cell lies within its matrix"
        );
        Block {
            start: self.matrix.start.wrapping_add(first),
            stride: self.stride,
            rows: self.rows.len(),
            columns: self.columns.len(),
            memory: PhantomData,
        }
    }
}

/// A rectangle of floats, ours alone, for kernels that write rows of a stride at once.
pub(crate) struct Block<'a> {
    start: *mut f32,
    stride: usize,
    rows: usize,
    columns: usize,
    memory: PhantomData<&'a mut [f32]>,
}

impl<'a> Block<'a> {
    /// All of a matrix of `columns`.
    pub(crate) fn new(matrix: &'a mut [f32], columns: usize) -> Block<'a> {
        Block {
            start: matrix.as_mut_ptr(),
            stride: columns,
            rows: matrix.len() / columns,
            columns,
            memory: PhantomData,
        }
    }

    /// A rectangle within this one.
    #[inline(always)]
    pub(crate) fn part(&mut self, rows: Range<usize>, columns: Range<usize>) -> Block<'_> {
        assert!(
            rows.start <= rows.end
                && rows.end <= self.rows
                && columns.start <= columns.end
                && columns.end <= self.columns,
            "{rows:?} by {columns:?} of {} by {}",
            self.rows,
            self.columns
        );
        Block {
            start: self
                .start
                .wrapping_add(rows.start * self.stride + columns.start),
            stride: self.stride,
            rows: rows.len(),
            columns: columns.len(),
            memory: PhantomData,
        }
    }

    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: Whoever made the first block owned all of this row, every part lies within it, and `&mut self` keeps
        // rows apart in time.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }

    /// The first element. Row `i` begins `i` strides later.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn start(&mut self) -> *mut f32 {
        self.start
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
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
