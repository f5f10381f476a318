//! Mutable rectangles of a row-major matrix.
//!
//! Kernels that write a whole tile of outputs at once take one of these: rows lie a stride apart, and other rectangles of
//! the same matrix may be written by other threads meanwhile.
#![expect(
    unsafe_code,
    reason = "rows of one rectangle among others that other threads write"
)]

use std::{marker::PhantomData, ops::Range};

/// A rectangle of a row-major matrix, ours alone.
pub struct MatrixMut<'a> {
    start: *mut f32,
    stride: usize,
    rows: usize,
    columns: usize,
    memory: PhantomData<&'a mut [f32]>,
}

impl<'a> MatrixMut<'a> {
    /// All of a matrix of `columns`.
    pub fn new(matrix: &'a mut [f32], columns: usize) -> MatrixMut<'a> {
        MatrixMut {
            start: matrix.as_mut_ptr(),
            stride: columns,
            rows: matrix.len() / columns,
            columns,
            memory: PhantomData,
        }
    }

    /// A rectangle of `rows` by `columns` whose row `i` begins `i * stride` elements behind `start`.
    ///
    /// # Safety
    /// For as long as the result lives, every row must be valid memory that nobody else reads or writes.
    pub unsafe fn from_raw(
        start: *mut f32,
        stride: usize,
        rows: usize,
        columns: usize,
    ) -> MatrixMut<'a> {
        MatrixMut {
            start,
            stride,
            rows,
            columns,
            memory: PhantomData,
        }
    }

    /// A rectangle within this one.
    #[inline(always)]
    pub fn part(&mut self, rows: Range<usize>, columns: Range<usize>) -> MatrixMut<'_> {
        assert!(
            rows.start <= rows.end
                && rows.end <= self.rows
                && columns.start <= columns.end
                && columns.end <= self.columns,
            "{rows:?} by {columns:?} of {} by {}",
            self.rows,
            self.columns
        );
        MatrixMut {
            start: self
                .start
                .wrapping_add(rows.start * self.stride + columns.start),
            stride: self.stride,
            rows: rows.len(),
            columns: columns.len(),
            memory: PhantomData,
        }
    }

    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: Whoever made the first rectangle owned all of this row, every part lies within it, and `&mut self` keeps
        // rows apart in time.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.columns) }
    }

    /// The first element. Row `i` begins `i` strides later.
    #[cfg(target_arch = "x86_64")]
    pub fn start(&mut self) -> *mut f32 {
        self.start
    }

    #[cfg(target_arch = "x86_64")]
    pub fn stride(&self) -> usize {
        self.stride
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn columns(&self) -> usize {
        self.columns
    }
}
