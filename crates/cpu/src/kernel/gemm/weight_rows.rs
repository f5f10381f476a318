//! Rows of a weight matrix as they lie in the file.

use crate::simd::array;

/// Weight rows that kernels of few activation rows work on at once. They lie far apart in the matrix: a core gets more
/// out of memory by following several places than one.
pub(crate) const STRANDS: usize = 4;

/// How far ahead of the arithmetic weights are asked for, across the ends of rows: the processor's own prefetcher stays
/// within a page and starts anew in the next.
pub(crate) const PREFETCH_BYTES: usize = 4096;

/// A run of weight rows in the file.
#[derive(Clone, Copy)]
pub(crate) struct WeightRows<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) row_bytes: usize,
    count: usize,
    /// From a row to the next, within each [`STRANDS`] rows.
    apart: usize,
    /// From the first of [`STRANDS`] rows to the first of the next.
    step: usize,
}

impl<'a> WeightRows<'a> {
    /// `count` rows of `row_bytes`, one every `stride` bytes.
    pub(crate) fn new(
        bytes: &'a [u8],
        stride: usize,
        row_bytes: usize,
        count: usize,
    ) -> WeightRows<'a> {
        WeightRows {
            bytes,
            row_bytes,
            count,
            apart: stride,
            step: STRANDS * stride,
        }
        .checked()
    }

    fn checked(self) -> WeightRows<'a> {
        let end = if self.count == 0 {
            0
        } else {
            self.offset(self.count - 1) + self.row_bytes
        };
        assert!(
            end <= self.bytes.len(),
            "{} rows of {} bytes lie within {}",
            self.count,
            self.row_bytes,
            self.bytes.len()
        );
        self
    }

    /// The same rows in another order: the first of each quarter, then the second of each. There must be whole quarters.
    pub(crate) fn in_strands(self) -> WeightRows<'a> {
        assert!(
            self.count.is_multiple_of(STRANDS),
            "{} rows in {STRANDS} strands",
            self.count
        );
        let stride = self.stride();
        WeightRows {
            apart: self.count / STRANDS * stride,
            step: stride,
            ..self
        }
        .checked()
    }

    pub(crate) fn len(self) -> usize {
        self.count
    }

    /// From a row to the next; only rows in their own order have one.
    pub(super) fn stride(self) -> usize {
        assert_eq!(self.step, STRANDS * self.apart, "rows in their own order");
        self.apart
    }

    #[inline(always)]
    fn offset(self, row: usize) -> usize {
        row % STRANDS * self.apart + row / STRANDS * self.step
    }

    #[inline(always)]
    pub(crate) fn row(self, row: usize) -> &'a [u8] {
        &self.bytes[self.offset(row)..][..self.row_bytes]
    }

    /// A row and all the bytes behind it.
    #[inline(always)]
    pub(super) fn row_and_rest(self, row: usize) -> &'a [u8] {
        &self.bytes[self.offset(row)..]
    }

    /// Where the rows after the first `count` lie, as [`STRANDS`] runs of a quarter of as many.
    #[inline(always)]
    pub(super) fn runs_after(self, count: usize) -> [*const u8; STRANDS] {
        let quarter = count / STRANDS;
        let in_order = self.step == STRANDS * self.apart;
        let start = self.bytes.as_ptr();
        array![start; i => start.wrapping_add(if in_order {
            (count + i * quarter) * self.apart
        } else {
            i * self.apart + quarter * self.step
        })]
    }

    /// Some of the rows. Out of strands, they begin with a first one of [`STRANDS`].
    pub(crate) fn slice(self, rows: std::ops::Range<usize>) -> WeightRows<'a> {
        assert!(
            self.step == STRANDS * self.apart || rows.start.is_multiple_of(STRANDS),
            "strands begin together"
        );
        WeightRows {
            bytes: &self.bytes[self.offset(rows.start)..],
            count: rows.len(),
            ..self
        }
        .checked()
    }
}
