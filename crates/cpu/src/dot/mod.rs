//! Dot products of quantized weight rows with quantized activation rows.
//!
//! The value of one output is defined independently of how it is computed. Each group of a weight row (32 values, or 16
//! in some formats) gives an exact integer, the sum of code times code. Group `g` then adds
//! `integer * (weight scale * activation scale)`, and for formats with minimums subtracts
//! `minimum * (sum of activations)`, to lane `g % 16` of sixteen f32; at the end the lanes are folded in the order of
//! [`crate::simd::Floats::sum`]. Integers do not depend on order, so [`matvec`] and [`sideways`] (few rows, weights read
//! packed), [`panel`] (many rows, weights unpacked once) and [`side_by_side`] (few rows in tiles) agree to the last bit on
//! every instruction set, and a row's result does not depend on its neighbours.
//!
//! [`tiled`] is another class of results, for many rows where there are registers for whole tiles: BF16 on both sides.
//!
//! - [`format`](mod@format): what a format must say; the other lower-case names are the formats
//! - [`float`]: F32, F16 and BF16 weights with f32 activations

pub(crate) mod float;
pub(crate) mod format;
mod iq4;
mod k_quants;
mod legacy;
pub(crate) mod matvec;
pub(crate) mod panel;
pub(crate) mod side_by_side;
pub(crate) mod sideways;
#[cfg(test)]
mod tests;
pub(crate) mod tiled;

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
    bytes: &'a [u8],
    row_bytes: usize,
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
    fn stride(self) -> usize {
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
    fn row_and_rest(self, row: usize) -> &'a [u8] {
        &self.bytes[self.offset(row)..]
    }

    /// Where the rows after the first `count` lie, as [`STRANDS`] runs of a quarter of as many.
    #[inline(always)]
    fn runs_after(self, count: usize) -> [*const u8; STRANDS] {
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
