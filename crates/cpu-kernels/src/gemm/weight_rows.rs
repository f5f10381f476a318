//! Rows of a weight matrix as they lie in the file.

use crate::simd::array;

/// Weight rows that kernels of few activation rows read at once. They lie far apart in the matrix: a core gets more
/// out of memory by following several streams than one.
pub const READ_STREAMS: usize = 4;

/// Distance from the arithmetic to the weights that are prefetched, across the ends of rows: the processor's own prefetcher
/// stays within a page and starts anew in the next.
pub const PREFETCH_BYTES: usize = 1536;

/// A run of weight rows in the file.
#[derive(Clone, Copy)]
pub struct WeightRows<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) row_bytes: usize,
    count: usize,
    /// Bytes from a row to the next, within each [`READ_STREAMS`] rows.
    apart: usize,
    /// Bytes from the first of [`READ_STREAMS`] rows to the first of the next.
    step: usize,
}

impl<'a> WeightRows<'a> {
    /// `count` rows of `row_bytes`, one every `stride` bytes.
    pub fn new(bytes: &'a [u8], stride: usize, row_bytes: usize, count: usize) -> WeightRows<'a> {
        WeightRows {
            bytes,
            row_bytes,
            count,
            apart: stride,
            step: READ_STREAMS * stride,
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
    pub fn interleaved(self) -> WeightRows<'a> {
        assert!(
            self.count.is_multiple_of(READ_STREAMS),
            "{} rows in {READ_STREAMS} streams",
            self.count
        );
        let stride = self.stride();
        WeightRows {
            apart: self.count / READ_STREAMS * stride,
            step: stride,
            ..self
        }
        .checked()
    }

    pub fn len(self) -> usize {
        self.count
    }

    /// Bytes from a row to the next; only rows in their own order have one.
    pub(super) fn stride(self) -> usize {
        assert_eq!(
            self.step,
            READ_STREAMS * self.apart,
            "rows in their own order"
        );
        self.apart
    }

    #[inline(always)]
    fn offset(self, row: usize) -> usize {
        row % READ_STREAMS * self.apart + row / READ_STREAMS * self.step
    }

    #[inline(always)]
    pub fn row(self, row: usize) -> &'a [u8] {
        &self.bytes[self.offset(row)..][..self.row_bytes]
    }

    /// A row and all the bytes behind it.
    #[inline(always)]
    pub(super) fn row_and_rest(self, row: usize) -> &'a [u8] {
        &self.bytes[self.offset(row)..]
    }

    /// Addresses of the rows after the first `count`, as [`READ_STREAMS`] runs of a quarter of as many.
    #[inline(always)]
    pub(super) fn runs_after(self, count: usize) -> [*const u8; READ_STREAMS] {
        let quarter = count / READ_STREAMS;
        let in_order = self.step == READ_STREAMS * self.apart;
        let start = self.bytes.as_ptr();
        array![start; i => start.wrapping_add(if in_order {
            (count + i * quarter) * self.apart
        } else {
            i * self.apart + quarter * self.step
        })]
    }

    /// Some of the rows. Of interleaved ones, they begin with a first one of [`READ_STREAMS`].
    pub fn slice(self, rows: std::ops::Range<usize>) -> WeightRows<'a> {
        assert!(
            self.step == READ_STREAMS * self.apart || rows.start.is_multiple_of(READ_STREAMS),
            "streams begin together"
        );
        WeightRows {
            bytes: &self.bytes[self.offset(rows.start)..],
            count: rows.len(),
            ..self
        }
        .checked()
    }
}
